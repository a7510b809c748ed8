"""The items of a batch and of a model's output: arguments, target and loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping  # quicker to ask for than typing's, which every step would pay
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ipurun.errors import ConfigError

__all__ = ["as_call", "leading_rows", "map_tensors", "pick", "split_target", "target_of", "with_loss"]

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_LOSS_KEYS = ("loss",)
_OUTPUT_KEYS = ("logits", "output", "outputs", "prediction", "predictions")


def as_call(batch: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Return a batch as positional and named arguments of a call."""
    if isinstance(batch, (list, tuple)):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


def split_target(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Optional[str]
) -> Tuple[Tuple[Any, ...], Dict[str, Any], Any]:
    """Split a batch into the remaining items by position, those by name, and the target.

    Args:
        args: Items by position.
        kwargs: Items by name.
        target: An index or a key. None takes a key such as ``labels``, else the last item. A single item is both
            input and target, as autoencoders need.

    Raises:
        ConfigError: The batch has no such item; the message lists its items.
    """
    named = dict(kwargs)
    key = target
    if key is None:
        usual = [name for name in _TARGET_KEYS if name in named]
        key = usual[0] if usual else None
    if key is not None and key in named:
        value = named.pop(key)
        return tuple(args), named, value
    items = list(args)
    if target is None and len(items) == 1 and not named:
        return (items[0],), {}, items[0]
    index = _index(key, len(items))
    if index is None:
        wanted = "to use as the target" if target is None else f"`{target}`"
        raise _absent("loss.target", f"a batch has no item {wanted}; it has {_shown(items, named)}")
    value = items.pop(index)
    return tuple(items), named, value


def target_of(batch: Any, target: Optional[str]) -> Any:
    """Return the target of a batch, None if it has none (a model that computes its own loss may not need one)."""
    if target is None and isinstance(batch, (list, tuple)) and batch:
        return batch[-1]  # as `split_target` finds it, but every step asks
    args, kwargs = as_call(batch)
    try:
        return split_target(args, kwargs, target)[2]
    except ConfigError:
        return None


def pick(output: Any, which: Optional[str], *, loss: bool = False) -> Any:
    """Return one part of a model's output.

    Args:
        output: A tensor, or tensors in a tuple, list or mapping.
        which: An index or a key. None picks by convention: for the loss the key ``loss``, else the last item;
            otherwise a key such as ``logits``, else the first item.
        loss: Whether to pick the loss.

    Raises:
        ConfigError: The output has no such part; the message lists its parts.
    """
    place = _place(output, which, loss)
    return output if place is None else output[place]


def with_loss(output: Any, which: Optional[str], value: torch.Tensor) -> Any:
    """Return a model's output with its loss (see `pick`) replaced by a value."""
    place = _place(output, which, True)
    if place is None:
        return value
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)  # keeps the class: outputs of transformers are mappings with attributes
        changed[place] = value
        return changed
    items = [value if index == place % len(output) else item for index, item in enumerate(output)]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists and mappings, keeping the containers."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def leading_rows(batch: Any) -> Optional[int]:
    """Return the number of samples in a batch: the rows of the first tensor that has any."""
    sizes: List[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.shape[0]) if tensor.dim() else None, batch)
    return sizes[0] if sizes else None


def _place(output: Any, which: Optional[str], loss: bool) -> Any:
    """Return the key or index of one part of an output, None if the output is a single tensor."""
    if isinstance(output, torch.Tensor):
        if which not in (None, "0"):
            raise _absent("loss.output", f"the model returns a single tensor, so it has no output `{which}`")
        return None
    if isinstance(output, Mapping):
        names = (which,) if which is not None else _LOSS_KEYS if loss else _OUTPUT_KEYS
        found = next((name for name in names if name in output), None)
        if found is None and which is None and not loss and output:
            found = next((name for name in output if name not in _LOSS_KEYS), None)
        if found is None:
            has = ", ".join(map(str, output))
            raise _absent("loss.output", f"the model's output has no `{names[0]}`; it has {has}")
        return found
    if not isinstance(output, (list, tuple)) or not output:
        kind = f"an empty {type(output).__name__}" if isinstance(output, (list, tuple)) else type(output).__name__
        fix = "return a tensor, or a tuple, list or dict of tensors, from forward"
        raise ConfigError(f"`model`: the model returns {kind}", fix=fix, key="model")
    index = _index(which, len(output)) if which is not None else (len(output) - 1 if loss else 0)
    if index is None:
        raise _absent("loss.output", f"the model's output has no item `{which}`; it has {len(output)} items")
    return index


def _index(key: Optional[str], size: int) -> Optional[int]:
    if key is None:
        return size - 1 if size else None
    try:
        index = int(key)
    except ValueError:
        return None
    return index if -size <= index < size else None


def _absent(key: str, what: str) -> ConfigError:
    return ConfigError(f"`{key}`: {what}", fix=f"set {key} to one of these, by index or key", key=key)


def _shown(items: Sequence[Any], named: Mapping[str, Any]) -> str:
    parts = [f"{len(items)} items by position"] if items else []
    parts += [f"the keys {', '.join(named)}"] if named else []
    return " and ".join(parts) or "no items"
