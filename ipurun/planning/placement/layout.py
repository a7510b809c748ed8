"""Where the parts of the model run: blocks and IPUs, from whatever form of placement the config uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, Optional, Sequence, Tuple

from ipurun.api.calls import Call
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.placement import checks
from ipurun.planning.placement.forms import wanted_blocks
from ipurun.planning.placement.order import Begin, begins_of, count_stages, number_own_blocks, order_names
from ipurun.planning.placement.stages import FIRST_BLOCK, StageList, gather
from ipurun.planning.plan import Placement

__all__ = ["Layout", "lay_out", "names_first_block"]


@dataclass(frozen=True)
class Layout:
    """The model over the IPUs of one replica.

    Args:
        placements: Modules that begin a block.
        ipus: IPUs of one replica.
        stages: Forward stages: one more than there are switches between IPUs.
        auto_increment: Whether stages are numbered as they come, because an IPU comes back.
        listed: Stages or phases that the strategy has to be given.
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
    room: str = "pipeline",
    named_start: bool = False,
    numbers_blocks: bool = True,
) -> Layout:
    """Blocks, IPUs and stages of one mode.

    Args:
        pipeline: The placement.
        facts: The model; without module names nothing is checked against it.
        found: Takes problems and notes.
        room: ``pipeline`` or ``inference``, where the keys are.
        named_start: Whether the beginning of the model has to be a block with a name, too.
        numbers_blocks: Whether ipurun's strategy gives blocks their stages, not one that the user wrote.
    """
    before = len(found.problems)
    wanted = wanted_blocks(pipeline, facts, room, found)
    placements, listed = gather(pipeline, wanted, facts, found)
    placements = checks.without_doubles(placements, found)
    has_unplaced = numbers_blocks and any(block.ipu is None for block in facts.user_blocks)
    if listed is not None:
        facts = replace(facts, user_blocks=tuple(listed.placed(block) for block in facts.user_blocks))
    elif has_unplaced:
        checks.check_unplaced(facts.user_blocks, pipeline, found)
        facts = number_own_blocks(placements, facts)
    phased = pipeline.strategy.endswith("phased")
    if phased and not placements and room == "pipeline":
        found.problem(
            "phased execution needs phases",
            seen=f"pipeline.strategy={pipeline.strategy}, {room}.split=[]",
            fix=f"{room}.split=[MODULE, ...], each next phase beginning at one of them",
            key="pipeline.strategy",
        )
    if (named_start or (phased and placements)) and all(placement.module for placement in placements):
        # Phases list their blocks, so that nothing may run outside of one.
        placements.insert(0, Placement("", 0, FIRST_BLOCK, pipeline.strategy))
    own = [
        Placement(block.module, block.ipu, block.block_id or block.module, "the model's code")
        for block in facts.user_blocks
        if block.module is not None and block.ipu is not None
    ]
    from_split = all(placement.origin.endswith(".split") or not placement.module for placement in placements)
    begins = begins_of([*placements, *own], facts, listed=from_split and not own)
    in_code = [block.ipu for block in facts.user_blocks if block.ipu is not None]
    ipus = 1 + max([*(placement.ipu for placement in placements), *in_code], default=0)
    ipus, stages = _ipus_as_given(pipeline, ipus, begins, bool(placements), room, found)
    if facts.module_names:
        checks.check_blocks(placements, facts, found)
        checks.check_begins(begins, facts, found)
        if len({begin.placement.ipu for begin in begins} | {0}) > 1:
            checks.check_shared([*placements, *own], facts, found)
    _note_order(begins, facts, from_split, room, found)
    increment, listed = _numbering(pipeline, begins, listed, bool(facts.user_blocks), has_unplaced, found)
    if phased:
        listed = listed or _one_block_each(begins)
        names = [", ".join(blocks) for blocks in listed.blocks]
        checks.check_phases(pipeline.strategy, listed.ipus, listed.phases or (), names, found)
    elif listed is not None and all(placement.module for placement in placements):
        placements.insert(0, Placement("", 0, FIRST_BLOCK, "rule: the first stage has a name"))
    if len(found.problems) == before:  # else blocks are missing that the other problems are about
        checks.check_idle(begins, ipus, len(placements), found)
    ordered = list(dict.fromkeys(begin.placement for begin in begins if begin.placement in placements))
    ordered += [placement for placement in placements if placement not in ordered]
    ordered.sort(key=lambda placement: placement.module != "")
    return Layout(tuple(ordered), ipus, stages, increment, listed)


