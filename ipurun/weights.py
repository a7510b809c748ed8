"""Weights to start from: read them from a run, a safetensors file or a torch file, and load them into a model.

No code of a file is run: torch files may hold tensors and plain values only, and safetensors files have none.
"""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple

import torch
from torch import nn

from ipurun import checkpoint
from ipurun.config.patterns import check_parameters, flat_names, match_parameters, renamed
from ipurun.config.schema import InitConfig, RunConfig
from ipurun.errors import ConfigError, Findings, Problem, RunError, listing
from ipurun.inspect.facts import InitialWeights
from ipurun.table_parts import load_whole_weights

__all__ = ["load_initial_weights", "open_weights"]

_KEY = "init_from"
# Where training programs keep the weights in what they save: Lightning, ipurun and many others, scripts.
_PLACES = ("state_dict", "model", "model_state_dict", "weights", "params")
_LONGEST_HEADER = 100 << 20  # bytes, the limit of the safetensors format
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_SHOWN = 6


class Weights(ABC):
    """Named tensors of a file.

    Args:
        path: The file.
        kind: What it is, for the user.
        shapes: Name -> shape.
    """

    def __init__(self, path: Path, kind: str, shapes: Mapping[str, Tuple[int, ...]]) -> None:
        self.path = path
        self.kind = kind
        self.shapes = dict(shapes)

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name."""


def load_initial_weights(config: RunConfig, model: nn.Module, copies: bool = True) -> InitialWeights:
    """Load the weights of `init_from` into a model.

    Args:
        config: Names the file, and what of it is loaded.
        model: The model.
        copies: Whether to copy the values; else only names and shapes are compared.

    Returns:
        What was loaded and what was not.

    Raises:
        ConfigError: The file cannot be read, or does not fit the model.
    """
    weights = open_weights(str(config.init_from), config.init.best)
    targets: Dict[str, torch.Tensor] = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
    }
    found = Findings()
    names, removed = _names_in_model(weights, config.init.rename, set(targets), found)
    match = _Match(weights, names, targets, config.init, found)
    problems = found.problems or match.problems(config.init.strict)
    if problems:
        raise ConfigError(problems)
    if copies:
        with torch.no_grad():
            for name, source in match.loaded.items():
                targets[name].copy_(weights.read(source))
            load_whole_weights(model, targets)
    return InitialWeights(
        path=str(weights.path),
        kind=weights.kind + (f", without the prefix `{removed}`" if removed else ""),
        loaded=match.loaded,
        not_loaded=match.not_loaded,
        left_over=match.left_over,
    )


def open_weights(path: str, best: bool = False) -> Weights:
    """Open a run folder, a folder of runs, a checkpoint, a safetensors file or a torch file.

    Args:
        path: The file or folder.
        best: Take the best checkpoint of a run instead of the newest.

    Raises:
        ConfigError: It does not exist, or is none of these.
    """
    place = Path(path)
    try:
        if place.is_dir():
            return _open_folder(place, best)
        if not place.is_file():
            raise ConfigError(
                f"`{_KEY}`: there is no file or folder `{path}`",
                known=listing(sorted(child.name for child in place.parent.glob("*"))) if place.parent.is_dir() else "",
                fix=f"{_KEY}=RUN_FOLDER, or a .pt, .ckpt or .safetensors file",
                key=_KEY,
            )
        if place.suffix == ".safetensors":
            return _SafetensorsFile([place])
        return _TorchFile(place)
    except OSError as error:
        raise ConfigError(
            f"`{_KEY}`: `{path}` cannot be read", seen=str(error), fix="check its name and permissions", key=_KEY
        ) from error


def _open_folder(place: Path, best: bool) -> Weights:
    runs = [place] if (place / "config.yaml").is_file() else sorted(file.parent for file in place.glob("*/config.yaml"))
    for run in reversed(runs):
        folder = run / "checkpoints"
        found = checkpoint.best(folder) if best else checkpoint.latest(folder)
        if found is not None:
            return _TorchFile(found.path)
    files = sorted(place.glob("*.safetensors"))
    if files:
        return _SafetensorsFile(files)
    kind = "best checkpoint" if best else "checkpoint"
    what = f"the run `{place}` has no {kind}" if runs == [place] else f"`{place}` has no run with a {kind}"
    fix = "train it first, or give another run" if runs else f"{_KEY}=RUN_FOLDER, or a .pt, .ckpt or .safetensors file"
    raise ConfigError(f"`{_KEY}`: {what}", known=listing(run.name for run in runs[-5:]), fix=fix, key=_KEY)


class _TorchFile(Weights):
    """A checkpoint of ipurun, or what `torch.save` wrote: a state dictionary, or a mapping with one inside."""

    def __init__(self, path: Path) -> None:
        content, kind = _read_torch(path)
        self._tensors, place = _state_dict(path, content)
        if place == "state_dict" and any("lightning" in str(key) for key in content):
            kind = f"Lightning checkpoint of step {content.get('global_step', '?')}"
        super().__init__(path, kind, {name: tuple(value.shape) for name, value in self._tensors.items()})

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name."""
        return self._tensors[name]


