"""The data sets of a run, by split, made by `data._target_`."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch

from ipurun.errors import ConfigError, Problem
from ipurun.inspect.lightning.data import Splits, has_loaders, splits_of
from ipurun.inspect.targets import check_node, make

__all__ = [
    "can_be_skipped",
    "check_data",
    "check_sample",
    "check_shapes",
    "first_sample",
    "is_read_by_position",
    "is_stream",
    "length_of",
    "make_splits",
    "notes_of",
    "split_for_eval",
]

_OVERRIDES = {"_eval_": "eval", "_test_": "test"}
_ORDER = ("train", "eval", "test")
_PROBES = 4  # samples whose shapes are compared
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
    """Return the problems of the data node that can be found without making the data."""
    if "_target_" not in node:
        return [
            Problem(
                "no data: `data._target_` is not set",
                fix="data._target_=module.DataSet, or data=synthetic to try the model on made-up samples",
                key="data._target_",
            )
        ]
    problems = [
        Problem(
            f"`data.{word}` takes a mapping of arguments",
            seen=repr(node[word]),
            fix=f"data.{word}={{ARGUMENT: VALUE}}, or ~data.{word} removes it",
            key=f"data.{word}",
        )
        for word in _OVERRIDES
        if not (node.get(word) is None or isinstance(node[word], Mapping))
    ]
    if problems:
        return problems
    for name, arguments in _variants(node).items():
        key = "data" if name == "train" else f"data._{name}_"
        problems += check_node(arguments, key, engine_module)
    return problems


def check_sample(sample: Any) -> List[Problem]:
    """Return the problems of a sample that torch can collate but no device can take."""
    named = sample.items() if isinstance(sample, Mapping) else ()
    lists = [name for name, value in named if _is_list_of_numbers(value)]
    if lists:
        return [
            Problem(
                "`data` returns lists of numbers, of which torch makes a list of tensors, one for each position",
                seen=f"{', '.join(map(str, lists))} in the first sample",
                fix="loader.collate=transformers.default_data_collator, or data.set_format('torch') where it is made",
                key="data",
            )
        ]
    unfit = sorted({type(leaf).__name__ for leaf in _leaves(sample) if isinstance(leaf, (str, bytes))})
    if not unfit:
        return []
    return [
        Problem(
            "`data` returns samples that contain text, but a device takes only tensors",
            seen=f"{', '.join(unfit)} in the first sample",
            fix="convert text to numbers in __getitem__, or in a function of yours: loader.collate=module.function",
            key="data",
        )
    ]


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(item, (int, float)) for item in value)


def check_shapes(data: Any, sample: Any, collate: Callable[[List[Any]], Any]) -> List[Problem]:
    """Return the problem of named batches whose shapes vary: a compiled model takes one.

    Args:
        data: A map-style data set, of which a few samples are read if they are named.
        sample: Its first sample.
        collate: Makes a batch of them.
    """
    try:
        if not isinstance(sample, Mapping):
            return []
        places = [len(data) * part // _PROBES for part in range(_PROBES)]
        samples = [data[place] for place in places]
        batches = [collate([sample, sample]) for sample in samples]
        found = [{name: tuple(value.shape) for name, value in batch.items()} for batch in batches]
    except Exception:  # any error of the user's code: loading will report it
        return []
    varying = [name for name in found[0] if len({shapes.get(name) for shapes in found}) > 1]
    if not varying:
        return []
    name = varying[0]
    seen = sorted({shapes[name][1:] for shapes in found if name in shapes})
    longest = max(max(shape, default=0) for shape in seen)
    return [
        Problem(
            f"`data`: batches of `{name}` have different shapes, but a compiled model takes one",
            seen="samples of shape " + ", ".join(str(list(shape)) for shape in seen),
            fix="pad all samples to one length: tokenizer(..., padding='max_length', max_length=N, truncation=True), "
            f"or loader.collate=ipurun.datasets.collate.Pad loader.collate_args.length={longest}",
            key="data",
        )
    ]


def make_splits(node: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> Splits:
    """Make the data sets.

    The target is a map-style or iterable data set, or a function that returns one, a tuple ``(train, eval)`` or
    ``(train, eval, test)``, a mapping of splits, or an object with ``train_dataloader`` and the like. ``_eval_`` and
    ``_test_`` hold arguments that differ for another split made by the same target.

    Raises:
        ConfigError: The target failed, or did not return data.
    """
    splits = Splits({})
    for name, arguments in _variants(node).items():
        key = "data" if name == "train" else f"data._{name}_"
        target = make(arguments, key, engine_module=engine_module)
        if has_loaders(target):
            splits = splits_of(target, key)
            continue
        made = _as_splits(target, name, key)
        splits.update(made if name == "train" else {name: made[name]})
    if "train" not in splits:
        raise ConfigError(
            "`data` has no training split",
            seen=", ".join(splits) or "nothing",
            known="train, eval, test",
            fix="return a data set, (train, eval), or a mapping with the key train",
            key="data",
        )
    return splits


def split_for_eval(splits: Mapping[str, Any], asked: Optional[str]) -> Optional[str]:
    """Return the name of the split to evaluate on, None if there is none.

    Raises:
        ConfigError: The requested split does not exist.
    """
    if asked is None:
        return next((name for name in ("eval", "test") if name in splits), None)
    name = _SYNONYMS.get(asked, asked)
    if name not in splits:
        raise ConfigError(
            f"`eval.split={asked}`: the data has no split of this name",
            known=", ".join(splits),
            fix="eval.split=train",
            key="eval.split",
        )
    return name


def is_stream(data: Any) -> bool:
    """Return whether a data set is iterated rather than read by index."""
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, torch.utils.data.IterableDataset) or not by_index


def is_read_by_position(data: Any) -> bool:
    """Return whether a stream can be read from any position: it has ``read(start, stop)``."""
    return is_stream(data) and callable(getattr(data, "read", None))


def can_be_skipped(data: Any) -> bool:
    """Return whether a data set can be read on after one of its samples has raised an error, as far as can be known."""
    if not is_stream(data) or is_read_by_position(data):
        return True
    is_generator = inspect.isgeneratorfunction(getattr(type(data), "__iter__", None)) or inspect.isgenerator(data)
    return not is_generator and not isinstance(data, torch.utils.data.IterDataPipe)


def length_of(data: Any) -> Optional[int]:
    """Return the number of samples (or of a sampler's items), None for a stream without a length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def first_sample(data: Any) -> Optional[Any]:
    """Return the first sample of a data set that is read by index, None if that fails."""
    try:
        return data[0]
    except Exception:  # any error of the user's code: loading will report it
        return None


def notes_of(*owners: Any) -> Tuple[str, ...]:
    """Return the remarks for the user in the attribute ``notes`` of data sets and models."""
    found: List[str] = []
    for owner in owners:
        notes = getattr(owner, "notes", ())
        if isinstance(notes, str):
            found.append(notes)
        elif isinstance(notes, (list, tuple)):
            found += map(str, notes)
    return tuple(dict.fromkeys(found))


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        for item in sample:
            yield from _leaves(item)
    else:
        yield sample


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
                f"`{key}` did not return a data set for the split `{split}`",
                seen=f"an object of type {type(data).__name__}",
                known="an object with __getitem__ and __len__, or with __iter__",
                fix="data._target_=module.DataSet, or a function that returns data sets",
                key=key,
            )
    if name not in named:
        fix = f"return a data set for it, or a mapping with the key {name}"
        seen = ", ".join(named) or "nothing"
        raise ConfigError(f"`{key}` did not return the split `{name}`", seen=seen, fix=fix, key=key)
    return named


def _is_data(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, str, bytes, int, float)):
        return False
    return (hasattr(value, "__getitem__") and hasattr(value, "__len__")) or hasattr(value, "__iter__")
