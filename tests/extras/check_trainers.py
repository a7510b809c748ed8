"""Features of the training loop beside the same ones of Lightning and of the Trainer of transformers, in numbers."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EarlyStopping, ModelCheckpoint
from same_problem import (
    BATCH,
    LAYOUTS,
    STEPS_PER_EPOCH,
    Module,
    Net,
    Points,
    assert_same_weights,
    first_of_each,
    initial_net,
    ours,
    splits,
    theirs,
)
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR
from torch.utils.data import DataLoader, SequentialSampler

import ipurun

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn
except ImportError:
    EMAWeightAveraging, WeightAveraging, get_ema_avg_fn = None, Callback, None

averages = pytest.mark.skipif(EMAWeightAveraging is None, reason="Lightning averages weights since 2.6")
ADAM = {"_target_": "poptorch.optim.Adam", "lr": 0.02}
HALF = 18  # a step in the middle of the second epoch, and the end of a host call in every layout
layouts = pytest.mark.parametrize("layout", list(LAYOUTS))
# In one go, and resumed in the middle.
resumed = pytest.mark.parametrize("stop_at", [None, HALF], ids=["straight", "resumed"])


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.02)


def _iterations(layout: str) -> int:
    return LAYOUTS[layout].get("device_iterations", 1)


@resumed
@layouts
def test_losses_weights_and_evaluations(layout, stop_at):
    module = Module(_adam)
    theirs(module, 3)
    run = ours(layout, stop_at, optimizer=ADAM, epochs=3)
    assert_same_weights(run.state["model"], module.weights())
    every = _iterations(layout)
    expected = [sum(module.losses[i : i + every]) / every for i in range(0, len(module.losses), every)]
    assert run.values("train", "loss") == pytest.approx(expected, rel=2e-4)
    for name in ("loss", "accuracy"):
        assert run.values("eval", name) == pytest.approx([m[name] for m in module.evaluated], rel=2e-4)


@pytest.mark.parametrize("stop_at", [None, 6], ids=["straight", "resumed"])
@pytest.mark.parametrize(
    ("patience", "change", "threshold"), [(2, 0.0, None), (1, 0.02, None), (None, 0.0, 0.62), (3, 0.05, 0.55)]
)
@pytest.mark.parametrize("layout", ["plain", "everything"])
def test_early_stopping_ends_at_the_same_step(layout, stop_at, patience, change, threshold):
    epochs = 25
    stopping = EarlyStopping("loss", change, epochs if patience is None else patience, stopping_threshold=threshold)
    # A rate at which the loss of the evaluation soon rises again.
    module = Module(lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    trainer = theirs(module, epochs, [stopping])
    keys: Dict[str, Any] = {"metric": "loss", "min_change": change}
    keys.update(
        {} if patience is None else {"patience": patience}, **({} if threshold is None else {"threshold": threshold})
    )
    run = ours(layout, stop_at, optimizer={**ADAM, "lr": 0.05}, epochs=epochs, early_stopping=keys)
    assert run.result.step == trainer.global_step < epochs * STEPS_PER_EPOCH
    assert run.result.stop_reason.startswith("early stopping")


class _EveryFew(WeightAveraging):
    """Lightning's average, read at the end of every few steps: what a host sees of device iterations."""

    def __init__(self, every: int, first: int = 0, **how: Any) -> None:
        super().__init__(**how)
        self.every, self.first = every, first

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and (step_idx + 1) % self.every == 0 and step_idx >= self.first


@averages
@resumed
@layouts
def test_ema_of_weights_and_its_evaluation(layout, stop_at):
    every = _iterations(layout)
    if every == 1:
        average = EMAWeightAveraging(decay=0.9)
    else:
        average = _EveryFew(every, avg_fn=get_ema_avg_fn(0.9**every))
    module = Module(_adam)
    theirs(module, 3, [average])
    run = ours(layout, stop_at, optimizer=ADAM, epochs=3, averaging={"kind": "ema", "decay": 0.9})
    assert_same_weights(run.state["average"]["model"], module.weights())  # Lightning ends with the average
    for name in ("loss", "accuracy"):
        assert run.values("eval", f"ema_{name}") == pytest.approx([m[name] for m in module.evaluated], rel=2e-4)