def names_first_block(value: Any) -> bool:
    """Whether a strategy written by the user speaks of the block at the model's beginning."""
    if isinstance(value, Call):
        return any(names_first_block(argument) for argument in value.args)
    if isinstance(value, (list, tuple)):
        return any(names_first_block(item) for item in value)
    return bool(value == FIRST_BLOCK)


def _ipus_as_given(
    pipeline: PipelineConfig, ipus: int, begins: Sequence[Begin], placed: bool, room: str, found: Findings
) -> Tuple[int, int]:
    """IPUs and stages, where `pipeline.ipus` speaks of a model that begins blocks itself in unknown places."""
    given = pipeline.ipus if room == "pipeline" else None
    stages = count_stages(begins)
    if given is None or given == ipus:
        return ipus, stages
    if placed:
        found.problem(
            "`pipeline.ipus` and the placement contradict each other",
            seen=f"pipeline.ipus={given}, the blocks of the config make {ipus}",
            fix="pipeline.ipus=null",
            key="pipeline.ipus",
        )
        return ipus, stages
    return given, max(given, stages)


def _numbering(
    pipeline: PipelineConfig,
    begins: Sequence[Begin],
    listed: Optional[StageList],
    has_own: bool,
    has_unplaced: bool,
    found: Findings,
) -> Tuple[bool, Optional[StageList]]:
    """How stages get their numbers: by IPU where those ascend, else one after another."""
    increment = pipeline.auto_stage == "auto_increment" or (has_unplaced and pipeline.auto_stage == "auto")
    if pipeline.strategy != "pipelined":
        return increment, listed
    ipus = [0, *(begin.placement.ipu for begin in begins)]
    ascending = ipus == sorted(ipus)
    if pipeline.auto_stage == "auto" and listed is None and not ascending:
        increment = True
        merged = _merged(begins)
        each_once = len({block for blocks in merged.blocks for block in blocks}) == sum(map(len, merged.blocks))
        if each_once and not has_own and any(a == b for a, b in zip(ipus, ipus[1:])):
            # One after another would make stages of neighbours on one IPU, too.
            listed = merged
    same = not increment and pipeline.auto_stage != "auto"
    checks.check_ascending(begins, listed, same, found)
    return increment, listed


def _merged(begins: Sequence[Begin]) -> StageList:
    blocks: List[List[str]] = [[FIRST_BLOCK]] if begins[0].placement.module else [[]]
    ipus = [0 if begins[0].placement.module else begins[0].placement.ipu]
    for begin in begins:
        if begin.placement.ipu != ipus[-1]:
            blocks.append([])
            ipus.append(begin.placement.ipu)
        if begin.placement.block_id not in blocks[-1]:
            blocks[-1].append(begin.placement.block_id)
    return StageList(tuple(map(tuple, blocks)), tuple(ipus))


def _one_block_each(begins: Sequence[Begin]) -> StageList:
    placements = list(dict.fromkeys(begin.placement for begin in begins))
    placements.sort(key=lambda placement: placement.module != "")
    ids = [placement.block_id for placement in placements]
    return StageList(tuple((one,) for one in ids), tuple(p.ipu for p in placements), tuple(range(len(ids))))


def _note_order(begins: Sequence[Begin], facts: Facts, from_split: bool, room: str, found: Findings) -> None:
    if facts.calls or not begins or not from_split:
        return
    known = order_names(facts)
    modules = [begin.placement.module for begin in begins if begin.placement.module]
    positions = [known.index(module) for module in modules if module in known]
    if positions != sorted(positions):
        found.note(
            f"{room}.split is not in the order in which the model defines its modules; stages have to follow the order "
            "in which they run"
        )
    first = next((name for name in facts.module_names if name), None)
    if modules and modules[0] == first:
        found.note(f"{room}.split begins with the first module, {first}: IPU 0 gets only what runs before it")
