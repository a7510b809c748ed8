"""Tracing a model for the planner: one micro-batch through model and loss without allocating either."""

from __future__ import annotations

import dataclasses
import os
import traceback
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils.data import default_collate

import ipurun.emulator as emulator
from ipurun.api.calls import Call, construct, last_call
from ipurun.config.schema import RunConfig
from ipurun.datasets.synthetic import parse_sample
from ipurun.emulator.graph import Captured, Node, capture, is_supported
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.batch_items import as_call, map_tensors, split_target
from ipurun.inspect.loss import ModelWithLoss, make_loss
from ipurun.inspect.precision import cast_hooks, cast_weights
from ipurun.inspect.structure import reopen_ended_blocks, stop_caching
from ipurun.inspect.targets import make
from ipurun.inspect.traced_model import TracedModel
from ipurun.inspect.traced_ops import read_graph

__all__ = ["meta_model", "trace_model", "strategy_of"]

# Above this, a model is not made for real only because it cannot be made without memory.
_LARGEST_REAL_MODEL = 500_000_000
_TINY_MODEL = 1_000_000
# A trace with real numbers is done on few samples and scaled.
_REAL_SAMPLES = 2


@dataclass
class _Trace:
    """What is known of a trace while it runs: for the message where it fails."""

    last: Optional[Node] = None
    unsupported: Optional[Dict[str, None]] = None

    def see(self, node: Node) -> None:
        self.last = node
        schema = getattr(node.op, "_schema", None)
        if schema is not None and schema.name.startswith("aten::") and not is_supported(node.name):
            self.unsupported = self.unsupported or {}
            self.unsupported[f"{node.name} at {node.source or 'an unknown line'}"] = None


