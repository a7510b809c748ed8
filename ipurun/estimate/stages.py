"""Layouts from blocks of modules or cuts, and the values that cross between stages."""

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
    "with_parents",
]


def layout_of_blocks(
    traced: TracedModel,
    blocks: Sequence[Tuple[str, int]],
    checkpoints: Iterable[str] = (),
    phases: Optional[Mapping[str, int]] = None,
) -> StageLayout:
    """Return the layout of blocks: each begins where its module is entered and lasts until the next one begins.

    Args:
        traced: The model.
        blocks: (module, IPU) of each block of the config; an empty module name is the model itself. Blocks begun in
            the model's code are added. Without any block, everything runs on one IPU.
        checkpoints: Modules whose results are kept while the rest is recomputed.
        phases: Module of a block -> its phase, in phased execution.
    """
    places: List[Tuple[int, int]] = []
    by_module, phase_of = dict(blocks), phases or {}
    current, phase, inside, own = by_module.get("", 0), phase_of.get("", 0), "", 0
    for op in traced.ops:
        for module in with_parents(op.module):
            if module in by_module and module and not _within(inside, module):
                current, phase = by_module[module], phase_of.get(module, phase)
        inside = op.module
        if op.ipu is not None and op.ipu != own:  # 0 also marks operations before any block of the code
            current = own = op.ipu
        places.append((current, phase))
    layout = _layout(places, checkpoint_ops(traced, checkpoints))
    return layout if phases else replace(layout, phase_of_stage=())


def layout_of_cuts(
    traced: TracedModel, cuts: Sequence[int], ipus: Optional[Sequence[int]] = None, checkpoints: Sequence[int] = ()
) -> StageLayout:
    """Return the layout whose stages begin at the given operations.

    Args:
        traced: The model.
        cuts: First operation of every stage but the first, in order.
        ipus: IPU of each stage; default 0, 1, 2, ...
        checkpoints: Operations whose results are kept while the rest is recomputed.
    """
    starts = set(cuts)
    stage, stages = 0, []
    for op in traced.ops:
        stage += op.index in starts
        stages.append(stage)
    given = tuple(ipus) if ipus is not None else tuple(range(len(starts) + 1))
    return StageLayout(tuple(stages), given, tuple(sorted(checkpoints)))


def single_ipu(traced: TracedModel, checkpoints: Iterable[str] = ()) -> StageLayout:
    """Return the layout of everything on one IPU."""
    return StageLayout((0,) * len(traced.ops), (0,), checkpoint_ops(traced, checkpoints))


def checkpoint_ops(traced: TracedModel, modules: Iterable[str]) -> Tuple[int, ...]:
    """Return the operations that compute the results of modules."""
    wanted = set(modules)
    if not wanted:
        return ()
    last: Dict[str, int] = {}
    for op in traced.ops:
        if op.output_bytes:
            for module in with_parents(op.module):
                if module in wanted:
                    last[module] = op.index
    return tuple(sorted(set(last.values())))


def module_ranges(traced: TracedModel) -> Dict[str, Tuple[int, int]]:
    """Return the first and last operation of every module that computes anything."""
    ranges: Dict[str, Tuple[int, int]] = {}
    for op in traced.ops:
        for module in with_parents(op.module):
            first, _ = ranges.get(module, (op.index, op.index))
            ranges[module] = (first, op.index)
    return ranges


def ops_of_stage(traced: TracedModel, layout: StageLayout, stage: int) -> List[TracedOp]:
    """Return the operations of a stage, in order."""
    return [op for op, at in zip(traced.ops, layout.stage_of_op) if at == stage]


def received_values(traced: TracedModel, layout: StageLayout) -> List[Set[int]]:
    """Return for each stage the operations of other stages whose results it reads."""
    received: List[Set[int]] = [set() for _ in layout.ipu_of_stage]
    for op, stage in zip(traced.ops, layout.stage_of_op):
        for producer in op.inputs:
            if layout.stage_of_op[producer] != stage:
                received[stage].add(producer)
    return received


def boundary_values(traced: TracedModel, layout: StageLayout) -> List[int]:
    """Return the bytes that each stage receives from other IPUs for one micro-batch."""
    return [
        sum(
            traced.ops[producer].output_bytes
            for producer in producers
            if layout.ipu_of_op(producer) != layout.ipu_of_stage[stage]
        )
        for stage, producers in enumerate(received_values(traced, layout))
    ]


def _layout(places: Sequence[Tuple[int, int]], checkpoints: Tuple[int, ...]) -> StageLayout:
    """Make a stage of each run of operations with the same IPU and phase."""
    stages: List[int] = []
    place_of_stage: List[Tuple[int, int]] = []
    for place in places:
        if not place_of_stage or place_of_stage[-1] != place:
            place_of_stage.append(place)
        stages.append(len(place_of_stage) - 1)
    ipus, phases = tuple(ipu for ipu, _ in place_of_stage), tuple(phase for _, phase in place_of_stage)
    return StageLayout(tuple(stages), ipus, checkpoints, phases)


def with_parents(module: str) -> List[str]:
    """Return the names of the modules that contain a module, outermost first, and its own."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _within(module: str, outer: str) -> bool:
    return module == outer or module.startswith(outer + ".")
