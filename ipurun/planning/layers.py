"""The repeated layers of a model: where they are, and how many each IPU gets."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import find_module, is_pattern, match_modules
from ipurun.errors import Findings, listing
from ipurun.inspect.facts import Facts

__all__ = ["find_layers", "is_minor", "is_within", "named_layers", "outermost", "share_layers", "stacks"]

_REST = -1
_CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")
# Modules that compute little: a head does not begin at one of them.
_MINOR = ("norm", "drop", "identity", "relu", "gelu", "silu", "tanh", "activation", "flatten", "pool")


def is_within(name: str, outer: str) -> bool:
    """Whether a module is another one or is inside it; "" is the model itself."""
    return not outer or name == outer or name.startswith(outer + ".")


def outermost(names: Sequence[str]) -> List[str]:
    """Return the names that are inside none of the others, in order."""
    return [name for name in names if not any(other != name and is_within(name, other) for other in names)]


def is_minor(name: str, kinds: Mapping[str, str]) -> bool:
    """Whether a module computes little, such as a normalisation or a dropout."""
    kind = kinds.get(name, "").lower()
    return any(word in kind for word in _MINOR) and "pooler" not in kind


def stacks(facts: Facts) -> Dict[str, List[str]]:
    """Return the modules that hold only layers of one class, with their layers, and without stacks inside a layer."""
    children: Dict[str, List[str]] = {}
    for name in facts.module_names:
        children.setdefault(name.rpartition(".")[0], []).append(name)
    uniform = {
        name: layers
        for name, layers in children.items()
        if len(layers) > 1
        and len({facts.module_kinds.get(layer, layer) for layer in layers}) == 1
        and all(layer in children for layer in layers)
        # Two parts of a network may both be a Sequential and have nothing else in common.
        and (facts.module_kinds.get(name) in _CONTAINERS or facts.module_kinds.get(layers[0]) not in _CONTAINERS)
    }
    return {name: uniform[name] for name in outermost(list(uniform))}


def find_layers(names: Sequence[str], facts: Facts, key: str, found: Findings) -> List[str]:
    """Return the layers that a key counts, in order.

    Args:
        names: The value of `pipeline.layers`: stacks, layers or patterns; empty: the one obvious stack.
        facts: The model.
        key: The key that counts them, for the message.
        found: Takes a problem where there is no stack, or several to choose from.
    """
    if names:
        return named_layers(names, facts, found)
    candidates = sorted(stacks(facts).items(), key=lambda item: -len(item[1]))
    if len(candidates) == 1 or (len(candidates) > 1 and len(candidates[0][1]) >= 2 * len(candidates[1][1])):
        return candidates[0][1]
    both = _encoder_and_decoder(stacks(facts), facts)
    if both:
        return both
    if candidates:
        found.problem(
            f"`{key}` counts layers, but the model has several stacks of them",
            known=listing([f"{name or 'the model'} ({len(layers)})" for name, layers in candidates]),
            fix=f"pipeline.layers={candidates[0][0]}, or pipeline.layers=[{','.join(stacks(facts))}] for all",
            key=key,
        )
    else:
        found.problem(
            f"`{key}` counts layers, but the model has no stack of layers of one class",
            known=listing([name for name in facts.module_names if "." not in name]),
            fix="pipeline.layers=[MODULE, ...], or pipeline.split=[MODULE, ...]",
            key=key,
        )
    return []


def _encoder_and_decoder(found: Mapping[str, Sequence[str]], facts: Facts) -> List[str]:
    """Return the layers of an encoder and of its decoder, or of two towers of one class, if a model has only these."""
    decoders = [name for name in found if "decoder" in name.lower() and "encoder" not in name.lower()]
    kinds = {facts.module_kinds.get(layer) for layers in found.values() for layer in layers}
    if len(found) != 2 or (len(decoders) != 1 and len(kinds) != 1):
        return []
    order = [call.module for call in facts.calls]
    first = {name: order.index(layers[0]) if layers[0] in order else 0 for name, layers in found.items()}
    return [layer for name in sorted(found, key=lambda name: (first[name], name in decoders)) for layer in found[name]]


def named_layers(names: Sequence[str], facts: Facts, found: Findings) -> List[str]:
    """Return layers by name: a stack means the layers in it, any other module itself."""
    layers: List[str] = []
    for name in names:
        if is_pattern(name):
            matched: Sequence[str] = outermost(match_modules(name, "pipeline.layers", facts.module_names, found))
        else:
            module = find_module(name, "pipeline.layers", facts.module_names, found)
            matched = [] if module is None else _layers_of(module, facts)
        layers += [layer for layer in matched if layer not in layers]
    return layers


def _layers_of(module: str, facts: Facts) -> List[str]:
    inside = [name for name in facts.module_names if name.rpartition(".")[0] == module]
    kinds = {facts.module_kinds.get(name, name) for name in inside}
    container = facts.module_kinds.get(module) in _CONTAINERS
    return inside if inside and (container or (len(inside) > 1 and len(kinds) == 1)) else [module]


def share_layers(counts: Sequence[int], layers: int, ipus: Optional[int], key: str, found: Findings) -> Tuple[int, ...]:
    """Return the layers on each IPU, with -1 replaced by an even share of the rest; empty where that is impossible.

    Where the rest cannot be shared evenly, later IPUs get one more, because earlier ones keep more activations.
    """
    listed = list(counts)
    if listed == [_REST] and ipus:
        listed = [_REST] * ipus
    if ipus and len(listed) != ipus:
        found.problem(
            f"`{key}` has {len(listed)} entries, but `pipeline.ipus` is {ipus}",
            seen=str(listed),
            fix="pipeline.ipus=null",
            key=key,
        )
        return ()
    if any(isinstance(count, bool) or count < _REST for count in listed):
        found.problem(f"`{key}` takes numbers of layers, or -1", seen=str(listed), fix=f"{key}=[0,-1]", key=key)
        return ()
    left = layers - sum(count for count in listed if count != _REST)
    open_places = [index for index, count in enumerate(listed) if count == _REST]
    if left < 0 or (left and not open_places):
        found.problem(
            f"`{key}` places {layers - left} layers, but the model has {layers}",
            seen=str(listed),
            fix=f"{key}={_even(layers, len(listed), listed[0] == 0)}, or -1 for one of them",
            key=key,
        )
        return ()
    for place, share in zip(open_places, _shares(left, len(open_places))):
        listed[place] = share
    return tuple(listed)


def _shares(total: int, parts: int) -> List[int]:
    if not parts:
        return []
    share, more = divmod(total, parts)
    return [share] * (parts - more) + [share + 1] * more


def _even(layers: int, ipus: int, empty_first: bool) -> str:
    parts = [0, *_shares(layers, ipus - 1)] if empty_first and ipus > 1 else _shares(layers, ipus)
    return "[" + ",".join(map(str, parts)) + "]"