@averages
@resumed
@layouts
def test_tail_average(layout, stop_at):
    module = Module(_adam)
    theirs(module, 3, [_EveryFew(_iterations(layout), first=2 * STEPS_PER_EPOCH)])
    tail = {"kind": "tail", "start_step": 2 * STEPS_PER_EPOCH}
    run = ours(layout, stop_at, optimizer=ADAM, epochs=3, averaging=tail)
    assert_same_weights(run.state["average"]["model"], module.weights())


@resumed
@layouts
def test_gradient_clipping(layout, stop_at):
    module = Module(_adam)
    theirs(module, 2, gradient_clip_val=0.05)
    run = ours(layout, stop_at, optimizer={**ADAM, "max_grad_norm": 0.05}, epochs=2)
    assert_same_weights(run.state["model"], module.weights())
    free = Module(_adam)
    theirs(free, 2)
    assert not torch.allclose(free.weights()["head.weight"], module.weights()["head.weight"], atol=1e-3)


SCHEDULES = {
    "one_cycle": (
        {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.05, "pct_start": 0.4},
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=36, pct_start=0.4),
    ),
    "warm_restarts": (
        {"_target_": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "T_0": 6, "T_mult": 2},
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=6, T_mult=2),
    ),
}


@resumed
@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("layout", ["plain", "replicas"])
def test_schedules_of_torch(layout, stop_at, name):
    node, make = SCHEDULES[name]
    module = Module(_adam, make)
    theirs(module, 3)
    run = ours(layout, stop_at, optimizer=ADAM, schedule=node, epochs=3)
    assert run.values("train", "lr") == pytest.approx(module.rates, rel=1e-6, abs=1e-12)
    assert_same_weights(run.state["model"], module.weights())  # OneCycleLR also moves beta1


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_are_sampled_at_each_host_call(name):
    node, make = SCHEDULES[name]
    module = Module(_adam, make)
    theirs(module, 3)
    run = ours("device_iterations", HALF, optimizer=ADAM, schedule=node, epochs=3)
    assert run.values("train", "lr") == pytest.approx(first_of_each(module.rates, 3), rel=1e-6, abs=1e-12)


@resumed
@layouts
def test_label_smoothing(layout, stop_at):
    module = Module(_adam, smoothing=0.2)
    theirs(module, 2)
    run = ours(layout, stop_at, optimizer=ADAM, epochs=2, loss_args={"label_smoothing": 0.2})
    assert_same_weights(run.state["model"], module.weights())


@resumed
@layouts
def test_freezing_and_unfreezing(layout, stop_at):
    how = {"backbone_initial_lr": 0.02, "initial_denom_lr": 1.0, "lambda_func": lambda epoch: 1.0}
    module = Module(_adam)
    theirs(module, 3, [BackboneFinetuning(unfreeze_backbone_at_epoch=2, **how)])
    run = ours(layout, stop_at, optimizer=ADAM, epochs=3, freeze=["body"], unfreeze={"body": 2 * STEPS_PER_EPOCH})
    assert_same_weights(run.state["model"], module.weights())


def test_weights_of_a_lightning_checkpoint_are_loaded():
    module = Module(_adam)
    theirs(module, 1).save_checkpoint("theirs.ckpt")
    keys = {"init_from": "theirs.ckpt", "init": {"rename": {"backbone": "body"}}}
    run = ours("plain", optimizer={**ADAM, "lr": 0.0}, max_steps=1, **keys)
    assert_same_weights(run.state["model"], module.weights())


