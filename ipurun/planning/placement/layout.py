"""The layout of a model over the IPUs of one replica: its blocks, stages and phases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, Optional, Sequence, Tuple

from ipurun.api.calls import Call
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.placement import checks
from ipurun.planning.placement.forms import requested_blocks
from ipurun.planning.placement.order import BlockStart, block_starts, count_stages, number_user_blocks, order_names
from ipurun.planning.placement.stages import FIRST_BLOCK, StageList, place_blocks
from ipurun.planning.plan import Placement

__all__ = ["Layout", "lay_out", "names_first_block"]


@dataclass(frozen=True)
class Layout:
    """The model over the IPUs of one replica.

    Args:
        placements: Modules that begin a block.
        ipus: IPUs of one replica.
        stages: Forward stages: one more than the switches between IPUs.
        auto_increment: Whether stages are numbered in order, because an IPU is used twice.
        listed: Stages or phases to pass to the strategy.
    """

    placements: Tuple[Placement, ...]
    ipus: int
    stages: int
    auto_increment: bool = False
    listed: Optional[StageList] = None


def lay_out(
    pipeline: PipelineConfig,
    facts: Facts,
    found: Findings,
    group: str = "pipeline",
    named_start: bool = False,
    numbers_blocks: bool = True,
) -> Layout:
    """Return the layout of one mode.

    Args:
        pipeline: The placement.
        facts: The model; without module names, names are not checked.
        found: Takes problems and notes.
        group: ``pipeline`` or ``inference``: the config group that holds the keys.
        named_start: Whether the beginning of the model must be a named block, too.
        numbers_blocks: Whether ipurun's strategy assigns stages to blocks, not one that the user wrote.
    """
    before = len(found.problems)
    requested = requested_blocks(pipeline, facts, group, found)
    placements, listed = place_blocks(pipeline, requested, facts, found)
    placements = checks.without_duplicates(placements, found)
    has_unplaced = numbers_blocks and any(block.ipu is None for block in facts.user_blocks)
    if listed is not None:
        facts = replace(facts, user_blocks=tuple(listed.placed(block) for block in facts.user_blocks))
    elif has_unplaced:
        checks.check_unplaced(facts.user_blocks, pipeline, found)
        facts = number_user_blocks(placements, facts)
    phased = pipeline.strategy.endswith("phased")
    if phased and not placements and group == "pipeline":
        found.problem(
            "phased execution needs phases",
            seen=f"pipeline.strategy={pipeline.strategy}, {group}.split=[]",
            fix=f"{group}.split=[MODULE, ...], with the first module of each further phase",
            key="pipeline.strategy",
        )
    if (named_start or (phased and placements)) and all(placement.module for placement in placements):
        # Phases list their blocks, so nothing may run outside of one.
        origin = f"pipeline.strategy={pipeline.strategy}" if phased else "rule: the strategy names the first block"
        placements.insert(0, Placement("", 0, FIRST_BLOCK, origin))
    in_code = [
        Placement(block.module, block.ipu, block.block_id or block.module, "the model's code")
        for block in facts.user_blocks
        if block.module is not None and block.ipu is not None
    ]
    from_split = all(placement.origin.endswith(".split") or not placement.module for placement in placements)
    starts = block_starts([*placements, *in_code], facts, listed=from_split and not in_code)
    code_ipus = [block.ipu for block in facts.user_blocks if block.ipu is not None]
    ipus = 1 + max([*(placement.ipu for placement in placements), *code_ipus], default=0)
    ipus, stages = _ipus_and_stages(pipeline, ipus, starts, bool(placements), group, found)
    if facts.module_names:
        checks.check_blocks(placements, facts, found)
        checks.check_empty_blocks(starts, facts, found)
        if len({start.placement.ipu for start in starts} | {0}) > 1:
            checks.check_shared([*placements, *in_code], facts, found)
    _note_order(starts, facts, from_split, group, found)
    increment, listed = _numbering(pipeline, starts, listed, bool(facts.user_blocks), has_unplaced, found)
    if phased:
        listed = listed or _one_block_each(starts)
        names = [", ".join(blocks) for blocks in listed.blocks]
        checks.check_phases(pipeline.strategy, listed.ipus, listed.phases or (), names, found)
    elif listed is not None and all(placement.module for placement in placements):
        placements.insert(0, Placement("", 0, FIRST_BLOCK, "rule: the first stage has a name"))
    if len(found.problems) == before:  # else blocks may be missing because of them
        checks.check_idle(starts, ipus, len(placements), found)
    ordered = list(dict.fromkeys(start.placement for start in starts if start.placement in placements))
    ordered += [placement for placement in placements if placement not in ordered]
    ordered.sort(key=lambda placement: placement.module != "")
    return Layout(tuple(ordered), ipus, stages, increment, listed)


def names_first_block(value: Any) -> bool:
    """Whether a strategy written by the user names the block at the model's beginning."""
    if isinstance(value, Call):
        return any(names_first_block(argument) for argument in value.args)
    if isinstance(value, (list, tuple)):
        return any(names_first_block(item) for item in value)
    return bool(value == FIRST_BLOCK)


