"""From blocks of modules to stages of operations, and what crosses between stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ipurun.estimate.types import StageLayout
from ipurun.inspect.traced_model import TracedModel, TracedOp

__all__ = [
    "boundary_values",
    "checkpoint_ops",
    "layout_of_blocks",
    "layout_of_cuts",
    "module_ranges",
    "ops_of_stage",
    "received_values",
    "single_ipu",
]


def layout_of_blocks(
    profile: TracedModel,
    blocks: Sequence[Tuple[str, int]],
    checkpoints: Iterable[str] = (),
    phases: Optional[Mapping[str, int]] = None,
) -> StageLayout:
    """The layout that blocks give: each begins where its module is entered and lasts until the next one begins.

    Args:
        profile: The model.
        blocks: (module, IPU) of each block of the config; an empty module name is the model itself. Blocks that the
            model's own code begins are kept among them. None at all: everything on one IPU.
        checkpoints: Modules whose results are kept where the rest is recomputed.
        phases: Module of a block -> its phase, in phased execution.
    """
    places: List[Tuple[int, int]] = []
    by_module, phase_of = dict(blocks), phases or {}
    current, phase, inside, own = by_module.get("", 0), phase_of.get("", 0), "", 0
    for op in profile.ops:
        for module in _outer_first(op.module):
            if module in by_module and module and not _within(inside, module):
                current, phase = by_module[module], phase_of.get(module, phase)
        inside = op.module
        if op.ipu is not None and op.ipu != own:  # 0 is also where operations before any block of the code are
            current = own = op.ipu
        places.append((current, phase))
    layout = _layout(places, checkpoint_ops(profile, checkpoints))
    return layout if phases else replace(layout, phase_of_stage=())


def layout_of_cuts(
    profile: TracedModel, cuts: Sequence[int], ipus: Optional[Sequence[int]] = None, checkpoints: Sequence[int] = ()
) -> StageLayout:
    """The layout whose stages begin at the given operations.

    Args:
        profile: The model.
        cuts: First operation of every stage but the first, rising.
        ipus: IPU of each stage; 0, 1, 2, ... unless given.
        checkpoints: Operations whose results are kept where the rest is recomputed.
    """
    starts = set(cuts)
    stage, stages = 0, []
    for op in profile.ops:
        stage += op.index in starts
        stages.append(stage)
    given = tuple(ipus) if ipus is not None else tuple(range(len(starts) + 1))
    return StageLayout(tuple(stages), given, tuple(sorted(checkpoints)))


def single_ipu(profile: TracedModel, checkpoints: Iterable[str] = ()) -> StageLayout:
    """Everything on one IPU."""
    return StageLayout((0,) * len(profile.ops), (0,), checkpoint_ops(profile, checkpoints))


def checkpoint_ops(profile: TracedModel, modules: Iterable[str]) -> Tuple[int, ...]:
    """The operations that compute the results of modules."""
    wanted = set(modules)
    if not wanted:
        return ()
    last: Dict[str, int] = {}
    for op in profile.ops:
        if op.output_bytes:
            for module in _outer_first(op.module):
                if module in wanted:
                    last[module] = op.index
    return tuple(sorted(set(last.values())))


def module_ranges(profile: TracedModel) -> Dict[str, Tuple[int, int]]:
    """First and last operation of every module that computes anything."""
    ranges: Dict[str, Tuple[int, int]] = {}
    for op in profile.ops:
        for module in _outer_first(op.module):
            first, _ = ranges.get(module, (op.index, op.index))
            ranges[module] = (first, op.index)
    return ranges


def ops_of_stage(profile: TracedModel, layout: StageLayout, stage: int) -> List[TracedOp]:
    """The operations of a stage, in order."""
    return [op for op, at in zip(profile.ops, layout.stage_of_op) if at == stage]


def received_values(profile: TracedModel, layout: StageLayout) -> List[Set[int]]:
    """For each stage, the operations of other stages whose results it reads."""
    received: List[Set[int]] = [set() for _ in layout.ipu_of_stage]
    for op, stage in zip(profile.ops, layout.stage_of_op):
        for producer in op.inputs:
            if layout.stage_of_op[producer] != stage:
                received[stage].add(producer)
    return received


def boundary_values(profile: TracedModel, layout: StageLayout) -> List[int]:
    """Bytes that each stage receives from other IPUs for one micro-batch."""
    return [
        sum(
            profile.ops[producer].output_bytes
            for producer in producers
            if layout.ipu_of_op(producer) != layout.ipu_of_stage[stage]
        )
        for stage, producers in enumerate(received_values(profile, layout))
    ]


def _layout(places: Sequence[Tuple[int, int]], checkpoints: Tuple[int, ...]) -> StageLayout:
    """A stage for each run of operations with the same IPU and phase."""
    stages: List[int] = []
    place_of_stage: List[Tuple[int, int]] = []
    for place in places:
        if not place_of_stage or place_of_stage[-1] != place:
            place_of_stage.append(place)
        stages.append(len(place_of_stage) - 1)
    ipus, phases = tuple(ipu for ipu, _ in place_of_stage), tuple(phase for _, phase in place_of_stage)
    return StageLayout(tuple(stages), ipus, checkpoints, phases)


def _outer_first(module: str) -> List[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _within(module: str, outer: str) -> bool:
    return module == outer or module.startswith(outer + ".")
