"""What a model is made of, which buffers it changes, and in which order its modules and blocks run."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data import default_collate

import ipurun.emulator as emulator
from ipurun.config.schema import LossConfig, RunConfig
from ipurun.emulator.graph import IStageManager, Placement, Recorder, active_recorder
from ipurun.emulator.options import PipelinedExecution, Stage
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import as_call, split_target
from ipurun.inspect.facts import EndedBlock, ModuleCall, UserBlock
from ipurun.inspect.loss import ModelWithLoss
from ipurun.inspect.sampling import seeded

__all__ = [
    "CACHE_NOTE",
    "Walk",
    "begins_blocks",
    "changing_buffers",
    "ended_block",
    "first_item",
    "reopen_ended_blocks",
    "user_blocks",
    "record_walk",
    "stop_caching",
    "structure",
    "trace_walk",
]


def ended_block(recorder: Recorder) -> Optional[Placement]:
    """The last block of a trace, if its end has come and no other one has begun."""
    ended = False
    for event in reversed(recorder.graph.events):
        if event.kind == "begin_block":
            return event.info["placement"] if ended else None
        ended = ended or event.kind == "end_block"
    return None


def reopen_ended_blocks(model: nn.Module) -> List[Any]:
    """Hooks behind all modules, since nobody knows before a trace which of them end blocks; what `Annotations` does in
    a run.
    """
    return [module.register_forward_hook(_begin_again) for module in model.modules()]


def _begin_again(module: nn.Module, args: Any, output: Any) -> None:
    recorder = active_recorder()
    ended = None if recorder is None else ended_block(recorder)
    if recorder is not None and ended is not None:
        recorder.begin_block(*ended)


_HOOK = "BlockHook"  # part of the name of what BeginBlock installs, in PopTorch and in the emulator
_LEGACY = ("LegacyBeginBlockFn",)


@dataclass
class Walk:
    """The order in which a forward pass calls modules, and what its code says of blocks.

    Args:
        calls: Calls in order, under the names of the user's model; those of the loss are left out.
        operations: Operations of the whole pass.
        blocks: Blocks that `forward` itself begins.
        ended: Blocks that end where a module does.
    """

    calls: List[ModuleCall] = field(default_factory=list)
    operations: int = 0
    blocks: List[UserBlock] = field(default_factory=list)
    ended: List[EndedBlock] = field(default_factory=list)


class _AnyBlocks(PipelinedExecution):
    """Places any block somewhere, as nobody has said yet how blocks become stages, and keeps what each asked for."""

    def __init__(self) -> None:
        super().__init__(emulator.AutoStage.AutoIncrement)
        self.asked: Dict[str, Optional[int]] = {}
        self._stages_manager = _AnyStage(self.asked)


class _AnyStage(IStageManager):
    def __init__(self, asked: Dict[str, Optional[int]]) -> None:
        super().__init__()
        self._asked = asked

    def getStage(self, block_id: str) -> Stage:  # noqa: N802  # PopTorch's name
        self._asked.setdefault(block_id, self._current_ipu)
        return Stage(block_id)._setStage(1 + list(self._asked).index(block_id))


def structure(model: nn.Module) -> Dict[str, Any]:
    """Fields of `Facts` that can be read off a model as it stands, on any device and without running it."""
    names: Dict[int, List[str]] = {}
    shapes: Dict[str, Tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[name] = tuple(parameter.shape)
    return {
        "module_names": tuple(name for name, _ in model.named_modules() if name),
        "module_kinds": {name: type(module).__name__ for name, module in model.named_modules()},
        "parameter_shapes": shapes,
        "shared_parameters": tuple(tuple(several) for several in names.values() if len(several) > 1),
        "user_blocks": tuple(user_blocks(model)),
    }


def user_blocks(model: nn.Module) -> List[UserBlock]:
    """Blocks that the model's code begins at modules, by ``poptorch.BeginBlock``."""
    blocks = []
    for name, module in model.named_modules():
        marks = [hook for hook in module._forward_pre_hooks.values() if _HOOK in type(hook).__name__]
        marks += [module] if type(module).__name__ in _LEGACY else []  # type: ignore[list-item]  # it has the same fields
        for mark in marks:
            ipu, block_id = getattr(mark, "_ipu_id", None), getattr(mark, "_user_id", None)
            blocks.append(UserBlock(name, ipu, block_id))
    return blocks


def begins_blocks(model: nn.Module, engine_module: ModuleType) -> bool:
    """Whether the files of the model's classes know PopTorch, so that `forward` may begin blocks."""
    own = {id(engine_module), id(emulator)} | {
        id(getattr(engine_module, name)) for name in ("Block", "BeginBlock", "BlockFunction")
    }
    files: Set[str] = {type(module).__module__ for module in model.modules()}
    return any(
        id(value) in own
        for file in files
        if not file.startswith("torch.") and file in sys.modules
        for value in vars(sys.modules[file]).values()
    )


