"""The order in which blocks begin when the model runs, and what runs in each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipurun.inspect.facts import Facts
from ipurun.planning.plan import Placement

__all__ = ["BlockStart", "block_starts", "block_at_calls", "count_stages", "number_user_blocks", "order_names"]


@dataclass(frozen=True)
class BlockStart:
    """The point at which a block begins.

    Args:
        placement: The block.
        operations: Number of operations before it; None where the model was not traced.
    """

    placement: Placement
    operations: Optional[int] = None


def order_names(facts: Facts) -> Tuple[str, ...]:
    """Return modules in the order in which they first run; in order of definition where the model was not traced."""
    if facts.calls:
        return tuple(dict.fromkeys(call.module for call in facts.calls))
    return ("", *facts.module_names)


def block_starts(placements: Sequence[Placement], facts: Facts, listed: bool = False) -> List[BlockStart]:
    """Return where blocks begin, in the order in which the model runs.

    Args:
        placements: Blocks in the config and in the model's code, at most one for each module.
        facts: The model.
        listed: Whether the order of the placements counts, not that of definition.
    """
    if facts.calls:
        by_module: Mapping[str, Placement] = {placement.module: placement for placement in placements}
        starts = [
            BlockStart(by_module[call.module], call.operations) for call in facts.calls if call.module in by_module
        ]
        starts += [
            BlockStart(Placement("", block.ipu, block.block_id or "", "the model's code"), block.operations)
            for block in facts.user_blocks
            if block.module is None and block.ipu is not None
        ]
        return sorted(starts, key=lambda start: start.operations or 0)
    if listed:
        return [BlockStart(placement) for placement in placements]
    positions = {name: position for position, name in enumerate(order_names(facts))}
    ordered = sorted(placements, key=lambda placement: positions.get(placement.module, len(positions)))
    return [BlockStart(placement) for placement in ordered]


def number_user_blocks(placements: Sequence[Placement], facts: Facts) -> Facts:
    """Return the facts with an IPU for every block in the model's code.

    `AutoStage.AutoIncrement` puts blocks without one on the IPU with the number of their stage, counted from 1 over
    all blocks in the order in which they begin.
    """
    at_modules = {block.module: block.block_id or block.module for block in facts.user_blocks if block.module}
    at_modules.update({placement.module: placement.block_id for placement in placements})
    events = [(call.operations, 0, at_modules.get(call.module)) for call in facts.calls]
    events += [(block.operations or 0, 1, block.block_id) for block in facts.user_blocks if block.module is None]
    listed = [*(block.block_id or block.module for block in facts.user_blocks), *at_modules.values()]
    order = [name for *_, name in sorted(events, key=lambda event: event[:2]) if name is not None]
    numbers: Dict[Optional[str], int] = {}
    for name in (*order, *listed):
        numbers.setdefault(name, len(numbers) + 1)
    blocks = tuple(
        block if block.ipu is not None else replace(block, ipu=numbers[block.block_id or block.module])
        for block in facts.user_blocks
    )
    return replace(facts, user_blocks=blocks)


def count_stages(starts: Sequence[BlockStart]) -> int:
    """Count forward stages as PopTorch does: one more than the switches between IPUs, beginning at IPU 0."""
    ipus = [0, *(start.placement.ipu for start in starts)]
    return 1 + sum(before != after for before, after in zip(ipus, ipus[1:]))


def block_at_calls(placements: Sequence[Placement], facts: Facts) -> Iterator[Tuple[str, Optional[Placement]]]:
    """Yield every call of a module with the block in which it runs; None before the first block.

    Without a trace, modules are assumed to run once, in order of definition.
    """
    begun: Dict[str, Placement] = {placement.module: placement for placement in placements}
    current: Optional[Placement] = None
    in_code = sorted(
        (block for block in facts.user_blocks if block.module is None and block.ipu is not None),
        key=lambda block: block.operations or 0,
    )
    calls = [(call.module, call.operations) for call in facts.calls] or [(name, 0) for name in order_names(facts)]
    for module, operations in calls:
        while facts.calls and in_code and (in_code[0].operations or 0) <= operations:
            block = in_code.pop(0)
            current = Placement("", int(block.ipu or 0), block.block_id or "", "the model's code")
        current = begun.get(module, current)
        yield module, current
