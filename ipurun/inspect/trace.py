"""Trace one micro-batch through a model and its loss, if possible without allocating either."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils.data import default_collate

import ipurun.emulator as emulator
from ipurun.api.calls import Call, construct, last_call
from ipurun.config.schema import RunConfig
from ipurun.datasets.synthetic import parse_sample
from ipurun.emulator.graph import Captured, Node, Placement, Recorder, active_recorder, capture, is_supported
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.batch_items import as_call, map_tensors
from ipurun.inspect.loss import ModelWithLoss, make_loss
from ipurun.inspect.model import count_parameters, make_meta_model, make_model, stop_caching, without_compiler
from ipurun.inspect.precision import cast_hooks, cast_weights, half_inputs
from ipurun.inspect.sampling import make_collate
from ipurun.inspect.targets import innermost_line
from ipurun.inspect.traced_model import TracedModel
from ipurun.inspect.traced_ops import read_graph

__all__ = ["ended_block", "strategy_of", "trace_model"]

# Parameters above which a model that cannot be traced on the meta device is not made on the host either.
_LARGEST_REAL_MODEL = 500_000_000
_TINY_MODEL = 1_000_000
# A trace with real numbers uses this many samples and is scaled.
_REAL_SAMPLES = 2


def trace_model(
    config: RunConfig,
    *,
    sample: Any = None,
    model: Optional[nn.Module] = None,
    training: bool = True,
    module_precision: Optional[Mapping[str, str]] = None,
    strategy: Any = None,
) -> TracedModel:
    """Trace the model of a config with its loss on one micro-batch.

    Args:
        config: The run. Its `sample` gives the shapes of the data when no item of the data is passed.
        sample: One item of the data set, as the data set returns it.
        model: A model on the meta device, made from the config by default. Its types are changed.
        training: Whether to trace the backward pass.
        module_precision: Module name -> 16 or 32, patterns resolved (`Plan.module_precision`).
        strategy: The emulator's execution strategy, which places the blocks of the model's own code. None means
            PopTorch's default.

    Raises:
        ConfigError: The model cannot be traced, with the operation and the line in the model's file.
    """
    size = config.micro_batch_size
    if not training and config.inference.micro_batch_size is not None:
        size = config.inference.micro_batch_size
    rules = dict(module_precision or {})
    first_error: Optional[ConfigError] = None
    # A model that compares a random number in training mode only (to skip a layer) can still be planned.
    for training_mode in (True, False) if training else (False,):
        for make_attempt, device, samples in _attempts(config, model):
            attempted = make_attempt()
            if attempted is None:
                continue
            count = min(size, samples) if samples else size
            batch = _micro_batch(config, sample, count, device)
            try:
                traced = _trace(config, attempted, batch, count, training, rules, strategy, training_mode)
            except ConfigError as error:
                first_error = first_error or error
                continue
            traced = traced.with_micro_batch(size)
            if first_error is None or training_mode == training:
                return traced
            refusal = first_error.problems[0]
            return dataclasses.replace(traced, refused=f"{refusal.seen} ({refusal.where})")
    assert first_error is not None
    raise first_error


def strategy_of(calls: Sequence[Call]) -> Any:
    """Return the emulator's execution strategy for the calls of a plan, None for the default."""
    given = last_call("setExecutionStrategy", calls)
    return None if given is None else construct(given.args[0], emulator)


def ended_block(recorder: Recorder) -> Optional[Placement]:
    """Return the last block of a capture if it has ended and no other has begun."""
    ended = False
    for event in reversed(recorder.graph.events):
        if event.kind == "begin_block":
            return event.info["placement"] if ended else None
        ended = ended or event.kind == "end_block"
    return None


def _attempts(
    config: RunConfig, model: Optional[nn.Module]
) -> Sequence[Tuple[Callable[[], Optional[nn.Module]], str, int]]:
    """List ways to trace a model, the cheapest first: how to make it, its device, and how many samples at most."""

    def tiny() -> Optional[nn.Module]:
        # torch's kernels for meta tensors take seconds to load, which a tiny model can do without.
        is_plain = model is None and config.precision in ("32", "32.32")
        return _small_model(config, largest=_TINY_MODEL) if is_plain else None

    def without_memory() -> nn.Module:
        return model if model is not None else make_meta_model(config)

    def emptied() -> Optional[nn.Module]:
        # A table that the constructor computes is known to forward only if it was computed with real numbers.
        made = _small_model(config)
        return None if made is None else made.to("meta")

    return (
        (tiny, "cpu", 0),
        (without_memory, "meta", 0),
        (emptied, "meta", 0),
        (lambda: _small_model(config), "cpu", _REAL_SAMPLES),
    )