def test_the_best_checkpoint_and_predictions():
    keeper = ModelCheckpoint(monitor="accuracy", mode="max", dirpath=".")
    module = Module(lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    trainer = theirs(module, 8, [keeper])
    run = ours("everything", HALF, optimizer={**ADAM, "lr": 0.05}, epochs=8)
    assert run.result.best == pytest.approx(float(keeper.best_model_score))
    assert f"step={run.result.best_step}." in keeper.best_model_path
    expected = torch.cat(trainer.predict(module, DataLoader(splits()["eval"], BATCH), ckpt_path=keeper.best_model_path))
    found = ipurun.predict("run", split="eval", best=True, quiet=True, columns=["index", "target"])
    torch.testing.assert_close(found.outputs, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(torch.as_tensor(found.columns["target"]), Points(40, seed=1).labels)


def test_limits():
    module = Module(_adam)
    trainer = theirs(module, 3, limit_train_batches=6, limit_val_batches=2)
    limit = {"train_calls": 6, "eval_calls": 2}
    run = ours("plain", 9, optimizer=ADAM, epochs=3, limit=limit)
    assert run.result.step == trainer.global_step == 18
    assert_same_weights(run.state["model"], module.weights())
    assert run.values("eval", "loss") == pytest.approx([m["loss"] for m in module.evaluated], rel=2e-4)


class _Named(Points):
    def __getitem__(self, index: int) -> Dict[str, Any]:
        return {"points": self.points[index], "labels": self.labels[index]}


class _WithLoss(Net):
    config = transformers.PretrainedConfig()

    def forward(self, points: Any, labels: Any = None) -> Dict[str, Any]:
        scores = super().forward(points)
        loss = {} if labels is None else {"loss": torch.nn.functional.cross_entropy(scores, labels)}
        return {**loss, "logits": scores}


class _InOrder(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class _Rates(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.rates: List[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


def _hugging_face(epochs: int, callbacks=(), **keys: Any) -> Any:
    """Train with the Trainer of transformers; return it, and the learning rate of each step."""
    transformers.trainer.is_datasets_available = lambda: False  # it takes the folder tests/datasets for the package
    model, rates = _WithLoss(), _Rates()
    model.load_state_dict(initial_net().state_dict())
    arguments = transformers.TrainingArguments(
        "hf",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=epochs,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"learning_rate": 0.02, "save_strategy": "no", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, **keys},
    )
    trainer = _InOrder(
        model, arguments, train_dataset=_Named(), eval_dataset=_Named(40, seed=1), callbacks=[rates, *callbacks]
    )
    trainer.train()
    return trainer, rates.rates


def _weights(trainer: Any) -> Dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in trainer.model.state_dict().items()}


ADAMW = {"_target_": "poptorch.optim.AdamW", "lr": 0.02, "weight_decay": 0.0}
CURVES = {
    "linear": ({"_target_": "ipurun.schedules.linear"}, {"lr_scheduler_type": "linear"}),
    "cosine": ({"_target_": "ipurun.schedules.cosine"}, {"lr_scheduler_type": "cosine"}),
    "polynomial": (
        {"_target_": "ipurun.schedules.polynomial", "power": 3.0, "final_factor": 0.1},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3.0, "lr_end": 0.002}},
    ),
    "restarts": (
        {"_target_": "ipurun.schedules.warm_restarts", "cycles": 3},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
    ),
}


@resumed
@pytest.mark.parametrize("name", list(CURVES))
def test_schedules_of_hugging_face(name, stop_at):
    node, arguments = CURVES[name]
    trainer, rates = _hugging_face(3, **arguments)
    run = ours("replicas", stop_at, optimizer=ADAMW, schedule=node, epochs=3)
    assert run.values("train", "lr") == pytest.approx(rates, rel=1e-6, abs=1e-9)
    assert_same_weights(run.state["model"], _weights(trainer))


@resumed
@layouts
def test_no_decay_smoothing_and_clipping_of_hugging_face(layout, stop_at):
    trainer, _ = _hugging_face(3, weight_decay=2.0, label_smoothing_factor=0.1, max_grad_norm=0.1)
    optimizer = {**ADAMW, "weight_decay": 2.0, "no_decay": "norms_and_biases", "max_grad_norm": 0.1}
    run = ours(layout, stop_at, optimizer=optimizer, epochs=3, loss_args={"label_smoothing": 0.1})
    assert_same_weights(run.state["model"], _weights(trainer))
    assert (
        float(run.state["model"]["body.1.weight"].abs().mean())
        > 0.5
        > float(run.state["model"]["head.weight"].abs().mean())
    )  # only the second decays


@pytest.mark.parametrize("layout", ["plain", "everything"])
def test_early_stopping_of_hugging_face(layout):
    keys = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.0)
    best = {"load_best_model_at_end": True, "greater_is_better": False, "save_total_limit": 1}
    trainer, _ = _hugging_face(25, [stopping], learning_rate=0.05, **keys, **best)
    early = {"metric": "loss", "patience": 2}
    run = ours(layout, HALF, optimizer={**ADAMW, "lr": 0.05}, epochs=25, early_stopping=early, monitor="loss")
    assert run.result.step == trainer.state.global_step < 25 * STEPS_PER_EPOCH
    assert run.result.best == pytest.approx(trainer.state.best_metric, rel=2e-4)
