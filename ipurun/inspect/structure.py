"""What a model is made of, and in which order its modules run: the facts that placement is checked against."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import ipurun.emulator as emulator
from ipurun.config.schema import RunConfig
from ipurun.emulator.graph import IStageManager, active_recorder
from ipurun.emulator.options import PipelinedExecution, Stage
from ipurun.errors import ConfigError
from ipurun.inspect.ended_blocks import ended_block
from ipurun.inspect.facts import EndedBlock, ModuleCall, OwnBlock
from ipurun.inspect.loss import Step
from ipurun.inspect.sampling import seeded

__all__ = ["Walk", "begins_blocks", "first_item", "own_blocks", "record_walk", "structure", "walked"]

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
    blocks: List[OwnBlock] = field(default_factory=list)
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
        "own_blocks": tuple(own_blocks(model)),
    }


def own_blocks(model: nn.Module) -> List[OwnBlock]:
    """Blocks that the model's code begins at modules, by ``poptorch.BeginBlock``."""
    blocks = []
    for name, module in model.named_modules():
        marks = [hook for hook in module._forward_pre_hooks.values() if _HOOK in type(hook).__name__]
        marks += [module] if type(module).__name__ in _LEGACY else []  # type: ignore[list-item]  # it has the same fields
        for mark in marks:
            ipu, block_id = getattr(mark, "_ipu_id", None), getattr(mark, "_user_id", None)
            blocks.append(OwnBlock(name, ipu, block_id))
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
    """Record the forward pass of a `Step` that is captured inside (by `profile_model`); the last one counts.

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
        if isinstance(module, Step):
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
        if not isinstance(module, Step):
            place = ended_block(recorder) if id(module) in names else None
            if place is not None:
                ipu = place.ipu_id if asked is None else asked[place.block_id]
                walk.ended.append(EndedBlock(names[id(module)], place.block_id, ipu))
            return
        walk.operations = len(recorder.graph.nodes)
        at_modules = {block.block_id for block in own_blocks(module.model)}
        begun = [(e.info["placement"], e.position) for e in recorder.graph.events if e.kind == "begin_block"]
        walk.blocks = [
            OwnBlock(None, place.ipu_id if asked is None else asked[place.block_id], place.block_id, position)
            for (place, position), (before, _) in zip(begun, [(None, 0), *begun])
            if place != before and place.block_id not in at_modules  # what goes on in a block begins it once more
        ]

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield walk
    finally:
        for handle in handles:
            handle.remove()


def walked(config: RunConfig, sample: Any = None) -> Tuple[Optional[Walk], str]:
    """Trace the model of a config with its loss; the walk, or None and why there is none.

    Args:
        config: The run. Its `sample` tells the shapes where no item of the data is given.
        sample: One item of the data set.
    """
    from ipurun.inspect.trace import profile_model  # deferred: few runs need it

    if sample is None and not config.sample:
        return None, "without an item of the data the model cannot be traced"
    try:
        strategy = _AnyBlocks()
        with seeded(config.seed), record_walk(strategy.asked) as walk:
            profile_model(config, sample=sample, training=False, strategy=strategy)
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