def meta_model(config: RunConfig) -> nn.Module:
    """The model of a config with shapes and no memory, however large it is.

    A model whose constructor looks at values cannot be made that way: it is made for real, then emptied.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        with torch.device("meta"):
            model = make(config.model, "model", engine_module=emulator)
    except ConfigError:
        model = make(config.model, "model", engine_module=emulator).to("meta")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "`model._target_` gives no torch.nn.Module",
            seen=f"an object of type {type(model).__name__}",
            key="model._target_",
        )
    return model


def strategy_of(calls: Sequence[Call]) -> Any:
    """The emulator's execution strategy for the calls of a plan; None: the default."""
    given = last_call("setExecutionStrategy", calls)
    return None if given is None else construct(given.args[0], emulator)


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
        config: The run. Its `sample` gives the shapes of the data, unless an item of the data is at hand.
        sample: One item of the data set, as the data set gives it.
        model: A model on the meta device; made from the config unless given. Its types are changed.
        training: Whether to trace the backward pass.
        module_precision: Module name -> 16 or 32, patterns resolved (`Plan.module_precision`).
        strategy: The emulator's execution strategy, which places blocks of the model's own code; PopTorch's default
            unless given.

    Raises:
        ConfigError: The model cannot be traced, with the operation and the line in the model's file.
    """
    size = config.micro_batch_size
    if not training and config.inference.micro_batch_size is not None:
        size = config.inference.micro_batch_size
    rules = dict(module_precision or {})
    first: Optional[ConfigError] = None
    # A model that draws and compares a number in training mode only (to skip a layer) can still be planned.
    for training_mode in (True, False) if training else (False,):
        for attempt in _attempts(config, model):
            subject, device, samples = attempt()
            if subject is None:
                continue
            count = min(size, samples) if samples else size
            batch = _micro_batch(config, sample, count, device)
            try:
                traced = _trace(config, subject, batch, count, training, rules, strategy, training_mode)
            except ConfigError as error:
                first = first or error
                continue
            profile = traced.with_micro_batch(size)
            if first is None or training_mode == training:
                return profile
            refusal = first.problems[0]
            return dataclasses.replace(profile, refused=f"{refusal.seen} ({refusal.where})")
    assert first is not None
    raise first


def _attempts(
    config: RunConfig, model: Optional[nn.Module]
) -> Sequence[Callable[[], Tuple[Optional[nn.Module], str, int]]]:
    """Ways to trace a model, the cheapest first: without memory, then for real where it is small."""

    def tiny_for_real() -> Tuple[Optional[nn.Module], str, int]:
        # torch's kernels for meta tensors take seconds to load, which a tiny model need not wait for.
        made = (
            _small_model(config, largest=_TINY_MODEL) if model is None and config.precision in ("32", "32.32") else None
        )
        return made, "cpu", 0

    def on_meta() -> Tuple[Optional[nn.Module], str, int]:
        return (model if model is not None else meta_model(config)), "meta", 0

    def emptied() -> Tuple[Optional[nn.Module], str, int]:
        # A table that the constructor computes is known to forward only if it was computed for real.
        made = _small_model(config)
        return (made.to("meta") if made is not None else None), "meta", 0

    def for_real() -> Tuple[Optional[nn.Module], str, int]:
        return _small_model(config), "cpu", _REAL_SAMPLES

    return (tiny_for_real, on_meta, emptied, for_real)


def _small_model(config: RunConfig, largest: int = _LARGEST_REAL_MODEL) -> Optional[nn.Module]:
    try:
        if sum(parameter.numel() for parameter in meta_model(config).parameters()) > largest:
            return None
        return make(config.model, "model", engine_module=emulator)
    except ConfigError:
        return None


def _micro_batch(config: RunConfig, sample: Any, size: int, device: str) -> Any:
    if sample is None:
        items = parse_sample(config.sample)
        generator = torch.Generator().manual_seed(config.seed)
        drawn = [
            item.draw(generator) if device != "meta" else torch.empty(item.shape, dtype=item.dtype) for item in items
        ]
        named = items[0].name is not None
        sample = {str(i.name): value for i, value in zip(items, drawn)} if named else tuple(drawn)
    batch = default_collate([sample])
    repeated = map_tensors(lambda t: t.expand(size, *t.shape[1:]) if t.dim() else t, batch)
    if device == "meta":
        return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), repeated)
    return map_tensors(lambda t: t.clone(), repeated)


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
    handles = [*reopen_ended_blocks(model), *cast_hooks(model, precision, rules)]
    if precision.startswith("16"):
        batch = _half_inputs(config, batch)
    step = ModelWithLoss(model, make_loss(config.loss, emulator), config.loss, returns_output=not training)
    step.train(training_mode)
    trace = _Trace()
    try:
        captured = step.answer.attempt(lambda: _capture(step, batch, training, trace, strategy))
    except Exception as error:  # user code of any kind fails in any way
        raise ConfigError(_problem(error, trace)) from error
    finally:
        for handle in handles:
            handle.remove()
    return read_graph(
        captured.graph,
        micro_batch_size=size,
        prefix="model.",
        training=training,
        unsupported=tuple(trace.unsupported or ()),
    )


def _capture(step: ModelWithLoss, batch: Any, training: bool, trace: _Trace, strategy: Any) -> Captured:
    options = emulator.Options()
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    args, kwargs = as_call(batch)
    inputs: List[torch.Tensor] = []
    map_tensors(inputs.append, (args, kwargs))

    def call() -> Any:
        result = step(*args, **kwargs)
        if training and isinstance(result, torch.Tensor) and result.numel() == 1:
            # Whether PopTorch finds the loss by itself is for the run to tell; here it is known which it is.
            return emulator.identity_loss(result, reduction="none")
        return result

    return capture(
        call,
        parameters=dict(step.named_parameters()),
        buffers=dict(step.named_buffers()),
        inputs=inputs,
        training=training,
        options=options,
        modules=dict(step.named_modules()),
        check_op=trace.see,
    )


def _half_inputs(config: RunConfig, batch: Any) -> Any:
    kept: List[int] = []
    if config.loss.name is not None:
        args, kwargs = as_call(batch)
        map_tensors(lambda t: kept.append(id(t)), split_target(args, kwargs, config.loss.target)[2])
    return map_tensors(lambda t: t.half() if t.is_floating_point() and id(t) not in kept else t, batch)


def _problem(error: Exception, trace: _Trace) -> Problem:
    node = trace.last
    line = _users_line(error) or (node.source if node is not None else "")
    seen = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Problem(
        "the model cannot be traced, so there is nothing to plan with",
        where=f"{line} (last operation: {node.name})" if node is not None else line,
        seen=f"{type(error).__name__}: {seen}",
        fix="a model is captured once, with fixed shapes and without values: see the line above",
    )


def _users_line(error: Exception) -> str:
    """File and line of the innermost frame that is neither torch's nor the tracer's."""
    own = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (torch, emulator))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(own) and os.path.dirname(frame.filename) != os.path.dirname(__file__)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