def _ipus_and_stages(
    pipeline: PipelineConfig, ipus: int, starts: Sequence[BlockStart], placed: bool, group: str, found: Findings
) -> Tuple[int, int]:
    """Return IPUs and stages; `pipeline.ipus` counts for a model that begins blocks itself in unknown places."""
    wanted = pipeline.ipus if group == "pipeline" else None
    stages = count_stages(starts)
    if wanted is None or wanted == ipus:
        return ipus, stages
    if placed:
        found.problem(
            "`pipeline.ipus` and the placement contradict each other",
            seen=f"pipeline.ipus={wanted}, but the blocks in the config use {ipus} IPUs",
            fix="pipeline.ipus=null",
            key="pipeline.ipus",
        )
        return ipus, stages
    return wanted, max(wanted, stages)


def _numbering(
    pipeline: PipelineConfig,
    starts: Sequence[BlockStart],
    listed: Optional[StageList],
    has_user_blocks: bool,
    has_unplaced: bool,
    found: Findings,
) -> Tuple[bool, Optional[StageList]]:
    """Decide how stages are numbered: by IPU where those ascend, else in order."""
    increment = pipeline.auto_stage == "auto_increment" or (has_unplaced and pipeline.auto_stage == "auto")
    if pipeline.strategy != "pipelined":
        return increment, listed
    ipus = [0, *(start.placement.ipu for start in starts)]
    ascending = ipus == sorted(ipus)
    if pipeline.auto_stage == "auto" and listed is None and not ascending:
        increment = True
        merged = _merged(starts)
        each_once = len({block for blocks in merged.blocks for block in blocks}) == sum(map(len, merged.blocks))
        if each_once and not has_user_blocks and any(a == b for a, b in zip(ipus, ipus[1:])):
            # Numbering in order would also split neighbours on one IPU into stages.
            listed = merged
    same = not increment and pipeline.auto_stage != "auto"
    checks.check_ascending(starts, listed, same, found)
    return increment, listed


def _merged(starts: Sequence[BlockStart]) -> StageList:
    blocks: List[List[str]] = [[FIRST_BLOCK]] if starts[0].placement.module else [[]]
    ipus = [0 if starts[0].placement.module else starts[0].placement.ipu]
    for start in starts:
        if start.placement.ipu != ipus[-1]:
            blocks.append([])
            ipus.append(start.placement.ipu)
        if start.placement.block_id not in blocks[-1]:
            blocks[-1].append(start.placement.block_id)
    return StageList(tuple(map(tuple, blocks)), tuple(ipus))


def _one_block_each(starts: Sequence[BlockStart]) -> StageList:
    placements = list(dict.fromkeys(start.placement for start in starts))
    placements.sort(key=lambda placement: placement.module != "")
    ids = [placement.block_id for placement in placements]
    return StageList(tuple((one,) for one in ids), tuple(p.ipu for p in placements), tuple(range(len(ids))))


def _note_order(starts: Sequence[BlockStart], facts: Facts, from_split: bool, group: str, found: Findings) -> None:
    if facts.calls or not starts or not from_split:
        return
    known = order_names(facts)
    modules = [start.placement.module for start in starts if start.placement.module]
    positions = [known.index(module) for module in modules if module in known]
    if positions != sorted(positions):
        found.note(
            f"{group}.split is not in the order in which the model defines its modules; stages must follow the order "
            "in which modules run"
        )
    first = next((name for name in facts.module_names if name), None)
    if modules and modules[0] == first:
        found.note(f"{group}.split begins with the first module, {first}: only what runs before it is on IPU 0")
