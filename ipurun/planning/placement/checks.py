"""Checks of blocks, stages and IPUs: what PopTorch or PopART would refuse at compilation, or silently change."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set

from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings, listing
from ipurun.inspect.facts import Facts, UserBlock
from ipurun.planning.layers import is_within
from ipurun.planning.placement.order import BlockStart, block_at_calls, order_names
from ipurun.planning.placement.stages import StageList
from ipurun.planning.plan import Placement

__all__ = [
    "check_ascending",
    "check_empty_blocks",
    "check_blocks",
    "check_idle",
    "check_phases",
    "check_shared",
    "check_unplaced",
    "without_duplicates",
]

_NEVER_CALLED = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def without_duplicates(placements: Sequence[Placement], found: Findings) -> List[Placement]:
    """Return the blocks, reporting those that begin where another one does and keeping the first of them."""
    at: Dict[str, Placement] = {}
    for placement in placements:
        other = at.setdefault(placement.module, placement)
        if other is not placement and (other.origin != placement.origin or other.ipu != placement.ipu):
            found.problem(
                f"two blocks begin at `{placement.module or 'the model'}`",
                seen=f"IPU {other.ipu} by {other.origin}, IPU {placement.ipu} by {placement.origin}",
                fix="keep one block for each module",
                key=placement.origin,
            )
    return list(at.values())


def check_blocks(placements: Sequence[Placement], facts: Facts, found: Findings) -> None:
    """Check for ids on several IPUs, modules with a block in the model's code, and modules that are never called."""
    ids: Dict[str, Placement] = {}
    in_code = {block.module for block in facts.user_blocks if block.module is not None}
    for placement in placements:
        name = placement.module or "the model"
        same = ids.setdefault(placement.block_id, placement)
        if same.ipu != placement.ipu:
            found.problem(
                f"the block `{placement.block_id}` is on IPU {same.ipu} and on IPU {placement.ipu}",
                seen=f"{same.module or 'the model'} ({same.origin}), {name} ({placement.origin})",
                fix="use another id for one of them",
                key=placement.origin,
            )
        if placement.module in in_code:
            found.problem(
                f"`{placement.origin}`: `{name}` already begins a block in the model's code",
                fix="remove it: blocks in the model's code are kept",
                key=placement.origin,
            )
        _check_called(placement, facts, found)


def _check_called(placement: Placement, facts: Facts, found: Findings) -> None:
    module, order = placement.module, order_names(facts)
    kind = facts.module_kinds.get(module, "")
    inside = [name for name in facts.module_names if name.rpartition(".")[0] == module]
    if kind in _NEVER_CALLED:
        found.problem(
            f"`{placement.origin}`: no block can begin at `{module}`, as a {kind} is never called, only what it holds",
            known=listing(inside),
            fix=f"`{inside[0]}` instead of `{module}`" if inside else "name a module that is called",
            key=placement.origin,
        )
    elif facts.calls and module not in order and module in facts.module_names:
        found.problem(
            f"`{placement.origin}`: no block can begin at `{module}`, because it does not run in `forward`",
            known=listing([name for name in order if name and "." not in name]),
            fix="name a module that runs",
            key=placement.origin,
        )


def check_unplaced(blocks: Sequence[UserBlock], pipeline: PipelineConfig, found: Findings) -> None:
    """Check that blocks in the model's code have an IPU where a block's stage follows from its IPU."""
    unplaced = [block.block_id or block.module or "a block" for block in blocks if block.ipu is None]
    if unplaced and pipeline.auto_stage == "same_as_ipu":
        found.problem(
            "`pipeline.auto_stage=same_as_ipu` needs an IPU for every block",
            seen=", ".join(f"{name} has none" for name in unplaced),
            fix="pipeline.auto_stage=auto, or ipu_id=... in the model's code",
            key="pipeline.auto_stage",
        )


def check_empty_blocks(starts: Sequence[BlockStart], facts: Facts, found: Findings) -> None:
    """Check for blocks in which nothing runs."""
    for start, after in zip(starts, starts[1:]):
        here, there = start.placement, after.placement
        if here.ipu == there.ipu:
            continue
        nothing_between = start.operations is not None and start.operations == after.operations
        first_inside = (
            start.operations is None
            and facts.module_kinds.get(here.module) == "Sequential"
            and next((name for name in facts.module_names if is_within(name, here.module) and name != here.module), "")
            == there.module
        )
        if nothing_between or first_inside:
            found.problem(
                f"the block {_named(here)} on IPU {here.ipu} has no operations",
                seen=f"the next block, {_named(there)} on IPU {there.ipu}, begins before anything is computed",
                fix="remove it, or begin the next block later",
            )
    if starts and starts[-1].operations is not None and starts[-1].operations >= facts.operations:
        last = starts[-1].placement
        found.problem(
            f"the block {_named(last)} on IPU {last.ipu} has no operations",
            seen="nothing is computed after it begins",
            fix="remove it",
        )