def _read_torch(path: Path) -> Tuple[Any, str]:
    about = next((item for item in checkpoint.listed(path.parent) if item.path.name == path.name), None)
    if about is not None:
        try:
            return checkpoint.load(about), f"checkpoint of step {about.step}"
        except RunError as error:
            raise ConfigError(_keyed(problem) for problem in error.problems) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True), "torch file"
    except Exception as error:  # any: a damaged file fails in many ways
        text = str(error).strip().splitlines() or [""]
        if "weights_only" in str(error) or "Unsupported" in str(error) or "WeightsUnpickler" in str(error):
            raise ConfigError(
                f"`{_KEY}`: `{path}` holds more than tensors and plain values, which only code of the file could make",
                seen=f"{type(error).__name__}: {text[0]}",
                fix="if you trust the file, save its weights alone: "
                f"torch.save(torch.load('{path}', weights_only=False)['state_dict'], 'weights.pt')",
                key=_KEY,
            ) from error
        raise ConfigError(
            f"`{_KEY}`: `{path}` is not a torch file",
            seen=f"{type(error).__name__}: {text[0]}",
            fix="give a file that torch.save or safetensors wrote, or a run folder",
            key=_KEY,
        ) from error


def _keyed(problem: Problem) -> Problem:
    return Problem(problem.what, problem.where, problem.seen, problem.known, "give another checkpoint", key=_KEY)


def _state_dict(path: Path, content: Any) -> Tuple[Dict[str, torch.Tensor], str]:
    """Return the tensors by name of what a torch file holds, and the key they are under."""
    if isinstance(content, Mapping):
        for place in ("", *_PLACES):
            inner = content.get(place) if place else content
            if isinstance(inner, Mapping) and inner and all(isinstance(name, str) for name in inner):
                tensors = {name: value for name, value in inner.items() if isinstance(value, torch.Tensor)}
                if tensors and (place or len(tensors) == len(inner)):
                    return tensors, place
    seen = f"keys {listing(map(str, content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
    raise ConfigError(
        f"`{_KEY}`: `{path}` has no state dictionary",
        seen=seen,
        known=f"a mapping of names to tensors, alone or under {', '.join(_PLACES)}",
        fix="torch.save(model.state_dict(), FILE)",
        key=_KEY,
    )


@dataclass(frozen=True)
class _Entry:
    """Position of a tensor in a safetensors file."""

    path: Path
    dtype: torch.dtype
    shape: Tuple[int, ...]
    begin: int
    size: int


