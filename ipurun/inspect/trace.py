"""Trace one micro-batch through a model and its loss, if possible without allocating either.

An estimate is made from a trace; placement needs the order in which it calls modules and begins blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data import default_collate

import ipurun.emulator as emulator
from ipurun.api.calls import Call, construct, last_call
from ipurun.config.schema import RunConfig, canonical_precision
from ipurun.datasets.synthetic import parse_sample
from ipurun.emulator.graph import (
    BlockRecorder,
    Captured,
    Node,
    Placement,
    Recorder,
    active_recorder,
    capture,
    is_supported,
)
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.batch_items import as_call, map_tensors
from ipurun.inspect.facts import EndedBlock, ModuleCall, UserBlock
from ipurun.inspect.lightning.steps import steps_of
from ipurun.inspect.loss import ModelWithLoss, make_loss
from ipurun.inspect.model import (
    count_parameters,
    emptied,
    make_meta_model,
    make_model,
    stop_caching,
    user_blocks,
    without_compiler,
)
from ipurun.inspect.precision import cast_hooks, cast_weights, half_inputs
from ipurun.inspect.sampling import make_collate, seeded
from ipurun.inspect.targets import innermost_line
from ipurun.inspect.traced_model import TracedModel
from ipurun.inspect.traced_ops import read_graph

__all__ = ["ForwardOrder", "strategy_of", "trace_forward_order", "trace_model"]

# Parameters above which a model that cannot be traced on the meta device is not made on the host either.
_LARGEST_REAL_MODEL = 500_000_000
_TINY_MODEL = 1_000_000
# A trace with real numbers uses this many samples and is scaled.
_REAL_SAMPLES = 2
_PREFIX = "model."  # of the names of the user's modules in `ModelWithLoss`


def trace_model(
    config: RunConfig,
    *,
    sample: Any = None,
    model: Optional[nn.Module] = None,
    training: bool = True,
    module_precision: Optional[Mapping[str, str]] = None,
    strategy: Any = None,
    collate: Optional[Callable[[List[Any]], Any]] = None,
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
        collate: The collate function of the data's own loader.

    Raises:
        ConfigError: The model cannot be traced, with the operation and the line in the model's file.
    """
    size = config.micro_batch_size
    if not training and config.inference.micro_batch_size is not None:
        size = config.inference.micro_batch_size
    rules = dict(module_precision or {})
    first_error: Optional[ConfigError] = None
    # A model whose training mode cannot be traced at all can still be planned.
    for training_mode in (True, False) if training else (False,):
        for make_attempt, device, samples in _attempts(config, model):
            attempted = make_attempt()
            if attempted is None:
                continue
            count = min(size, samples) if samples else size
            batch = _micro_batch(config, sample, count, device, collate)
            try:
                traced = _trace(config, attempted, batch, count, training, rules, strategy, training_mode)
            except ConfigError as error:
                first_error = first_error or error
                continue
            traced = traced.with_micro_batch(size)
            if first_error is None or traced.refused or training_mode == training:
                return traced
            refusal = first_error.problems[0]
            return dataclasses.replace(traced, refused=f"{refusal.seen} ({refusal.where})")
    assert first_error is not None
    raise first_error


def strategy_of(calls: Sequence[Call]) -> Any:
    """Return the emulator's execution strategy for the calls of a plan, None for the default."""
    given = last_call("setExecutionStrategy", calls)
    return None if given is None else construct(given.args[0], emulator)


def _ended_block(recorder: Recorder) -> Optional[Placement]:
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
        is_plain = model is None and canonical_precision(config.precision) == "32.32"
        return _small_model(config, largest=_TINY_MODEL) if is_plain else None

    def without_memory() -> nn.Module:
        return model if model is not None else make_meta_model(config)

    def without_values() -> Optional[nn.Module]:
        # A table that the constructor computes is known to forward only if it was computed with real numbers.
        made = _small_model(config)
        return None if made is None else emptied(made)

    return (
        (tiny, "cpu", 0),
        (without_memory, "meta", 0),
        (without_values, "meta", 0),
        (lambda: _small_model(config), "cpu", _REAL_SAMPLES),
    )


def _small_model(config: RunConfig, largest: int = _LARGEST_REAL_MODEL) -> Optional[nn.Module]:
    try:
        if count_parameters(make_meta_model(config)) > largest:
            return None
        return make_model(config, emulator)
    except ConfigError:
        return None


