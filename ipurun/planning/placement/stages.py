"""`pipeline.stages` and `pipeline.phases`: blocks grouped into stages, and stages into phases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import is_pattern, match_names, unmatched
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts, UserBlock
from ipurun.planning.placement.forms import RequestedBlock
from ipurun.planning.plan import Placement

__all__ = ["FIRST_BLOCK", "StageList", "place_blocks"]

FIRST_BLOCK = "first"  # the beginning of the model, up to the first block that has a name


@dataclass(frozen=True)
class _StageEntry:
    """A stage as the config has it."""

    blocks: Tuple[str, ...]
    ipu: Optional[int]


@dataclass(frozen=True)
class StageList:
    """Stages in order, each with its blocks and its IPU; several of them may form one phase.

    Args:
        blocks: Block ids of each stage.
        ipus: IPU of each stage.
        phases: Phase of each stage; None for pipelined and sharded execution.
    """

    blocks: Tuple[Tuple[str, ...], ...]
    ipus: Tuple[int, ...]
    phases: Optional[Tuple[int, ...]] = None

    def stage_of(self, block_id: str) -> Optional[int]:
        """Return the index of a block's stage, or of its phase where there are phases."""
        for index, blocks in enumerate(self.blocks):
            if block_id in blocks:
                return index if self.phases is None else self.phases[index]
        return None

    def placed(self, block: UserBlock) -> UserBlock:
        """Return a block of the model's code with the IPU of its stage."""
        stage = next((index for index, blocks in enumerate(self.blocks) if block.block_id in blocks), None)
        return block if stage is None else replace(block, ipu=self.ipus[stage])


def place_blocks(
    pipeline: PipelineConfig, requested: Sequence[RequestedBlock], facts: Facts, found: Findings
) -> Tuple[List[Placement], Optional[StageList]]:
    """Give every block its IPU, by the stages or phases where the config lists them.

    Args:
        pipeline: The keys.
        requested: Blocks that other keys ask for; stages may name further modules, which then begin blocks, too.
        facts: The model.
        found: Takes the problems.

    Returns:
        The blocks, and the stages where the config lists them.
    """
    phased = pipeline.strategy.endswith("phased")
    key = "pipeline.phases" if phased else "pipeline.stages"
    other = "pipeline.stages" if phased else "pipeline.phases"
    if (pipeline.stages and phased) or (pipeline.phases and not phased):
        fitting = "pipeline.strategy=serial_phased" if not phased else "pipeline.strategy=pipelined"
        found.problem(
            f"`{other}` does not work with `pipeline.strategy={pipeline.strategy}`",
            fix=f"use `{key}`, or {fitting}",
            key=other,
        )
    written = pipeline.phases if phased else pipeline.stages
    if not written:
        return _without_stages(requested, found), None
    parsed = [_parse(entry, key, found, nested=phased) for entry in written]
    return _resolve(parsed, phased, pipeline.strategy, list(requested), facts, key, found)


def _without_stages(requested: Sequence[RequestedBlock], found: Findings) -> List[Placement]:
    for block in requested:
        if block.ipu is None:
            found.problem(
                f"`{block.origin}`: the block at `{block.module}` has no IPU",
                fix=f"pipeline.blocks={{{block.module}: {{ipu: 1}}}}, or name it in `pipeline.stages`",
                key=block.origin,
            )
    return [Placement(block.module, block.ipu or 0, block.block_id, block.origin) for block in requested]


def _parse(entry: Any, key: str, found: Findings, nested: bool) -> List[_StageEntry]:
    """Return the stages of one entry: one stage, or the stages of one phase."""
    if isinstance(entry, (str, int)) and not isinstance(entry, bool):
        return [_StageEntry((str(entry),), None)]
    if isinstance(entry, Mapping) and set(entry) <= {"blocks", "ipu"} and "blocks" in entry:
        blocks = entry["blocks"]
        names = [blocks] if isinstance(blocks, (str, int)) else list(blocks)
        ipu = entry.get("ipu")
        if ipu is None or (isinstance(ipu, int) and not isinstance(ipu, bool) and ipu >= 0):
            return [_StageEntry(tuple(map(str, names)), ipu)]
    elif isinstance(entry, (list, tuple)) and entry:
        if all(isinstance(item, (str, int)) for item in entry):
            return [_StageEntry(tuple(map(str, entry)), None)]
        if nested:
            return [stage for item in entry for stage in _parse(item, key, found, nested=False)]
    forms = "a block, a list of blocks, or {blocks: [A, B], ipu: 0}"
    found.problem(
        f"`{key}` takes {forms}" + (", or a list of such" if nested else "") + " for each entry",
        seen=str(entry),
        key=key,
    )
    return []


