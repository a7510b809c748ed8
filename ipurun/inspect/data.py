"""The data sets of a run, by split, from whatever `data._target_` gives."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch

from ipurun.errors import ConfigError, Problem
from ipurun.inspect.targets import check_node, make

__all__ = ["check_data", "check_sample", "is_stream", "length_of", "make_splits", "notes_of", "split_for_eval"]

_OVERRIDES = {"_eval_": "eval", "_test_": "test"}
_ORDER = ("train", "eval", "test")
_SYNONYMS = {
    "training": "train",
    "validation": "eval",
    "valid": "eval",
    "val": "eval",
    "dev": "eval",
    "evaluation": "eval",
    "testing": "test",
}


def check_data(node: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """All problems of the data node that show without building it."""
    if "_target_" not in node:
        return [
            Problem(
                "no data: `data._target_` is not set",
                fix="data._target_=module.DataSet, or data=synthetic to try the model on made-up samples",
                key="data._target_",
            )
        ]
    problems = []
    for name, arguments in _variants(node).items():
        key = "data" if name == "train" else f"data._{name}_"
        problems += check_node(arguments, key, engine_module)
    return problems


def check_sample(sample: Any) -> List[Problem]:
    """Problems of a sample that torch's own collate would let pass, and no device can take."""
    unfit = sorted({type(leaf).__name__ for leaf in _leaves(sample) if isinstance(leaf, (str, bytes))})
    if not unfit:
        return []
    return [
        Problem(
            "`data` gives samples with text in them, and a device takes tensors",
            seen=f"{', '.join(unfit)} in the first sample",
            fix="turn it into numbers in __getitem__, or name a function that does: loader.collate=module.function",
            key="data",
        )
    ]


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        for item in sample:
            yield from _leaves(item)
    else:
        yield sample


def make_splits(node: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> Dict[str, Any]:
    """Build the data sets.

    The target may be a map-style or iterable data set, or a function that returns one, a tuple
    ``(train, eval)`` or ``(train, eval, test)``, or a mapping of splits. ``_eval_`` and ``_test_`` hold
    arguments that differ in another split made by the same target.

    Raises:
        ConfigError: What came back is no data, or the target failed.
    """
    splits: Dict[str, Any] = {}
    for name, arguments in _variants(node).items():
        key = "data" if name == "train" else f"data._{name}_"
        made = _as_splits(make(arguments, key, engine_module=engine_module), name, key)
        splits.update(made if name == "train" else {name: made[name]})
    if "train" not in splits:
        raise ConfigError(
            "`data` gives no training split", seen=", ".join(splits) or "nothing", known="train, eval, test", key="data"
        )
    return splits


def split_for_eval(splits: Mapping[str, Any], asked: Optional[str]) -> Optional[str]:
    """Name of the split to evaluate on, None where there is none.

    Raises:
        ConfigError: The split that was asked for does not exist.
    """
    if asked is None:
        return next((name for name in ("eval", "test") if name in splits), None)
    name = _SYNONYMS.get(asked, asked)
    if name not in splits:
        raise ConfigError(
            f"`eval.split={asked}`: the data has no such split",
            known=", ".join(splits),
            fix="eval.split=train",
            key="eval.split",
        )
    return name


def length_of(data: Any) -> Optional[int]:
    """Number of samples, None for a stream that does not tell."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def notes_of(*subjects: Any) -> Tuple[str, ...]:
    """Remarks that data sets or the model have for the user, from their attribute ``notes``."""
    found: List[str] = []
    for subject in subjects:
        notes = getattr(subject, "notes", ())
        found += [notes] if isinstance(notes, str) else [str(n) for n in notes] if _is_sequence(notes) else []
    return tuple(dict.fromkeys(found))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _variants(node: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    common = {name: value for name, value in node.items() if name not in _OVERRIDES}
    variants = {"train": common}
    for word, split in _OVERRIDES.items():
        if word in node:
            variants[split] = {**common, **(node[word] or {})}
    return variants


def _as_splits(made: Any, name: str, key: str) -> Dict[str, Any]:
    if isinstance(made, Mapping) and not isinstance(made, torch.utils.data.Dataset):
        named = {_SYNONYMS.get(str(split), str(split)): data for split, data in made.items()}
    elif isinstance(made, tuple) and 1 <= len(made) <= 3 and all(_is_data(item) for item in made if item is not None):
        named = dict(zip(_ORDER, made))
    else:
        named = {name: made}
    named = {split: data for split, data in named.items() if data is not None}
    for split, data in named.items():
        if not _is_data(data):
            raise ConfigError(
                f"`{key}` gives no data set for the split `{split}`",
                seen=f"an object of type {type(data).__name__}",
                known="an object with __getitem__ and __len__, or with __iter__",
                key=key,
            )
    if name not in named:
        raise ConfigError(f"`{key}` gives no split `{name}`", seen=", ".join(named) or "nothing", key=key)
    return named


def _is_data(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, str, bytes, int, float)):
        return False
    return (hasattr(value, "__getitem__") and hasattr(value, "__len__")) or hasattr(value, "__iter__")


def is_stream(data: Any) -> bool:
    """Whether a data set is read in its own order rather than by index."""
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, torch.utils.data.IterableDataset) or not by_index
