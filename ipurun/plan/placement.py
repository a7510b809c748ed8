"""Where the parts of the model run: blocks, IPUs and the execution strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

from ipurun.config.device_schema import PipelineConfig
from ipurun.plan.findings import Findings
from ipurun.plan.patterns import find_module
from ipurun.plan.types import Call, Placement, Symbol

__all__ = ["Layout", "lay_out", "names_first_block", "strategy_call"]

_AUTO_STAGES = {"auto": "SameAsIpu", "same_as_ipu": "SameAsIpu", "auto_increment": "AutoIncrement"}
_FIRST_BLOCK = "first"


@dataclass(frozen=True)
class Layout:
    """The model over the IPUs of one replica.

    Args:
        placements: Modules that begin a block.
        ipus: IPUs of one replica.
        blocks: Number of blocks, the model's beginning included.
    """

    placements: Tuple[Placement, ...]
    ipus: int
    blocks: int


def lay_out(
    split: Sequence[str],
    strategy: str,
    module_names: Sequence[str],
    key: str,
    found: Findings,
    *,
    named_start: bool = False,
) -> Layout:
    """Blocks for a list of modules at which the next IPU (or phase) begins.

    Args:
        split: Module names.
        strategy: `pipeline.strategy`.
        module_names: Modules of the model in order of definition; empty: not known, and not checked.
        key: The config key of the split.
        found: Takes the problems.
        named_start: Whether the beginning of the model has to be a block with a name, too.
    """
    modules: List[str] = []
    for name in split:
        module = find_module(name, key, module_names, found) if module_names else name
        if module in modules:
            found.problem(f"`{key}` names `{name}` twice", seen=str(list(split)), fix="name each module once")
        modules.append(module or name)
    placements = [Placement(module, _ipu(index, strategy), module) for index, module in enumerate(modules, start=1)]
    phased = strategy.endswith("phased")
    if named_start or (phased and modules):
        # Phases list their blocks, so that nothing may run outside of one.
        placements.insert(0, Placement("", 0, _FIRST_BLOCK))
    if phased and not modules and key == "pipeline.split":
        found.problem(
            "phased execution needs phases",
            seen=f"pipeline.strategy={strategy}, {key}=[]",
            fix=f"{key}=[MODULE, ...], each next phase beginning at one of them",
        )
    _check_order(modules, module_names, key, found)
    ipus = {"serial_phased": 1, "parallel_phased": 2}.get(strategy, len(modules) + 1)
    return Layout(tuple(placements), ipus, len(modules) + 1)


def names_first_block(value: Any) -> bool:
    """Whether a strategy written by the user speaks of the block at the model's beginning."""
    if isinstance(value, Call):
        return any(names_first_block(argument) for argument in value.args)
    if isinstance(value, (list, tuple)):
        return any(names_first_block(item) for item in value)
    return bool(value == _FIRST_BLOCK)


def _ipu(index: int, strategy: str) -> int:
    if strategy == "serial_phased":
        return 0
    return index % 2 if strategy == "parallel_phased" else index


def _check_order(modules: Sequence[str], known: Sequence[str], key: str, found: Findings) -> None:
    positions = [known.index(module) for module in modules if module in known]
    if positions != sorted(positions):
        found.note(
            f"{key} is not in the order in which the model defines its modules; stages have to follow the order "
            "in which they run"
        )
    first = next((name for name in known if name), None)
    if modules and modules[0] == first:
        found.note(f"{key} begins with the first module, {first}: IPU 0 gets only what runs before it")


def strategy_call(pipeline: PipelineConfig, layout: Layout, found: Findings) -> Call:
    """The execution strategy of a layout, as the object that setExecutionStrategy takes."""
    if pipeline.strategy in ("pipelined", "sharded"):
        if pipeline.liveness is not None or pipeline.separate_backward_phase is not None:
            found.problem(
                "`pipeline.liveness` and `pipeline.separate_backward_phase` belong to phased execution",
                seen=f"pipeline.strategy={pipeline.strategy}",
                fix="pipeline.strategy=serial_phased, or leave both out",
            )
        name = "PipelinedExecution" if pipeline.strategy == "pipelined" else "ShardedExecution"
        stage = Symbol(f"poptorch.AutoStage.{_AUTO_STAGES[pipeline.auto_stage]}")
        return Call(f"poptorch.{name}", (stage,))
    phases = tuple([placement.block_id] for placement in layout.placements)
    if pipeline.strategy == "serial_phased":
        return Call("poptorch.SerialPhasedExecution", phases, chain=_serial_setters(pipeline))
    return Call("poptorch.ParallelPhasedExecution", phases, chain=_parallel_setters(pipeline, found))


def _serial_setters(pipeline: PipelineConfig) -> Tuple[Call, ...]:
    liveness = pipeline.liveness
    calls = (
        None if liveness is None else Call("setTensorsLiveness", (Symbol(f"poptorch.Liveness.{liveness}"),)),
        _separate(pipeline),
    )
    return tuple(call for call in calls if call is not None)


def _parallel_setters(pipeline: PipelineConfig, found: Findings) -> Tuple[Call, ...]:
    if pipeline.liveness in ("OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"):
        found.problem(
            f"parallel phased execution cannot keep tensors {pipeline.liveness}",
            seen=f"pipeline.liveness={pipeline.liveness}",
            known="AlwaysLive, OffChipAfterFwd",
            fix="pipeline.liveness=OffChipAfterFwd",
        )
    off_chip = pipeline.liveness == "OffChipAfterFwd"
    calls = (
        None if pipeline.liveness is None else Call("sendTensorsOffChipAfterFwd", (off_chip,)),
        _separate(pipeline),
    )
    return tuple(call for call in calls if call is not None)


def _separate(pipeline: PipelineConfig) -> Optional[Call]:
    use = pipeline.separate_backward_phase
    return None if use is None else Call("useSeparateBackwardPhase", (use,))