def _resolve(
    parsed: Sequence[Sequence[_StageEntry]],
    phased: bool,
    strategy: str,
    requested: List[RequestedBlock],
    facts: Facts,
    key: str,
    found: Findings,
) -> Tuple[List[Placement], StageList]:
    places: Dict[str, int] = {}
    blocks: List[Tuple[str, ...]] = []
    ipus: List[int] = []
    phases: List[int] = []
    for part, stages in enumerate(parsed):
        for position, stage in enumerate(stages):
            ids = [block for name in stage.blocks for block in _ids(name, requested, facts, key, found)]
            if not stage.blocks:
                found.problem(f"`{key}`: entry {part} has no blocks", seen=str(list(stage.blocks)), key=key)
            for block in ids:
                if block in places:
                    found.problem(f"`{key}` lists the block `{block}` twice", fix="list it once", key=key)
                places[block] = len(blocks)
            blocks.append(tuple(ids))
            ipus.append(_stage_ipu(stage, ids, requested, _usual_ipu(part, position, strategy), key, found))
            phases.append(part)
    if FIRST_BLOCK not in places and blocks:
        blocks[0] = (FIRST_BLOCK, *blocks[0])
        places[FIRST_BLOCK] = 0
    left = [block.block_id for block in requested if block.block_id not in places]
    left += [block.block_id or "a block without a name" for block in facts.user_blocks if block.block_id not in places]
    if left:
        found.problem(
            f"`{key}` does not list all blocks",
            seen=", ".join(left),
            known=", ".join(places),
            fix=f"add them to `{key}`",
            key=key,
        )
    start = RequestedBlock("", None, FIRST_BLOCK, key)
    placements = [
        Placement(block.module, ipus[places.get(block.block_id, 0)] if ipus else 0, block.block_id, block.origin)
        for block in (*([] if any(not block.module for block in requested) else [start]), *requested)
    ]
    return placements, StageList(tuple(blocks), tuple(ipus), tuple(phases) if phased else None)


def _usual_ipu(part: int, position: int, strategy: str) -> int:
    if strategy == "serial_phased":
        return position
    return 2 * position + part % 2 if strategy == "parallel_phased" else part


def _stage_ipu(
    stage: _StageEntry, ids: Sequence[str], requested: Sequence[RequestedBlock], usual: int, key: str, found: Findings
) -> int:
    ipus = {block.ipu for block in requested if block.block_id in ids and block.ipu is not None}
    if stage.ipu is not None:
        ipus.add(stage.ipu)
    if len(ipus) > 1:
        found.problem(
            f"`{key}`: the blocks of one stage are on several IPUs",
            seen=f"{', '.join(ids)} on IPUs {', '.join(map(str, sorted(ipus)))}",
            fix="put them on one IPU, or in separate stages",
            key=key,
        )
    return stage.ipu if stage.ipu is not None else min(ipus, default=usual)


def _ids(name: str, requested: List[RequestedBlock], facts: Facts, key: str, found: Findings) -> List[str]:
    """Return the ids of the blocks that a name means: existing blocks, else modules, which then begin blocks."""
    known = list(dict.fromkeys(block.block_id for block in requested))
    in_code = [block.block_id for block in facts.user_blocks if block.block_id is not None]
    if name in (*known, *in_code, FIRST_BLOCK):
        return [name]
    quiet = Findings()
    if is_pattern(name):
        by_id = match_names(name, key, known, quiet)
        if by_id:
            return [match.name for match in by_id]
    if not facts.module_names:
        modules = [name]
    else:
        modules = [match.name for match in match_names(name, key, facts.module_names, quiet)]
    if not modules:
        unmatched(name, key, list(dict.fromkeys((*known, *facts.module_names))), found, "block or module")
    ids: List[str] = []
    for module in modules:
        there = next((block for block in requested if block.module == module), None)
        if there is None:
            requested.append(RequestedBlock(module, None, module, key))
        ids.append(there.block_id if there else module)
    return ids
