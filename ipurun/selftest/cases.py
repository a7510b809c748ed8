"""The cases of the self-test: small configs that together take every path of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Tuple

from ipurun.errors import ConfigError, nearest

__all__ = ["CASES", "Case", "chosen"]


@dataclass(frozen=True)
class Case:
    """One case.

    Args:
        name: What `--only` takes.
        what: What it is about, for `--list`.
        words: Its config, as on a command line.
        ipus: IPUs that it needs.
        replicas: Replicas among them.
        kind: ``train``; ``resume``: also in two halves; ``cache``: also with the executable of the first run.
        evaluates: Whether it ends with an evaluation.
        predicts: Whether its predictions are compared as well.
    """

    name: str
    what: str
    words: Tuple[str, ...]
    ipus: int = 1
    replicas: int = 1
    kind: str = "train"
    evaluates: bool = False
    predicts: bool = False


_SGD = ("optimizer=sgd", "optimizer.lr=0.05", "schedule=constant")
_MNIST = ("+recipe=mnist", "model.channels=2", "model.hidden=16", "micro_batch_size=4", "max_steps=4")
_DIGITS = _MNIST + _SGD
_GPT = ("+recipe=gpt", "model.vocab_size=32", "model.max_positions=16", "model.hidden_size=16", "model.num_heads=2")
_BERT = (
    "+recipe=bert",
    "model.vocab_size=64",
    "model.max_positions=16",
    "model.sequence_length=16",
    "model.mask_tokens=4",
    "model.hidden_size=16",
    "model.num_heads=2",
)
_VIT = ("+recipe=vit", "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2")
_RESNET = ("+recipe=resnet", "model.image_size=16", "model.width=4")
_SMALL = ("micro_batch_size=2", "max_steps=3")
_SPLIT = ("pipeline.split=[fc1]", "devices=2")


# In float16, a model without steps in its slope, such as ReLU and max pooling, whose gradients jump with rounding; and
# large steps, which rounding the weights does not hide.
_HALF = (*_VIT, *_SMALL, "optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.5", "schedule=constant")
_SCALED = "loss_scaling=128"
_OUTPUTS = ("device_iterations=4", "gradient_accumulation=2", "max_steps=8")


def _optimizer(name: str, what: str, *words: str, kind: str = "train") -> Case:
    return Case(name, what, (*_MNIST, "schedule=constant", *words), kind=kind)


def _digits(name: str, what: str, *words: str, ipus: int = 1, replicas: int = 1, kind: str = "train") -> Case:
    return Case(name, what, _DIGITS + words, ipus, replicas, kind)


# A case evaluates or predicts only where that is its subject: on an IPU, each adds a compilation.
CASES: Tuple[Case, ...] = (
    Case("mnist", "the recipe as it is, with AdamW and its schedule, in a small size", _MNIST, evaluates=True),
    Case("fashion_mnist", "the recipe: group norm", ("+recipe=fashion_mnist", *_SMALL), evaluates=True),
    Case("resnet", "the recipe: batch norm and residuals", _RESNET + _SMALL, evaluates=True),
    # The gradient of a key's bias is zero up to rounding, and Adam would turn that noise into whole steps.
    Case("gpt", "the recipe: integer inputs, embeddings, causal attention", _GPT + _SMALL + _SGD, evaluates=True),
    Case("bert", "the recipe: named inputs, shared weights, its own loss", _BERT + _SMALL + _SGD, evaluates=True),
    Case("vit", "the recipe: patches and attention", _VIT + _SMALL + _SGD, evaluates=True),
    _digits("accumulation", "gradient accumulation", "gradient_accumulation=3"),
    _digits(
        "accumulation_running",
        "gradients averaged as they come",
        "gradient_accumulation=3",
        "replication.mean_strategy=running",
    ),
    _digits("device_iterations", "several weight updates per host call", "device_iterations=2"),
    Case("schedule", "a learning rate that changes at every host call", (*_MNIST, *_SGD[:2], "device_iterations=2")),
    _digits("replicated", "two replicas", "devices=2", ipus=2, replicas=2),
    _digits(
        "replicated_all",
        "replicas, accumulation and device iterations together",
        "devices=2",
        "gradient_accumulation=2",
        "device_iterations=2",
        ipus=2,
        replicas=2,
    ),
    _digits(
        "reduction_sum",
        "gradients summed instead of averaged",
        "devices=2",
        "gradient_accumulation=2",
        "replication.reduction=sum",
        "optimizer.lr=0.01",
        ipus=2,
        replicas=2,
    ),
    _digits(
        "sharded_state",
        "optimizer state divided among the replicas",
        "devices=2",
        "replication.tensor_sharding=true",
        ipus=2,
        replicas=2,
    ),
    _digits(
        "input_groups",
        "four replicas of which two share their input",
        "devices=4",
        "replication.input_group_size=2",
        ipus=4,
        replicas=4,
    ),
    Case(
        "batch_norm_replicated",
        "running statistics of two replicas, then evaluation and prediction with them",
        _RESNET + _SMALL + ("devices=2",),
        ipus=2,
        replicas=2,
        evaluates=True,
        predicts=True,
    ),
    _digits("pipelined", "two stages on two IPUs", *_SPLIT, "gradient_accumulation=4", ipus=2),
    _digits(
        "pipelined_recomputed",
        "two stages that keep only the output of one module",
        *_SPLIT,
        "gradient_accumulation=4",
        "recompute.checkpoints=[conv2]",
        ipus=2,
    ),
    _digits(
        "pipelined_replicated",
        "two replicas of two stages",
        _SPLIT[0],
        "devices=4",
        "gradient_accumulation=4",
        ipus=4,
        replicas=2,
    ),
    Case(
        "pipelined_gpt",
        "five stages on four IPUs: embedding and head share their weight",
        (*_GPT, "pipeline=gpt_tiny_4ipu", "devices=4", "micro_batch_size=1", "max_steps=2", *_SGD),
        ipus=4,
        evaluates=True,
    ),
    _digits("sharded", "two IPUs that take turns", *_SPLIT, "pipeline.strategy=sharded", ipus=2),
    _digits("serial_phased", "two phases on one IPU", _SPLIT[0], "pipeline.strategy=serial_phased"),
    _digits("parallel_phased", "two phases on two IPUs", *_SPLIT, "pipeline.strategy=parallel_phased", ipus=2),
    Case("half", "operations and weights in float16", (*_HALF, "precision=16.16", _SCALED)),
    Case("half_mixed", "operations in float16, weights in float32", (*_HALF, "precision=16.32", _SCALED)),
    Case("half_rules", "float16 with one layer in float32", (*_HALF, "precision=16.16", "precision_rules={head: 32}")),
    Case(
        "half_pipelined",
        "float16 in two stages",
        (*_HALF, "precision=16.16", "pipeline.layers_per_ipu=[1,1]", "devices=2", "gradient_accumulation=4", _SCALED),
        ipus=2,
    ),
    Case(
        "half_gpt",
        "float16 with integer inputs and weights in float32",
        (*_GPT, *_SMALL, *_SGD, "precision=16.32", _SCALED),
    ),
    _digits("sgd", "SGD without momentum", "optimizer.momentum=0"),
    _digits("sgd_decay", "SGD with momentum and weight decay", "optimizer.weight_decay=0.1"),
    _digits(
        "sgd_combined",
        "SGD with one buffer for velocity and gradients",
        "+optimizer.use_combined_accum=true",
        "gradient_accumulation=2",
    ),
    _optimizer(
        "adam", "Adam with L2 regularisation", "optimizer=adam", "optimizer.lr=0.01", "+optimizer.weight_decay=0.1"
    ),
    _optimizer("adamw", "AdamW", "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"),
    _optimizer("rmsprop", "RMSprop", "optimizer=rmsprop", "optimizer.lr=0.005", "+optimizer.eps=1e-4"),
    _optimizer(
        "rmsprop_centered",
        "RMSprop, centred and with momentum",
        "optimizer=rmsprop",
        "optimizer.lr=0.002",
        "+optimizer.eps=1e-3",
        "+optimizer.centered=true",
        "+optimizer.momentum=0.5",
    ),
    _optimizer("lamb", "LAMB", "optimizer=lamb", "optimizer.lr=0.01"),
    _optimizer(
        "lamb_uncorrected",
        "LAMB without bias correction",
        "optimizer=lamb",
        "optimizer.lr=0.01",
        "+optimizer.bias_correction=false",
    ),
    _digits(
        "groups",
        "a parameter group with another learning rate",
        "optimizer.weight_decay=0.1",
        "+optimizer.groups=[{match: [fc2.weight, fc2.bias], lr: 0.2, weight_decay: 0.0}]",
    ),
    _optimizer("resume", "2 + 2 steps equal 4 steps", "optimizer=adamw", "optimizer.lr=0.01", kind="resume"),
    _digits("cache", "a second run with the executable of the first", kind="cache"),
    Case("evaluate", "evaluation whose last batch is padded", (*_DIGITS, "data.eval_samples=13"), evaluates=True),
    Case(
        "predict",
        "prediction on two replicas with several device iterations",
        (*_DIGITS, "devices=2", "inference.device_iterations=2", "data.eval_samples=13"),
        ipus=2,
        replicas=2,
        predicts=True,
    ),
    _digits("loader_workers", "sync loader with worker processes", "loader.workers=1"),
    _digits("loader_async", "loader in another process", "loader.mode=async", "loader.workers=1"),
    _digits(
        "loader_rebatched",
        "loader in another process, which puts batches together",
        "loader.mode=async_rebatched",
        "loader.workers=1",
        "gradient_accumulation=2",
    ),
    _digits("output_all", "the losses of all micro-batches", "output.mode=all", *_OUTPUTS),
    _digits("output_final", "the loss of the last micro-batch", "output.mode=final", *_OUTPUTS),
    _digits("output_sum", "the sum of the losses", "output.mode=sum", *_OUTPUTS),
    _digits(
        "output_every_n", "the losses of every second weight update", "output.mode=every_n", "output.every=2", *_OUTPUTS
    ),
)


def chosen(names: Iterable[str]) -> List[Case]:
    """Return the cases with these names, in their usual order; all cases if none is named.

    Raises:
        ConfigError: A name is not that of a case.
    """
    wanted = list(names)
    known = [case.name for case in CASES]
    for name in wanted:
        if name not in known:
            close = nearest(name, known)
            raise ConfigError(
                f"there is no case `{name}`",
                "command line: --only",
                known=", ".join(close or known),
                fix=f"--only {close[0]}" if close else "ipurun selftest --list",
            )
    return [case for case in CASES if not wanted or case.name in wanted]