def _micro_batch(
    config: RunConfig, sample: Any, size: int, device: str, own: Optional[Callable[[List[Any]], Any]] = None
) -> Any:
    collate: Callable[[List[Any]], Any] = default_collate
    if sample is not None:
        collate = make_collate(config.loader, own)
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
    """Progress of a capture, for the message if it fails."""

    last: Optional[Node] = None
    unsupported: Dict[str, None] = field(default_factory=dict)
    refusals: Dict[str, str] = field(default_factory=dict)

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
    precision = canonical_precision(config.precision)
    stop_caching(model)
    progress = _Progress()
    cast_weights(model, precision, rules)
    # Any module may end a block, so each one gets a hook; in a run `Annotations` hooks only those that do.
    handles = [module.register_forward_hook(_reopen_ended_block) for module in model.modules()]
    handles += cast_hooks(model, precision, rules)
    if precision.startswith("16"):
        batch = half_inputs(batch, config.loss.name is not None, config.loss.target)
    loss = make_loss(config.loss, emulator)
    steps = steps_of(model, takes_tensor=isinstance(batch, torch.Tensor))
    wrapped = ModelWithLoss(
        model,
        loss,
        config.loss,
        returns_output=not training,
        half_weights=precision == "16.32",
        steps=steps,
        step="training" if training or steps is None or not steps.has("validation") else "validation",
    )
    wrapped.train(training_mode)
    recurrent = {name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)}
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
        prefix=_PREFIX,
        training=training,
        unsupported=tuple(progress.unsupported),
        refused=_refused(progress.refusals),
        recurrent=recurrent,
    )


def _refused(refusals: Mapping[str, str]) -> str:
    """Return what an IPU would refuse in one line: the first of it in full."""
    shown = [f"{' '.join(text.split())} ({line})" for text, line in list(refusals.items())[:1]]
    return "; ".join(shown) + (f"; and {len(refusals) - 1} more" if len(refusals) > 1 else "")


def _reopen_ended_block(module: nn.Module, args: Any, output: Any) -> None:
    recorder = active_recorder()
    ended = None if recorder is None else _ended_block(recorder)
    if recorder is not None and ended is not None:
        recorder.begin_block(*ended)


@contextlib.contextmanager
def _plain_recurrence() -> Iterator[None]:
    """Run a layer of an LSTM step by step: the one operation that torch has for a CPU would show no products."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@_plain_recurrence()
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
        refusals=progress.refusals,
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


@dataclass
class ForwardOrder:
    """The module calls of a forward pass and the blocks of its code.

    Args:
        calls: Calls in order, under the names of the user's model, without those of the loss.
        operations: Operations of the whole pass.
        blocks: Blocks that `forward` itself begins.
        ended: Blocks that end where a module does.
    """

    calls: List[ModuleCall] = field(default_factory=list)
    operations: int = 0
    blocks: List[UserBlock] = field(default_factory=list)
    ended: List[EndedBlock] = field(default_factory=list)


def trace_forward_order(
    config: RunConfig, sample: Any = None, collate: Optional[Callable[[List[Any]], Any]] = None
) -> Tuple[Optional[ForwardOrder], str]:
    """Trace the model of a config with its loss; return its forward order, or None and the reason.

    Args:
        config: The run. Its `sample` gives the shapes when no item of the data is passed.
        sample: One item of the data set.
        collate: The collate function of the data's own loader.
    """
    if sample is None and not config.sample:
        return None, "the model cannot be traced without an item of the data"
    blocks = BlockRecorder()
    try:
        with seeded(config.seed), _recording(blocks.requested_ipus) as order:
            trace_model(config, sample=sample, training=False, strategy=blocks, collate=collate)
    except ConfigError as error:
        problem = error.problems[0]
        return None, f"{problem.what} ({problem.where}: {problem.seen})"
    return order, ""


@contextlib.contextmanager
def _recording(requested_ipus: Mapping[str, Optional[int]]) -> Iterator[ForwardOrder]:
    """Record the last forward pass of a `ModelWithLoss` that is captured inside.

    The model runs in training mode, in which it may call more modules (auxiliary heads), but without the cost of a
    backward pass.

    Args:
        requested_ipus: Block id -> the IPU that the block requests, filled while the model runs.
    """
    order = ForwardOrder()
    names: Dict[int, str] = {}

    def enter(module: nn.Module, inputs: Any) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if isinstance(module, ModelWithLoss):
            module.train()
            order.ended.clear()
            names.clear()
            names.update({id(part): name for name, part in module.model.named_modules()})

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if not isinstance(module, ModelWithLoss):
            place = _ended_block(recorder) if id(module) in names else None
            if place is not None:
                order.ended.append(EndedBlock(names[id(module)], place.block_id, requested_ipus[place.block_id]))
            return
        order.operations = len(recorder.graph.nodes)
        order.calls = [
            ModuleCall(path[len(_PREFIX) :], position)
            for path, position in recorder.calls
            if path.startswith(_PREFIX) or path == _PREFIX[:-1]
        ]
        at_modules = {block.block_id for block in user_blocks(module.model)}
        begun = [(e.info["placement"], e.position) for e in recorder.graph.events if e.kind == "begin_block"]
        order.blocks = [
            UserBlock(None, requested_ipus[place.block_id], place.block_id, position)
            for (place, position), (before, _) in zip(begun, [(None, 0), *begun])
            if place != before and place.block_id not in at_modules  # re-opening a block begins it a second time
        ]

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()