@contextlib.contextmanager
def record_walk(asked: Optional[Mapping[str, Optional[int]]] = None) -> Iterator[Walk]:
    """Record the forward pass of a `ModelWithLoss` that is captured inside (by `trace_model`); the last one counts.

    It runs as in training, whose modules may be more (auxiliary heads), without the cost of a backward pass.

    Args:
        asked: Block id -> IPU that the block asks for, filled while the model runs; else that of the strategy counts.
    """
    walk = Walk()
    names: Dict[int, str] = {}

    def enter(module: nn.Module, inputs: Any) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if isinstance(module, ModelWithLoss):
            module.train()
            walk.calls.clear()
            walk.ended.clear()
            names.clear()
            names.update({id(part): name for name, part in module.model.named_modules()})
        elif id(module) in names:
            walk.calls.append(ModuleCall(names[id(module)], len(recorder.graph.nodes)))

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if not isinstance(module, ModelWithLoss):
            place = ended_block(recorder) if id(module) in names else None
            if place is not None:
                ipu = place.ipu_id if asked is None else asked[place.block_id]
                walk.ended.append(EndedBlock(names[id(module)], place.block_id, ipu))
            return
        walk.operations = len(recorder.graph.nodes)
        at_modules = {block.block_id for block in user_blocks(module.model)}
        begun = [(e.info["placement"], e.position) for e in recorder.graph.events if e.kind == "begin_block"]
        walk.blocks = [
            UserBlock(None, place.ipu_id if asked is None else asked[place.block_id], place.block_id, position)
            for (place, position), (before, _) in zip(begun, [(None, 0), *begun])
            if place != before and place.block_id not in at_modules  # what goes on in a block begins it once more
        ]

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield walk
    finally:
        for handle in handles:
            handle.remove()


def trace_walk(config: RunConfig, sample: Any = None) -> Tuple[Optional[Walk], str]:
    """Trace the model of a config with its loss; the walk, or None and why there is none.

    Args:
        config: The run. Its `sample` tells the shapes where no item of the data is given.
        sample: One item of the data set.
    """
    from ipurun.inspect.trace import trace_model  # deferred: few runs need it

    if sample is None and not config.sample:
        return None, "without an item of the data the model cannot be traced"
    try:
        strategy = _AnyBlocks()
        with seeded(config.seed), record_walk(strategy.asked) as walk:
            trace_model(config, sample=sample, training=False, strategy=strategy)
    except ConfigError as error:
        problem = error.problems[0]
        return None, f"{problem.what} ({problem.where}: {problem.seen})"
    return walk, ""


def first_item(data: Any) -> Optional[Any]:
    """The first sample of a data set that has an order, None of any other."""
    try:
        return data[0]
    except Exception:  # user code of any kind: loading will show what is wrong with it
        return None


def changing_buffers(model: nn.Module, data: Any, loss: LossConfig, seed: int) -> Tuple[str, ...]:
    """Names of the buffers that a forward pass in training mode writes to.

    Statistics of normalisation layers are known by their names. For other buffers the model runs once on two
    samples; where that fails, nothing is claimed, and the engine's own check at compile time remains.

    Args:
        model: The model; its buffers, mode and the random states are as before afterwards.
        data: A map-style data set to take two samples from, or None.
        loss: Tells which item of a sample is the target.
        seed: Seed of the trial.
    """
    known = set(_running_statistics(model))
    others = [name for name, _ in model.named_buffers() if name not in known]
    if others and data is not None:
        known |= _written_in_trial(model, data, loss, seed)
    return tuple(name for name, _ in model.named_buffers() if name in known)


def _running_statistics(model: nn.Module) -> Tuple[str, ...]:
    names = []
    for prefix, module in model.named_modules():
        if getattr(module, "track_running_stats", False) and getattr(module, "running_mean", None) is not None:
            own = ("running_mean", "running_var", "num_batches_tracked")
            names += [f"{prefix}.{name}" if prefix else name for name in own]
    return tuple(names)


def _written_in_trial(model: nn.Module, data: Any, loss: LossConfig, seed: int) -> set:
    before: Dict[str, torch.Tensor] = dict(model.named_buffers())
    versions = {name: buffer._version for name, buffer in before.items()}
    values = {name: buffer.clone() for name, buffer in before.items()}
    modes = {module: module.training for module in model.modules()}
    try:
        with seeded(seed), torch.no_grad():
            batch = default_collate([data[index % len(data)] for index in range(2)])
            args, kwargs = as_call(batch)
            if loss.name is not None:
                args, kwargs, _ = split_target(args, kwargs, loss.target)
            model.train()
            model(*args, **kwargs)
        return {
            name
            for name, buffer in model.named_buffers()
            if name not in before or buffer is not before[name] or buffer._version != versions[name]
        }
    except Exception:  # user code of any kind: compiling will show what is wrong with it
        return set()
    finally:
        _restore(model, before, values)
        for module, mode in modes.items():
            module.training = mode


def _restore(model: nn.Module, before: Dict[str, torch.Tensor], values: Dict[str, torch.Tensor]) -> None:
    for name, buffer in before.items():
        prefix, _, own = name.rpartition(".")
        with torch.no_grad():
            buffer.copy_(values[name])
        model.get_submodule(prefix)._buffers[own] = buffer


CACHE_NOTE = "the model's config.use_cache is off: its keys and values of past tokens are for generating text"


def stop_caching(model: nn.Module) -> bool:
    """Set `config.use_cache` of a model and its parts to False; whether one of them was on.

    That is how models of transformers say that every layer is to keep its keys and values for the next token. Such a
    cache grows from a tensor without elements, which no IPU takes, and would come back to the host with every output.
    """
    configs: List[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    return bool(caching)
