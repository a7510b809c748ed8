"""Blocks of the embedding and the head, and of modules that share weights with them."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import match_modules, names_in
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.layers import is_minor, is_within, named_layers, outermost, stacks
from ipurun.planning.placement.order import order_names

__all__ = ["End", "embedding_blocks", "head_blocks", "returning_blocks", "table_blocks"]

End = Tuple[str, int, str, str]  # module, IPU, block id, origin
_EMBEDDING_BLOCK = "embedding"


def embedding_blocks(pipeline: PipelineConfig, facts: Facts, found: Findings) -> List[End]:
    """Return the blocks of the embedding: none where it is on IPU 0, on which every model begins."""
    origin = "pipeline.embedding_ipu"
    names = names_in(pipeline.embedding, "pipeline.embedding", found)
    if names:
        ipu = pipeline.embedding_ipu or 0
        return [(module, ipu, module, origin) for module in _named(names, "pipeline.embedding", facts, found)]
    if not pipeline.embedding_ipu:
        return []
    return [("", pipeline.embedding_ipu, _EMBEDDING_BLOCK, origin)]


def head_blocks(
    pipeline: PipelineConfig, facts: Facts, layer_ipus: Mapping[str, int], last_ipu: Optional[int], found: Findings
) -> List[End]:
    """Return the blocks of the head.

    Args:
        pipeline: The keys.
        facts: The model.
        layer_ipus: The IPU of each layer that was placed, if any; the head follows them.
        last_ipu: IPU of what runs before the head.
        found: Takes the problems, and a note where shared weights decide the head's IPU.
    """
    names = names_in(pipeline.head, "pipeline.head", found)
    ipu, layers = pipeline.head_ipu, list(layer_ipus)
    if ipu is None and not layers:
        if names:
            found.problem(
                "`pipeline.head` is set, but `pipeline.head_ipu` is not", fix="pipeline.head_ipu=0", key="pipeline.head"
            )
        return []
    modules = _named(names, "pipeline.head", facts, found) if names else _head(pipeline, facts, layers)
    if ipu is None:
        tied = _tied_to_head(facts, layers, modules)
        if not tied:
            # [4, 4, 0] keeps the last IPU for the head, as in Optimum.
            keeps_last = list(pipeline.layers_per_ipu[1:])[-1:] == [0] and not pipeline.strategy.endswith("phased")
            if not keeps_last:
                return []
            ipu = len(pipeline.layers_per_ipu) - 1
        else:
            ipu = _ipu_before(tied[0].rpartition(".")[0], facts, layer_ipus, pipeline.embedding_ipu or 0)
        if ipu == last_ipu:
            return []
        if tied:
            found.note(f"the head ({modules[0]}) runs on IPU {ipu}, because {tied[-1]} and {tied[0]} are one tensor")
    elif not modules and not names and facts.module_names:
        found.problem(
            "`pipeline.head_ipu` is set, but no head was found", fix="pipeline.head=MODULE", key="pipeline.head_ipu"
        )
    if ipu == last_ipu and not names:
        return []
    # The parts of a split head have their own blocks.
    return [(module, ipu, module, "pipeline.head_ipu") for module in modules if module not in facts.table_parts]


def returning_blocks(
    pipeline: PipelineConfig, facts: Facts, layer_ipus: Mapping[str, int], found: Findings
) -> List[End]:
    """Return blocks at modules between layers that share the embedding's weight, such as a decoder's embedding.

    Args:
        pipeline: The keys.
        facts: The model; without a trace, no such modules are found.
        layer_ipus: The IPU of each layer.
        found: Takes a note for each.
    """
    home = pipeline.embedding_ipu or 0
    calls = [call.module for call in facts.calls]
    layers = [(index, name) for index, name in enumerate(calls) if name in layer_ipus]
    if not layers or pipeline.strategy.endswith("phased"):
        return []
    beginning = calls[: layers[0][0]]
    blocks: Dict[str, End] = {}
    for names in facts.shared_parameters:
        owners = [name.rpartition(".")[0] for name in names if not _is_part(name, facts)]
        first = next((owner for owner in owners if owner in beginning), None)
        for index in range(layers[0][0], layers[-1][0]):
            name, before = calls[index], [layer for place, layer in layers if place <= index][-1]
            # A module that runs twice cannot be in two blocks; `check_shared` reports it.
            is_tied = first is not None and name in owners and name not in beginning
            if not is_tied or is_within(name, before) or layer_ipus[before] == home:
                continue
            after = next(layer for place, layer in layers if place > index)
            blocks[name] = (name, home, name, "pipeline.layers_per_ipu")
            if layer_ipus[after] != home:
                blocks[after] = (after, layer_ipus[after], after, "pipeline.layers_per_ipu")
            found.note(f"{name} runs on IPU {home}, because it shares its weight with {first}")
    return list(blocks.values())


def table_blocks(facts: Facts, layer_ipus: Mapping[str, int], ipus: Optional[Sequence[int]] = None) -> List[End]:
    """Return the blocks of tables that are split over IPUs, and of the layers that follow them.

    Args:
        facts: The model.
        layer_ipus: The IPU of each layer that was placed.
        ipus: The IPUs of an inference with its own placement, which may have fewer; None: as the config says.
    """
    origin, order = "memory.serialize", [call.module for call in facts.calls] or list(order_names(facts))
    blocks: Dict[str, End] = {}
    for table, places in facts.table_parts.items():
        if table not in order:  # T5's `shared`, whose weight its stacks use, is never called
            continue
        before: Optional[int] = None
        for number, place in enumerate(places):
            name, ipu = f"{table}.part{number}", place if ipus is None else min(place, max(ipus, default=0))
            if ipu != before:
                blocks[name] = (name, ipu, name, origin)
            before = ipu
        last = f"{table}.part{len(places) - 1}"
        for index in (index for index, name in enumerate(order) if name == last):
            after = next((name for name in order[index:] if name in layer_ipus), None)
            if after is not None:
                blocks[after] = (after, layer_ipus[after], after, origin)
    is_split = any(ipu for _, ipu, *_ in blocks.values()) or any(layer_ipus.values()) or any(ipus or ())
    return list(blocks.values()) if is_split else []


def _named(names: Sequence[str], key: str, facts: Facts, found: Findings) -> List[str]:
    if not facts.module_names:
        return list(names)
    return [module for name in names for module in outermost(match_modules(name, key, facts.module_names, found))]


def _head(pipeline: PipelineConfig, facts: Facts, layers: Sequence[str]) -> List[str]:
    """Return the first major module after the last layer; where no layers are known, the last top-level one."""
    layers = layers or _any_layers(pipeline, facts)
    order = [name for name in order_names(facts) if name]
    if not layers:
        top = [name for name in order if "." not in name]
        major = [name for name in top if not is_minor(name, facts.module_kinds)]
        return (major or top)[-1:]
    last = max((order.index(layer) for layer in layers if layer in order), default=len(order))
    after = [
        name
        for name in order[last + 1 :]
        if not any(is_within(name, layer) or is_within(layer, name) for layer in layers)
    ]
    major = [name for name in after if not is_minor(name, facts.module_kinds)]
    return (major or after)[:1]


def _any_layers(pipeline: PipelineConfig, facts: Facts) -> Sequence[str]:
    if pipeline.layers is not None:
        return named_layers(names_in(pipeline.layers, "pipeline.layers", Findings()), facts, Findings())
    return max(stacks(facts).values(), key=len, default=())


def _is_part(parameter: str, facts: Facts) -> bool:
    """Whether a parameter belongs to a part of a table, which has a separate block."""
    return any(is_within(parameter, table) for table in facts.table_parts)


def _ipu_before(module: str, facts: Facts, layer_ipus: Mapping[str, int], home: int) -> int:
    """Return the IPU of the last layer that runs before a module, or that of the embedding."""
    ipu = home
    for name in order_names(facts):
        if name == module:
            break
        ipu = layer_ipus.get(name, ipu)
    return ipu


def _tied_to_head(facts: Facts, layers: Sequence[str], head: Sequence[str]) -> Tuple[str, ...]:
    """Return the names of a parameter that the head shares with a module before the last layer, that module's first."""
    order = order_names(facts)
    if not head or head[0] not in order or not layers or layers[-1] not in order:
        return ()
    head_start = order.index(head[0])
    for names in facts.shared_parameters:
        owners = [name.rpartition(".")[0] for name in names]
        places = [order.index(owner) for owner in owners if owner in order]
        if _is_part(names[0], facts) or len(places) < 2 or not min(places) < head_start <= max(places):
            continue
        if not any(is_within(order[min(places)], layer) for layer in layers):
            return tuple(sorted(names, key=lambda name: name.rpartition(".")[0] != order[min(places)]))
    return ()