def _small_model(config: RunConfig, largest: int = _LARGEST_REAL_MODEL) -> Optional[nn.Module]:
    try:
        if count_parameters(make_meta_model(config)) > largest:
            return None
        return make_model(config, emulator)
    except ConfigError:
        return None


def _micro_batch(config: RunConfig, sample: Any, size: int, device: str) -> Any:
    collate: Callable[[List[Any]], Any] = default_collate
    if sample is not None:
        collate = make_collate(config.loader)
    else:
        items = parse_sample(config.sample)
        generator = torch.Generator().manual_seed(config.seed)
        drawn = [
            item.draw(generator) if device != "meta" else torch.empty(item.shape, dtype=item.dtype) for item in items
        ]
        named = items[0].name is not None
        sample = {str(i.name): value for i, value in zip(items, drawn)} if named else tuple(drawn)
    batch = collate([sample])
    repeated = map_tensors(lambda t: t.expand(size, *t.shape[1:]) if t.dim() else t, batch)
    if device == "meta":
        return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), repeated)
    return map_tensors(lambda t: t.clone(), repeated)


@dataclass
class _Progress:
    """How far a capture has come, for the message if it fails."""

    last: Optional[Node] = None
    unsupported: Dict[str, None] = field(default_factory=dict)

    def see(self, node: Node) -> None:
        self.last = node
        schema = getattr(node.op, "_schema", None)
        if schema is not None and schema.name.startswith("aten::") and not is_supported(node.name):
            self.unsupported[f"{node.name} at {node.source or 'an unknown line'}"] = None


def _trace(
    config: RunConfig,
    model: nn.Module,
    batch: Any,
    size: int,
    training: bool,
    rules: Mapping[str, str],
    strategy: Any,
    training_mode: bool,
) -> TracedModel:
    precision = {"16": "16.16", "32": "32.32"}.get(config.precision, config.precision)
    stop_caching(model)
    cast_weights(model, precision, rules)
    # Any module may end a block, so each one gets a hook; in a run `Annotations` hooks only those that do.
    handles = [module.register_forward_hook(_reopen_ended_block) for module in model.modules()]
    handles += cast_hooks(model, precision, rules)
    if precision.startswith("16"):
        batch = half_inputs(batch, config.loss.name is not None, config.loss.target)
    loss = make_loss(config.loss, emulator)
    wrapped = ModelWithLoss(model, loss, config.loss, returns_output=not training, half_weights=precision == "16.32")
    wrapped.train(training_mode)
    progress = _Progress()
    try:
        with without_compiler():
            captured = wrapped.tracing_flag.retry(lambda: _capture(wrapped, batch, training, progress, strategy))
    except Exception as error:  # the user's code can raise anything
        raise ConfigError(_problem(error, progress.last)) from error
    finally:
        for handle in handles:
            handle.remove()
    return read_graph(
        captured.graph,
        micro_batch_size=size,
        prefix="model.",
        training=training,
        unsupported=tuple(progress.unsupported),
    )


def _reopen_ended_block(module: nn.Module, args: Any, output: Any) -> None:
    recorder = active_recorder()
    ended = None if recorder is None else ended_block(recorder)
    if recorder is not None and ended is not None:
        recorder.begin_block(*ended)


def _capture(wrapped: ModelWithLoss, batch: Any, training: bool, progress: _Progress, strategy: Any) -> Captured:
    copy_layers = all(parameter.is_meta for parameter in wrapped.parameters())
    options = emulator.Options()
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    args, kwargs = as_call(batch)
    inputs: List[torch.Tensor] = []
    map_tensors(inputs.append, (args, kwargs))

    def call() -> Any:
        result = wrapped(*args, **kwargs)
        if training and isinstance(result, torch.Tensor) and result.numel() == 1:
            # The run finds out whether PopTorch recognises the loss without this mark; here it is known.
            return emulator.identity_loss(result, reduction="none")
        return result

    return capture(
        call,
        parameters=dict(wrapped.named_parameters()),
        buffers=dict(wrapped.named_buffers()),
        inputs=inputs,
        training=training,
        options=options,
        modules=dict(wrapped.named_modules()),
        check_op=progress.see,
        forward_only=True,
        copy_layers=copy_layers,
    )


def _problem(error: Exception, last: Optional[Node]) -> Problem:
    line = innermost_line(error, torch, emulator) or (last.source if last is not None else "")
    seen = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Problem(
        "the model cannot be traced",
        where=line if last is None else f"{line} (last operation: {last.name})",
        seen=f"{type(error).__name__}: {seen}",
        fix="change the line above: a model is captured once, with fixed shapes and without reading values",
    )
