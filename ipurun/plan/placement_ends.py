"""The ends of a model, `pipeline.embedding_ipu` and `pipeline.head_ipu`: which modules they mean."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from ipurun.config.device_schema import PipelineConfig
from ipurun.plan.findings import Findings
from ipurun.plan.patterns import match_modules, names_in
from ipurun.plan.placement_order import order_names
from ipurun.plan.stacks import is_minor, is_within, named_layers, outermost, stacks
from ipurun.plan.types import Facts

__all__ = ["End", "embedding_blocks", "head_blocks"]

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
            found.problem("`pipeline.head` is set, and its IPU is not", fix="pipeline.head_ipu=0")
        return []
    modules = _named(names, "pipeline.head", facts, found) if names else _head(pipeline, facts, layers)
    if ipu is None:
        ipu = pipeline.embedding_ipu or 0
        tied = _tied_to_beginning(facts, layers, modules)
        if not tied or ipu == last_ipu:
            return []
        found.note(f"the head ({modules[0]}) runs on IPU {ipu}, because {tied[-1]} and {tied[0]} are one tensor")
    elif not modules and not names and facts.module_names:
        found.problem("`pipeline.head_ipu` is set, and no head was found", fix="pipeline.head=MODULE")
    if ipu == last_ipu and not names:
        return []
    return [(module, ipu, module, "pipeline.head_ipu") for module in modules]


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