def _named(placement: Placement) -> str:
    if placement.module:
        return f"at `{placement.module}`"
    return f"`{placement.block_id}`" if placement.block_id else "at the model's beginning"


def check_idle(starts: Sequence[BlockStart], ipus: int, placed: int, found: Findings) -> None:
    """Check for IPUs of a replica on which nothing runs.

    Args:
        starts: Blocks in the order in which they run.
        ipus: IPUs of a replica.
        placed: Number of blocks in the config; without any, idle IPUs are the choice of the model's code.
        found: Takes the problems.
    """
    used: Set[int] = {start.placement.ipu for start in starts}
    if not starts or (starts[0].operations != 0 and starts[0].placement.module):
        used.add(0)  # what runs before the first block
    empty = [ipu for ipu in range(ipus) if ipu not in used]
    if empty and placed:
        names = ", ".join(map(str, empty))
        found.problem(
            f"nothing runs on IPU{'s' if len(empty) > 1 else ''} {names}",
            seen=", ".join(f"{start.placement.module or 'the model'} on IPU {start.placement.ipu}" for start in starts),
            fix="number IPUs from 0 without gaps, and begin no block at the model's first module",
        )


def check_shared(placements: Sequence[Placement], facts: Facts, found: Findings) -> None:
    """Check that weights which are one tensor are on one IPU."""
    ipus: Dict[str, Dict[int, None]] = {}
    for module, block in block_at_calls(placements, facts):
        ipus.setdefault(module, {})[block.ipu if block is not None else 0] = None
    for names in facts.shared_parameters:
        _check_one_ipu(names, ipus, found)
    for module, several in ipus.items():
        has_weights = any(name.rpartition(".")[0] == module for name in facts.parameter_shapes)
        if has_weights and len(several) > 1:
            found.problem(
                f"`{module}` runs on IPUs {', '.join(map(str, several))}, but its weights can be on only one",
                fix="place blocks so that all its calls are on one IPU",
            )


def _check_one_ipu(names: Sequence[str], ipus: Dict[str, Dict[int, None]], found: Findings) -> None:
    owners = {name: name.rpartition(".")[0] for name in names}
    places = {name: list(ipus[owner]) for name, owner in owners.items() if owner in ipus}
    different = {ipu for used in places.values() for ipu in used}
    if len(different) < 2:
        return
    first = next(iter(places))
    home = places[first][0]
    elsewhere = [name for name, used in places.items() if used != [home]]
    last = elsewhere[-1]
    blocks = ", ".join(f"{owners[name]}: {home}" for name in elsewhere)
    is_head = len(elsewhere) == 1 and last == list(places)[-1]
    found.problem(
        f"`{first}` and `{last}` are one tensor, but their modules are on different IPUs",
        seen=", ".join(f"{owners[name]} on IPU {', '.join(map(str, used))}" for name, used in places.items()),
        fix=f"pipeline.head_ipu={home}, or pipeline.blocks={{{blocks}}}"
        if is_head
        else f"pipeline.blocks={{{blocks}}}, and a block at the module after each of them",
    )


def check_phases(
    strategy: str, ipus: Sequence[int], phases: Sequence[int], names: Sequence[str], found: Findings
) -> None:
    """Check that parallel phases alternate between even and odd IPUs."""
    if strategy != "parallel_phased":
        return
    for ipu, phase, name in zip(ipus, phases, names):
        if ipu % 2 != phase % 2:
            found.problem(
                "parallel phased execution needs even phases on even IPUs and odd phases on odd IPUs",
                seen=f"phase {phase} ({name}) on IPU {ipu}",
                fix=f"IPU {phase % 2}, or pipeline.strategy=serial_phased",
            )


def check_ascending(
    starts: Sequence[BlockStart], stages: Optional[StageList], same_as_ipu: bool, found: Findings
) -> None:
    """Check that stages of a pipeline follow the order in which the model runs."""
    numbers: List[int] = []
    seen: Dict[str, int] = {}
    for start in starts:
        block = start.placement
        number = stages.stage_of(block.block_id) if stages else block.ipu if same_as_ipu else None
        number = seen.setdefault(block.block_id, len(seen) + 1) if number is None else number
        if numbers and number < numbers[-1]:
            found.problem(
                "pipeline stages must be in the order in which the model runs",
                seen=f"`{block.module or block.block_id}` (stage {number}) runs after stage {numbers[-1]}",
                fix="pipeline.auto_stage=auto" if same_as_ipu else "change the order, or pipeline.strategy=sharded",
            )
            return
        numbers.append(number)