class _SafetensorsFile(Weights):
    """One or several safetensors files: a header in JSON that describes the tensors, then their bytes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._entries: Dict[str, _Entry] = {}
        for path in paths:
            self._entries.update(_read_header(path))
        kind = "safetensors file" if len(paths) == 1 else f"{len(paths)} safetensors files"
        place = paths[0] if len(paths) == 1 else paths[0].parent
        super().__init__(place, kind, {name: entry.shape for name, entry in self._entries.items()})

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name."""
        entry = self._entries[name]
        if not entry.size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        with entry.path.open("rb") as stream:
            stream.seek(entry.begin)
            data = bytearray(stream.read(entry.size))
        return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


def _read_header(path: Path) -> Dict[str, _Entry]:
    """Return the entries of a safetensors file, each within the file and of the size that its shape needs."""
    total = path.stat().st_size
    with path.open("rb") as stream:
        beginning = stream.read(8)
        length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else total
        if length > min(_LONGEST_HEADER, total - 8):
            raise _not_safetensors(path, "its header is longer than the file")
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"))
        header.pop("__metadata__", None)
        entries = {name: _entry(path, fields, 8 + length) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _not_safetensors(path, f"{type(error).__name__}: {error}") from error
    for name, entry in entries.items():
        if entry.begin < 8 + length or entry.begin + entry.size > total:
            raise _not_safetensors(path, f"`{name}` is outside the file, which may be incomplete")
        if entry.size != math.prod(entry.shape) * torch.empty((), dtype=entry.dtype).element_size():
            raise _not_safetensors(path, f"`{name}` has {entry.size} bytes, which is not its shape {list(entry.shape)}")
    return entries


def _entry(path: Path, fields: Mapping[str, Any], offset: int) -> _Entry:
    begin, end = (int(place) for place in fields["data_offsets"])
    shape = tuple(int(length) for length in fields["shape"])
    if fields["dtype"] not in _DTYPES or any(length < 0 for length in shape) or not 0 <= begin <= end:
        raise ValueError(f"dtype {fields['dtype']}, shape {list(shape)}, bytes {begin} to {end}")
    return _Entry(path, _DTYPES[fields["dtype"]], shape, offset + begin, end - begin)


def _not_safetensors(path: Path, seen: str) -> ConfigError:
    return ConfigError(
        f"`{_KEY}`: `{path}` is not a safetensors file", seen=seen, fix="copy or download the file again", key=_KEY
    )


def _names_in_model(
    weights: Weights, rename: Mapping[str, Any], known: Set[str], found: Findings
) -> Tuple[Dict[str, str], str]:
    """Return the name in the model of each tensor of a file, and a prefix that all had and that was removed.

    Lightning and wrappers for several devices put the model inside another module: `model.`, `module.`.
    """
    if rename:
        return _renamed_by_map(weights, rename, found), ""
    names = {name: name for name in weights.shapes}
    removed = ""
    while not known.intersection(names.values()):
        prefixes = {name.partition(".")[0] for name in names.values()}
        if len(prefixes) != 1 or not all("." in name for name in names.values()):
            return {name: name for name in weights.shapes}, ""
        removed += prefixes.pop() + "."
        names = {name: name[len(removed) :] for name in weights.shapes}
    return names, removed


def _renamed_by_map(weights: Weights, rename: Mapping[str, Any], found: Findings) -> Dict[str, str]:
    rules = {pattern: "" if new is None else str(new) for pattern, new in flat_names(rename, ()).items()}
    key = "init.rename"
    unused = set(rules)
    names: Dict[str, str] = {}
    for name in weights.shapes:
        names[name] = name
        for pattern, new in rules.items():
            other = renamed(name, pattern, new, key, found)
            if other is not None:
                names[name] = other
                unused.discard(pattern)
                break
    for pattern in (pattern for pattern in rules if pattern in unused and not found.problems):
        check_parameters(pattern, key, list(weights.shapes), found, owner="the file has", what="weight")
    twice = [new for new in set(names.values()) if list(names.values()).count(new) > 1] if not found.problems else []
    if twice:
        same = [name for name, new in names.items() if new == twice[0]]
        found.problem(f"`{key}` gives several weights the name `{twice[0]}`", seen=listing(same), key=key)
    return names


class _Match:
    """Mapping of the tensors of a file to those of a model.

    Args:
        weights: The file.
        names: Name in the file -> name in the model.
        targets: Name -> tensor of the model.
        init: What to load.
        found: Takes problems of patterns.
    """

    def __init__(
        self,
        weights: Weights,
        names: Mapping[str, str],
        targets: Mapping[str, torch.Tensor],
        init: InitConfig,
        found: Findings,
    ) -> None:
        self._weights = weights
        self._names = names
        sources = {new: name for name, new in names.items()}
        every = list(dict.fromkeys([*targets, *sources]))
        wanted = self._matching(init.include, "init.include", every, found) if init.include else set(every)
        wanted -= self._matching(init.exclude, "init.exclude", every, found)
        self.loaded: Dict[str, str] = {}
        self.not_loaded: Dict[str, str] = {}
        self._misfits: List[str] = []
        for name, target in targets.items():
            if name not in wanted:
                self.not_loaded[name] = "excluded by init.exclude" if init.exclude else "not in init.include"
            elif name not in sources:
                self.not_loaded[name] = "not in the file"
            elif weights.shapes[sources[name]] != tuple(target.shape):
                shape = list(weights.shapes[sources[name]])
                self.not_loaded[name] = f"its shape is {list(target.shape)}, in the file {shape}"
                self._misfits.append(f"{name} {list(target.shape)}, in the file {shape}")
            else:
                self.loaded[name] = sources[name]
        # A tensor with several names is in some files only once.
        arrived = {id(targets[name]) for name in self.loaded}
        tied = [
            name for name, why in self.not_loaded.items() if id(targets[name]) in arrived and why == "not in the file"
        ]
        for name in tied:
            del self.not_loaded[name]
        used = set(self.loaded.values())
        self.left_over = {
            name: ("excluded" if new not in wanted else "its shape differs" if new in targets else "not in the model")
            for name, new in names.items()
            if name not in used
        }

    @staticmethod
    def _matching(patterns: Sequence[str], key: str, names: Sequence[str], found: Findings) -> Set[str]:
        matched: Set[str] = set()
        for pattern in map(str, patterns):
            before = len(found.problems)
            check_parameters(pattern, key, names, found, what="weight")
            if len(found.problems) == before:
                matched.update(match_parameters(pattern, names))
        return matched

    def _as_in_model(self, name: str) -> str:
        """Return the name that a weight of the file would have in the model, and its own if that is another."""
        return name if self._names[name] == name else f"{self._names[name]} (in the file {name})"

    def problems(self, strict: bool) -> List[Problem]:
        """Return why the file does not fit."""
        where = f"{self._weights.path} ({self._weights.kind})"
        if not self.loaded:
            return [
                Problem(
                    f"`{_KEY}`: nothing in the file fits the model",
                    where,
                    seen=f"the file has {listing(self._weights.shapes)}",
                    known=f"the model has {listing(self.not_loaded)}",
                    fix="init.rename={NAME_IN_FILE: NAME_IN_MODEL}",
                    key=_KEY,
                )
            ]
        if not strict:
            return []
        missing = [name for name, why in self.not_loaded.items() if why == "not in the file"]
        extra = [self._as_in_model(name) for name, why in self.left_over.items() if why == "not in the model"]
        problems = []
        for names, what in (
            (missing, "weights of the model are not in the file"),
            (extra, "weights of the file are not in the model"),
            (self._misfits, "weights have another shape in the file"),
        ):
            if names:
                tops = dict.fromkeys(name.split()[0].split(".")[0] for name in names)
                problems.append(
                    Problem(
                        f"`{_KEY}`: {len(names)} {what}",
                        where,
                        seen=listing(names, most=_MOST_SHOWN),
                        fix=f"init.exclude=[{','.join(list(tops)[:3])}], init.rename, or init.strict=false",
                        key=_KEY,
                    )
                )
        return problems
