"""`pipeline.stages` and `pipeline.phases`: blocks gathered into stages, stages into phases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import is_pattern, match_names, unmatched
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts, UserBlock
from ipurun.planning.placement.forms import Wanted
from ipurun.planning.plan import Placement

__all__ = ["FIRST_BLOCK", "StageList", "gather"]

FIRST_BLOCK = "first"  # the beginning of the model, up to the first block that has a name


@dataclass(frozen=True)
class _Written:
    """A stage as written."""

    blocks: Tuple[str, ...]
    ipu: Optional[int]


@dataclass(frozen=True)
class StageList:
    """Stages in order, each with its blocks and its IPU; several of them may make up one phase.

    Args:
        blocks: Block ids of each stage.
        ipus: IPU of each stage.
        phases: Phase of each stage; None for pipelined and sharded execution.
    """

    blocks: Tuple[Tuple[str, ...], ...]
    ipus: Tuple[int, ...]
    phases: Optional[Tuple[int, ...]] = None

    def stage_of(self, block_id: str) -> Optional[int]:
        """Position of the stage (the phase, where there are any) that a block is in."""
        for index, blocks in enumerate(self.blocks):
            if block_id in blocks:
                return index if self.phases is None else self.phases[index]
        return None

    def placed(self, block: UserBlock) -> UserBlock:
        """A block of the model's code on the IPU of its stage."""
        stage = next((index for index, blocks in enumerate(self.blocks) if block.block_id in blocks), None)
        return block if stage is None else replace(block, ipu=self.ipus[stage])


def gather(
    pipeline: PipelineConfig, wanted: Sequence[Wanted], facts: Facts, found: Findings
) -> Tuple[List[Placement], Optional[StageList]]:
    """Give every block its IPU, from the stages or phases where they are written.

    Args:
        pipeline: The keys.
        wanted: Blocks that other keys ask for. Stages may name further modules, which then begin blocks, too.
        facts: The model.
        found: Takes the problems.

    Returns:
        The blocks, and the stages where they are written.
    """
    phased = pipeline.strategy.endswith("phased")
    key = "pipeline.phases" if phased else "pipeline.stages"
    other = "pipeline.stages" if phased else "pipeline.phases"
    if (pipeline.stages and phased) or (pipeline.phases and not phased):
        fitting = "pipeline.strategy=serial_phased" if not phased else "pipeline.strategy=pipelined"
        found.problem(
            f"`{other}` does not go with `pipeline.strategy={pipeline.strategy}`",
            fix=f"`{key}` instead, or {fitting}",
            key=other,
        )
    written = pipeline.phases if phased else pipeline.stages
    if not written:
        return _without_stages(wanted, found), None
    parsed = [_parse(entry, key, found, nested=phased) for entry in written]
    return _resolve(parsed, phased, pipeline.strategy, list(wanted), facts, key, found)


def _without_stages(wanted: Sequence[Wanted], found: Findings) -> List[Placement]:
    for block in wanted:
        if block.ipu is None:
            found.problem(
                f"`{block.origin}`: the block at `{block.module}` has no IPU",
                fix=f"pipeline.blocks={{{block.module}: {{ipu: 1}}}}, or name it in `pipeline.stages`",
                key=block.origin,
            )
    return [Placement(block.module, block.ipu or 0, block.block_id, block.origin) for block in wanted]


def _parse(entry: Any, key: str, found: Findings, nested: bool) -> List[_Written]:
    """The stages of one entry: one stage, or the stages of one phase."""
    if isinstance(entry, (str, int)) and not isinstance(entry, bool):
        return [_Written((str(entry),), None)]
    if isinstance(entry, Mapping) and set(entry) <= {"blocks", "ipu"} and "blocks" in entry:
        blocks = entry["blocks"]
        names = [blocks] if isinstance(blocks, (str, int)) else list(blocks)
        ipu = entry.get("ipu")
        if ipu is None or (isinstance(ipu, int) and not isinstance(ipu, bool) and ipu >= 0):
            return [_Written(tuple(map(str, names)), ipu)]
    elif isinstance(entry, (list, tuple)) and entry:
        if all(isinstance(item, (str, int)) for item in entry):
            return [_Written(tuple(map(str, entry)), None)]
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
    parsed: Sequence[Sequence[_Written]],
    phased: bool,
    strategy: str,
    wanted: List[Wanted],
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
            ids = [block for name in stage.blocks for block in _ids(name, wanted, facts, key, found)]
            if not stage.blocks:
                found.problem(f"`{key}`: entry {part} has no blocks", seen=str(list(stage.blocks)), key=key)
            for block in ids:
                if block in places:
                    found.problem(f"`{key}` has the block `{block}` twice", fix="each block in one stage", key=key)
                places[block] = len(blocks)
            blocks.append(tuple(ids))
            ipus.append(_stage_ipu(stage, ids, wanted, _usual_ipu(part, position, strategy), key, found))
            phases.append(part)
    if FIRST_BLOCK not in places and blocks:
        blocks[0] = (FIRST_BLOCK, *blocks[0])
        places[FIRST_BLOCK] = 0
    left = [block.block_id for block in wanted if block.block_id not in places]
    left += [block.block_id or "a block without a name" for block in facts.user_blocks if block.block_id not in places]
    if left:
        found.problem(
            f"`{key}` leaves out blocks: every one has to be in a stage",
            seen=", ".join(left),
            known=", ".join(places),
            fix=f"add them to `{key}`",
            key=key,
        )
    start = Wanted("", None, FIRST_BLOCK, key)
    placements = [
        Placement(block.module, ipus[places.get(block.block_id, 0)] if ipus else 0, block.block_id, block.origin)
        for block in (*([] if any(not block.module for block in wanted) else [start]), *wanted)
    ]
    return placements, StageList(tuple(blocks), tuple(ipus), tuple(phases) if phased else None)


def _usual_ipu(part: int, position: int, strategy: str) -> int:
    if strategy == "serial_phased":
        return position
    return 2 * position + part % 2 if strategy == "parallel_phased" else part


def _stage_ipu(
    stage: _Written, ids: Sequence[str], wanted: Sequence[Wanted], usual: int, key: str, found: Findings
) -> int:
    asked = {block.ipu for block in wanted if block.block_id in ids and block.ipu is not None}
    if stage.ipu is not None:
        asked.add(stage.ipu)
    if len(asked) > 1:
        found.problem(
            f"`{key}`: blocks of one stage are on several IPUs",
            seen=f"{', '.join(ids)} on IPUs {', '.join(map(str, sorted(asked)))}",
            fix="one IPU for a stage, or stages of their own",
            key=key,
        )
    return stage.ipu if stage.ipu is not None else min(asked, default=usual)


def _ids(name: str, wanted: List[Wanted], facts: Facts, key: str, found: Findings) -> List[str]:
    """Blocks that a word names: by their ids, else modules that thereby begin blocks."""
    known = list(dict.fromkeys(block.block_id for block in wanted))
    own = [block.block_id for block in facts.user_blocks if block.block_id is not None]
    if name in (*known, *own, FIRST_BLOCK):
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
        there = next((block for block in wanted if block.module == module), None)
        if there is None:
            wanted.append(Wanted(module, None, module, key))
        ids.append(there.block_id if there else module)
    return ids
