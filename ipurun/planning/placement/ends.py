"""Blocks of the embedding and the head, and of modules that share weights with them."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

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
    pipeline: PipelineConfig,
    facts: Facts,
    layers: Sequence[str],
    layer_ipus: Mapping[str, int],
    last_ipu: Optional[int],
    found: Findings,
) -> List[End]:
    """Return the blocks of the head.

    Args:
        pipeline: The keys.
        facts: The model.
        layers: The layers that are counted, if any; the head follows them.
        layer_ipus: The IPU of each layer, where they could be placed.
        last_ipu: IPU of what runs before the head.
        found: Takes the problems, and a note where shared weights decide the head's IPU.
    """
    names = names_in(pipeline.head, "pipeline.head", found)
    ipu = pipeline.head_ipu
    if ipu is None and not layers:
        if names:
            found.problem(
                "`pipeline.head` is set, but `pipeline.head_ipu` is not", fix="pipeline.head_ipu=0", key="pipeline.head"
            )
        return []
    modules = _named(names, "pipeline.head", facts, found) if names else _head(pipeline, facts, layers)
    if ipu is None:
        ipu = pipeline.embedding_ipu or 0
        tied = _tied_to_beginning(facts, layers, modules)
        if not tied:
            between = _between_layers(facts, layer_ipus)
            module, tied = _tied_to_head(facts, [one.module for one in between], layers, modules)
            ipu = next((layer_ipus[one.after] for one in between if one.module == module), ipu)
        if not tied or ipu == last_ipu:
            return []
        found.note(f"the head ({modules[0]}) runs on IPU {ipu}, because {tied[-1]} and {tied[0]} are one tensor")
    elif not modules and not names and facts.module_names:
        found.problem(
            "`pipeline.head_ipu` is set, but no head was found", fix="pipeline.head=MODULE", key="pipeline.head_ipu"
        )
    if ipu == last_ipu and not names:
        return []
    return [(module, ipu, module, "pipeline.head_ipu") for module in modules]


def returning_blocks(
    pipeline: PipelineConfig, facts: Facts, layer_ipus: Mapping[str, int], found: Findings
) -> List[End]:
    """Return blocks at modules between layers that share their weight, such as a decoder's embedding.

    One that shares it with the embedding goes back to the embedding's IPU. One that shares it with the head begins the
    IPU of the layers after it, where the head then follows.

    Args:
        pipeline: The keys.
        facts: The model; without a trace, no such modules are found.
        layer_ipus: The IPU of each layer.
        found: Takes a note for each.
    """
    home = pipeline.embedding_ipu or 0
    between = _between_layers(facts, layer_ipus)
    if not between or pipeline.strategy.endswith("phased"):
        return []
    calls = [call.module for call in facts.calls]
    beginning = calls[: next(index for index, name in enumerate(calls) if name in layer_ipus)]
    blocks: Dict[str, End] = {}
    for names in facts.shared_parameters:
        owners = [name.rpartition(".")[0] for name in names]
        first = next((owner for owner in owners if owner in beginning), None)
        for one in between:
            # A module that runs twice cannot be in two blocks; `check_shared` reports it.
            if first is None or one.module not in owners or one.module in beginning or layer_ipus[one.before] == home:
                continue
            blocks[one.module] = (one.module, home, one.module, "pipeline.layers_per_ipu")
            if layer_ipus[one.after] != home:
                blocks[one.after] = (one.after, layer_ipus[one.after], one.after, "pipeline.layers_per_ipu")
            found.note(f"{one.module} runs on IPU {home}, because it shares its weight with {first}")
    if not blocks and pipeline.head_ipu is None:
        layers = list(layer_ipus)
        module, tied = _tied_to_head(facts, [one.module for one in between], layers, _head(pipeline, facts, layers))
        one = next((one for one in between if one.module == module), between[0])
        if tied and layer_ipus[one.before] != layer_ipus[one.after]:
            blocks[module] = (module, layer_ipus[one.after], module, "pipeline.layers_per_ipu")
    return list(blocks.values())


class _Between(NamedTuple):
    """A module that runs between two layers, and these layers."""

    module: str
    before: str
    after: str


def _between_layers(facts: Facts, layer_ipus: Mapping[str, int]) -> List[_Between]:
    """Return the modules that run between two layers, in the order in which they run."""
    calls = [call.module for call in facts.calls]
    layers = [(index, name) for index, name in enumerate(calls) if name in layer_ipus]
    between: List[_Between] = []
    for (start, before), (end, after) in zip(layers, layers[1:]):
        between += [_Between(name, before, after) for name in calls[start + 1 : end] if not is_within(name, before)]
    return between


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


def _tied_to_beginning(facts: Facts, layers: Sequence[str], head: Sequence[str]) -> Tuple[str, ...]:
    """Return the names of a parameter that the head shares with a module before the layers."""
    order = order_names(facts)
    if not head or head[0] not in order or not layers or layers[0] not in order:
        return ()
    first, head_start = order.index(layers[0]), order.index(head[0])
    for names in facts.shared_parameters:
        owners = [name.rpartition(".")[0] for name in names]
        places = [order.index(owner) for owner in owners if owner in order]
        if any(place < first for place in places) and any(place >= head_start for place in places):
            return names
    return ()


def _tied_to_head(
    facts: Facts, between: Sequence[str], layers: Sequence[str], head: Sequence[str]
) -> Tuple[str, Tuple[str, ...]]:
    """Return a module between layers that shares a parameter with the head, and the parameter's names."""
    order = order_names(facts)
    if not head or head[0] not in order or _tied_to_beginning(facts, layers, head):
        return "", ()
    after = order[order.index(head[0]) :]
    for names in facts.shared_parameters:
        owners = [name.rpartition(".")[0] for name in names]
        module = next((owner for owner in owners if owner in between), None)
        if module is not None and any(owner in after for owner in owners if owner != module):
            return module, names
    return "", ()
