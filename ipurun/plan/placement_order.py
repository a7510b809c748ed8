"""The order in which blocks begin when the model runs, and what runs in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipurun.plan.types import Facts, Placement

__all__ = ["Begin", "begins_of", "block_at_calls", "count_stages", "order_names", "stages_of_operations"]


@dataclass(frozen=True)
class Begin:
    """A block begins.

    Args:
        placement: The block.
        operations: Operations done before it; None where the model was not traced.
    """

    placement: Placement
    operations: Optional[int] = None


def order_names(facts: Facts) -> Tuple[str, ...]:
    """Modules in the order in which they first run; in order of definition where the model was not traced."""
    if facts.calls:
        return tuple(dict.fromkeys(call.module for call in facts.calls))
    return ("", *facts.module_names)


def begins_of(placements: Sequence[Placement], facts: Facts, listed: bool = False) -> List[Begin]:
    """Where blocks begin, in the order in which the model runs.

    Args:
        placements: Blocks of the config and of the model's code, at most one at a module.
        facts: The model.
        listed: Whether the order of the placements is to be trusted more than that of definition.
    """
    if facts.calls:
        by_module: Mapping[str, Placement] = {placement.module: placement for placement in placements}
        begins = [Begin(by_module[call.module], call.operations) for call in facts.calls if call.module in by_module]
        begins += [
            Begin(Placement("", block.ipu, block.block_id or "", "the model's code"), block.operations)
            for block in facts.own_blocks
            if block.module is None and block.ipu is not None
        ]
        return sorted(begins, key=lambda begin: begin.operations or 0)
    if listed:
        return [Begin(placement) for placement in placements]
    positions = {name: position for position, name in enumerate(order_names(facts))}
    ordered = sorted(placements, key=lambda placement: positions.get(placement.module, len(positions)))
    return [Begin(placement) for placement in ordered]


def count_stages(begins: Sequence[Begin]) -> int:
    """Forward stages as PopTorch counts them: one more than there are switches between IPUs, from IPU 0 on."""
    ipus = [0, *(begin.placement.ipu for begin in begins)]
    return 1 + sum(before != after for before, after in zip(ipus, ipus[1:]))


def block_at_calls(placements: Sequence[Placement], facts: Facts) -> Iterator[Tuple[str, Optional[Placement]]]:
    """Every call of a module with the block it runs in; None before the first block. Without a trace each module is
    taken to run once, in order of definition.
    """
    begun: Dict[str, Placement] = {placement.module: placement for placement in placements}
    current: Optional[Placement] = None
    in_code = sorted(
        (block for block in facts.own_blocks if block.module is None and block.ipu is not None),
        key=lambda block: block.operations or 0,
    )
    calls = [(call.module, call.operations) for call in facts.calls] or [(name, 0) for name in order_names(facts)]
    for module, operations in calls:
        while facts.calls and in_code and (in_code[0].operations or 0) <= operations:
            block = in_code.pop(0)
            current = Placement("", int(block.ipu or 0), block.block_id or "", "the model's code")
        current = begun.get(module, current)
        yield module, current


def stages_of_operations(
    modules: Sequence[str], placements: Sequence[Placement]
) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """Stage of every operation of a forward pass, and IPU of every stage.

    A block begins where operations of its module begin, and lasts until the next one; neighbouring blocks on one IPU
    are one stage.

    Args:
        modules: Module that does each operation, in order of running.
        placements: Where blocks begin.
    """
    ipus = [0]
    stage_of: List[int] = []
    inside: Tuple[str, ...] = ()
    by_module = {placement.module: placement for placement in placements}
    for module in modules:
        around = _around(module)
        for name in around:
            if name in by_module and name not in inside and by_module[name].ipu != ipus[-1]:
                if not stage_of and len(ipus) == 1:
                    ipus.clear()
                ipus.append(by_module[name].ipu)
        inside = around
        stage_of.append(len(ipus) - 1)
    return tuple(stage_of), tuple(ipus)


def _around(module: str) -> Tuple[str, ...]:
    """A module and all that it lies in, the outermost (the model itself) first."""
    parts = module.split(".") if module else []
    return ("", *(".".join(parts[:length]) for length in range(1, len(parts) + 1)))
