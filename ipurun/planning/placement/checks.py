"""What PopTorch and PopART refuse, or silently do otherwise, about blocks, stages and IPUs: told before compiling."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set

from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings, listing
from ipurun.inspect.facts import Facts, UserBlock
from ipurun.planning.layers import is_within
from ipurun.planning.placement.order import Begin, block_at_calls, order_names
from ipurun.planning.placement.stages import StageList
from ipurun.planning.plan import Placement

__all__ = [
    "check_ascending",
    "check_begins",
    "check_blocks",
    "check_idle",
    "check_phases",
    "check_shared",
    "check_unplaced",
    "without_doubles",
]

_NEVER_CALLED = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def without_doubles(placements: Sequence[Placement], found: Findings) -> List[Placement]:
    """The blocks without those that begin where another one does; the first stands for both in what else is checked."""
    at: Dict[str, Placement] = {}
    for placement in placements:
        other = at.setdefault(placement.module, placement)
        if other is not placement and (other.origin != placement.origin or other.ipu != placement.ipu):
            found.problem(
                f"two blocks begin at `{placement.module or 'the model'}`",
                seen=f"IPU {other.ipu} by {other.origin}, IPU {placement.ipu} by {placement.origin}",
                fix="one block for each module",
                key=placement.origin,
            )
    return list(at.values())


def check_blocks(placements: Sequence[Placement], facts: Facts, found: Findings) -> None:
    """One name on several IPUs, modules that begin a block in the model's code, modules that are never called."""
    ids: Dict[str, Placement] = {}
    own = {block.module for block in facts.user_blocks if block.module is not None}
    for placement in placements:
        name = placement.module or "the model"
        same = ids.setdefault(placement.block_id, placement)
        if same.ipu != placement.ipu:
            found.problem(
                f"the block `{placement.block_id}` is on IPU {same.ipu} and on IPU {placement.ipu}",
                seen=f"{same.module or 'the model'} ({same.origin}), {name} ({placement.origin})",
                fix="one id for one IPU",
                key=placement.origin,
            )
        if placement.module in own:
            found.problem(
                f"`{placement.origin}`: `{name}` begins a block in the model's code already",
                fix="leave it out: blocks of the model's code are kept",
                key=placement.origin,
            )
        _check_called(placement, facts, found)


def _check_called(placement: Placement, facts: Facts, found: Findings) -> None:
    module, order = placement.module, order_names(facts)
    kind = facts.module_kinds.get(module, "")
    inside = [name for name in facts.module_names if name.rpartition(".")[0] == module]
    if kind in _NEVER_CALLED:
        found.problem(
            f"`{placement.origin}`: no block can begin at `{module}`: a {kind} is never called, only what it holds",
            known=listing(inside),
            fix=f"`{inside[0]}` instead of `{module}`" if inside else "the module that is called",
            key=placement.origin,
        )
    elif facts.calls and module not in order and module in facts.module_names:
        found.problem(
            f"`{placement.origin}`: no block can begin at `{module}`: it does not run in `forward`",
            known=listing([name for name in order if name and "." not in name]),
            fix="a module that runs",
            key=placement.origin,
        )


def check_unplaced(blocks: Sequence[UserBlock], pipeline: PipelineConfig, found: Findings) -> None:
    """Those blocks of the model's code that ask for no IPU, where only a block's IPU would tell its stage."""
    unplaced = [block.block_id or block.module or "a block" for block in blocks if block.ipu is None]
    if unplaced and pipeline.auto_stage == "same_as_ipu":
        found.problem(
            "`pipeline.auto_stage=same_as_ipu` needs an IPU for every block",
            seen=", ".join(f"{name} has none" for name in unplaced),
            fix="pipeline.auto_stage=auto, or ipu_id=... in the model's code",
            key="pipeline.auto_stage",
        )


def check_begins(begins: Sequence[Begin], facts: Facts, found: Findings) -> None:
    """Stages in which nothing runs."""
    for begin, after in zip(begins, begins[1:]):
        here, there = begin.placement, after.placement
        if here.ipu == there.ipu:
            continue
        nothing_between = begin.operations is not None and begin.operations == after.operations
        first_inside = (
            begin.operations is None
            and facts.module_kinds.get(here.module) == "Sequential"
            and next((name for name in facts.module_names if is_within(name, here.module) and name != here.module), "")
            == there.module
        )
        if nothing_between or first_inside:
            found.problem(
                f"the block {_named(here)} on IPU {here.ipu} has no operations",
                seen=f"the next block, {_named(there)} on IPU {there.ipu}, begins before anything is computed",
                fix="leave it out, or begin the next block later",
            )
    if begins and begins[-1].operations is not None and begins[-1].operations >= facts.operations:
        last = begins[-1].placement
        found.problem(
            f"the block {_named(last)} on IPU {last.ipu} has no operations",
            seen="nothing is computed after it begins",
            fix="leave it out",
        )


