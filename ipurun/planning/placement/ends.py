"""The ends of a model, `pipeline.embedding_ipu` and `pipeline.head_ipu`, and what shares its weights with them."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import match_modules, names_in
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.layers import is_minor, is_within, named_layers, outermost, stacks
from ipurun.planning.placement.order import order_names

__all__ = ["End", "embedding_blocks", "head_blocks", "returning_blocks"]

End = Tuple[str, int, str, str]  # module, IPU, block id, origin
_EMBEDDING_BLOCK = "embedding"


def embedding_blocks(pipeline: PipelineConfig, facts: Facts, found: Findings) -> List[End]:
    """Blocks of the embedding: none where it is on IPU 0, on which every model begins."""
    origin = "pipeline.embedding_ipu"
    names = names_in(pipeline.embedding, "pipeline.embedding", found)
    if names:
        ipu = pipeline.embedding_ipu or 0
        return [(module, ipu, module, origin) for module in _named(names, "pipeline.embedding", facts, found)]
    if not pipeline.embedding_ipu:
        return []
    return [("", pipeline.embedding_ipu, _EMBEDDING_BLOCK, origin)]


def head_blocks(
    pipeline: PipelineConfig, facts: Facts, layers: Sequence[str], last_ipu: Optional[int], found: Findings
) -> List[End]:
    """Blocks of the head.

    Args:
        pipeline: The keys.
        facts: The model.
        layers: The layers that were placed, if any: the head comes behind them.
        last_ipu: IPU of what runs before the head.
        found: Takes the problems, and a note where the head's place follows from shared weights.
    """
    names = names_in(pipeline.head, "pipeline.head", found)
    ipu = pipeline.head_ipu
    if ipu is None and not layers:
        if names:
            found.problem("`pipeline.head` is set, and its IPU is not", fix="pipeline.head_ipu=0", key="pipeline.head")
        return []
    modules = _named(names, "pipeline.head", facts, found) if names else _head(pipeline, facts, layers)
    if ipu is None:
        ipu = pipeline.embedding_ipu or 0
        tied = _tied_to_beginning(facts, layers, modules)
        if not tied or ipu == last_ipu:
            return []
        found.note(f"the head ({modules[0]}) runs on IPU {ipu}, because {tied[-1]} and {tied[0]} are one tensor")
    elif not modules and not names and facts.module_names:
        found.problem(
            "`pipeline.head_ipu` is set, and no head was found", fix="pipeline.head=MODULE", key="pipeline.head_ipu"
        )
    if ipu == last_ipu and not names:
        return []
    return [(module, ipu, module, "pipeline.head_ipu") for module in modules]


def returning_blocks(
    pipeline: PipelineConfig, facts: Facts, layer_ipus: Mapping[str, int], found: Findings
) -> List[End]:
    """Blocks at modules between two layers whose weight is that of the embedding: the embedding of a decoder.

    Args:
        pipeline: The keys.
        facts: The model; nothing is known of the middle of one that was not traced.
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
        owners = [name.rpartition(".")[0] for name in names]
        first = next((owner for owner in owners if owner in beginning), None)
        for index in range(layers[0][0], layers[-1][0]):
            name, before = calls[index], [layer for place, layer in layers if place <= index][-1]
            # A module that runs twice is in one block, so it cannot come back under another: the checks tell.
            is_tied = first is not None and name in owners and name not in beginning
            if not is_tied or is_within(name, before) or layer_ipus[before] == home:
                continue
            behind = next(layer for place, layer in layers if place > index)
            blocks[name] = (name, home, name, "pipeline.layers_per_ipu")
            if layer_ipus[behind] != home:
                blocks[behind] = (behind, layer_ipus[behind], behind, "pipeline.layers_per_ipu")
            found.note(f"{name} runs on IPU {home}, because its weight is that of {first}")
    return list(blocks.values())


def _named(names: Sequence[str], key: str, facts: Facts, found: Findings) -> List[str]:
    if not facts.module_names:
        return list(names)
    return [module for name in names for module in outermost(match_modules(name, key, facts.module_names, found))]


def _head(pipeline: PipelineConfig, facts: Facts, layers: Sequence[str]) -> List[str]:
    """The first module of weight behind the last layer; where no layers are known, the last one at the top."""
    layers = layers or _any_layers(pipeline, facts)
    order = [name for name in order_names(facts) if name]
    if not layers:
        top = [name for name in order if "." not in name]
        heavy = [name for name in top if not is_minor(name, facts.module_kinds)]
        return (heavy or top)[-1:]
    last = max((order.index(layer) for layer in layers if layer in order), default=len(order))
    behind = [
        name
        for name in order[last + 1 :]
        if not any(is_within(name, layer) or is_within(layer, name) for layer in layers)
    ]
    heavy = [name for name in behind if not is_minor(name, facts.module_kinds)]
    return (heavy or behind)[:1]


def _any_layers(pipeline: PipelineConfig, facts: Facts) -> Sequence[str]:
    if pipeline.layers is not None:
        return named_layers(names_in(pipeline.layers, "pipeline.layers", Findings()), facts, Findings())
    found = stacks(facts)
    return max(found.values(), key=len) if found else ()


def _tied_to_beginning(facts: Facts, layers: Sequence[str], head: Sequence[str]) -> Tuple[str, ...]:
    """Names of a parameter that the head shares with something before the layers."""
    order = order_names(facts)
    if not head or head[0] not in order or not layers or layers[0] not in order:
        return ()
    first, begins = order.index(layers[0]), order.index(head[0])
    for names in facts.shared_parameters:
        owners = [name.rpartition(".")[0] for name in names]
        places = [order.index(owner) for owner in owners if owner in order]
        if any(place < first for place in places) and any(place >= begins for place in places):
            return names
    return ()