def _named(placement: Placement) -> str:
    if placement.module:
        return f"at `{placement.module}`"
    return f"`{placement.block_id}`" if placement.block_id else "at the model's beginning"


def check_idle(begins: Sequence[Begin], ipus: int, placed: int, found: Findings) -> None:
    """IPUs of a replica on which nothing runs.

    Args:
        begins: Blocks in the order of running.
        ipus: IPUs of a replica.
        placed: Blocks that the config asks for: what the model's code does is its own affair.
        found: Takes the problems.
    """
    used: Set[int] = {begin.placement.ipu for begin in begins}
    if not begins or (begins[0].operations != 0 and begins[0].placement.module):
        used.add(0)  # what runs before the first block
    empty = [ipu for ipu in range(ipus) if ipu not in used]
    if empty and placed:
        names = ", ".join(map(str, empty))
        found.problem(
            f"nothing runs on IPU{'s' if len(empty) > 1 else ''} {names}",
            seen=", ".join(f"{begin.placement.module or 'the model'} on IPU {begin.placement.ipu}" for begin in begins),
            fix="number the IPUs from 0 without a gap, and leave out a block at the model's first module",
        )


def check_shared(placements: Sequence[Placement], facts: Facts, found: Findings) -> None:
    """Weights that are one tensor have to be on one IPU."""
    ipus: Dict[str, Dict[int, None]] = {}
    for module, block in block_at_calls(placements, facts):
        ipus.setdefault(module, {})[block.ipu if block is not None else 0] = None
    for names in facts.shared_parameters:
        _check_one_ipu(names, ipus, found)
    for module, several in ipus.items():
        has_weights = any(name.rpartition(".")[0] == module for name in facts.parameter_shapes)
        if has_weights and len(several) > 1:
            found.problem(
                f"`{module}` runs several times, on IPUs {', '.join(map(str, several))}, and its weights can be on one",
                fix="blocks that keep all its calls on one IPU",
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
        f"`{first}` and `{last}` are one tensor, and their modules are on different IPUs",
        seen=", ".join(f"{owners[name]} on IPU {', '.join(map(str, used))}" for name, used in places.items()),
        fix=f"pipeline.head_ipu={home}, or pipeline.blocks={{{blocks}}}"
        if is_head
        else f"pipeline.blocks={{{blocks}}}, and a block at what follows each of them",
    )


def check_phases(
    strategy: str, ipus: Sequence[int], phases: Sequence[int], names: Sequence[str], found: Findings
) -> None:
    """Parallel phases alternate between even and odd IPUs."""
    if strategy != "parallel_phased":
        return
    for ipu, phase, name in zip(ipus, phases, names):
        if ipu % 2 != phase % 2:
            found.problem(
                "parallel phased execution runs even phases on even IPUs and odd phases on odd ones",
                seen=f"phase {phase} ({name}) on IPU {ipu}",
                fix=f"IPU {phase % 2}, or pipeline.strategy=serial_phased",
            )


def check_ascending(begins: Sequence[Begin], stages: Optional[StageList], same_as_ipu: bool, found: Findings) -> None:
    """Stages of a pipeline have to follow the order in which the model runs."""
    numbers: List[int] = []
    seen: Dict[str, int] = {}
    for begin in begins:
        block = begin.placement
        number = stages.stage_of(block.block_id) if stages else block.ipu if same_as_ipu else None
        number = seen.setdefault(block.block_id, len(seen) + 1) if number is None else number
        if numbers and number < numbers[-1]:
            found.problem(
                "stages of a pipeline have to be in the order in which the model runs",
                seen=f"`{block.module or block.block_id}` (stage {number}) runs after stage {numbers[-1]}",
                fix="pipeline.auto_stage=auto" if same_as_ipu else "another order, or pipeline.strategy=sharded",
            )
            return
        numbers.append(number)
