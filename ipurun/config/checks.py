"""Check single values for what a type cannot express: allowed words and ranges. The plan checks rules across keys."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ipurun.config.keys import all_keys
from ipurun.config.schema import Key, RunConfig
from ipurun.errors import Problem, listing, nearest
from ipurun.moved import new_path

__all__ = ["check_allowed", "check_interpolations", "check_values", "with_valid_values"]

_LARGEST = 2**63 - 1  # torch and PopTorch count in 64 bits
# Characters of a value with every interpolation replaced. Each counts as a hundred, since it takes time to replace.
_MOST_CHARACTERS, _COST_OF_INTERPOLATION = 10_000_000, 100
_UNKNOWN = "\0"  # in place of a computed part of a name
_GROUPS_OF_TARGETS = ("metrics", "logger", "callbacks")  # name -> `_target_` and arguments


def check_values(config: RunConfig) -> List[Problem]:
    """Return the problems of single keys of a typed config."""
    checked = [_check(key, _read(config, path)) for path, key in all_keys().items()]
    problems = [problem for problem, _ in filter(None, checked)]
    for group in _GROUPS_OF_TARGETS:
        for name, node in _read(config, group).items():
            path = f"{group}.{name}"
            if str(name).startswith("_"):
                what = f"`{group}` maps names to mappings with `_target_`, so `{name}` belongs one level below"
                problems.append(Problem(what, seen=f"{name}: {node}", fix=f"{group}.NAME.{name}=VALUE", key=path))
            elif not (node is None or isinstance(node, dict)):
                what = f"`{path}` takes a mapping: `_target_` and arguments"
                problems.append(Problem(what, seen=str(node), fix=f"{path}={{}}", key=path))
    return problems


def check_interpolations(values: Any) -> List[Problem]:
    """Return the problem of interpolations that multiply: forty keys that name another one twice mean 2 ** 40 copies.

    Args:
        values: The config as plain data, with interpolations.
    """
    try:
        _Expanded(values).size_of(())
    except _TooLargeError as error:
        key = ".".join(error.path)
        what = f"`{key}`: interpolations of interpolations multiply to more than {_MOST_CHARACTERS:,} characters"
        return [Problem(what, seen=error.text[:100], fix="write the value itself in place of ${...}", key=key)]
    except RecursionError:  # reported by whoever resolves them
        pass
    return []


class _TooLargeError(Exception):
    def __init__(self, path: Tuple[str, ...], text: str) -> None:
        super().__init__(path, text)
        self.path, self.text = path, text


class _Expanded:
    """Sizes of the parts of a config with every interpolation replaced by what it names, without replacing any."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self._sizes: Dict[Tuple[str, ...], int] = {}  # 0 while it is computed: OmegaConf reports what contains itself

    def size_of(self, path: Tuple[str, ...]) -> int:
        """Return the size of a part of the config.

        Raises:
            _TooLargeError: A part is too large.
        """
        if path in self._sizes:
            return self._sizes[path]
        self._sizes[path] = 0
        value = self._read(path)
        size = 1
        if isinstance(value, (dict, list)):
            names = value if isinstance(value, dict) else range(len(value))
            size += sum(self.size_of((*path, str(name))) for name in names)
        elif isinstance(value, str):
            size += len(value)
            for target in self._named_in(value, path):
                size += _COST_OF_INTERPOLATION + max(map(self.size_of, self._matching(target)), default=0)
        if size > _MOST_CHARACTERS:
            raise _TooLargeError(path, str(value))
        self._sizes[path] = size
        return size

    def _named_in(self, text: str, path: Tuple[str, ...]) -> Iterator[Tuple[str, ...]]:
        """Yield the path of every key that text names in ``${key}`` or as an argument in ``${resolver:key,...}``.

        A part of a name that is computed (``${a${i}}``) and not known here becomes `_UNKNOWN`.
        """
        open_parts = [""]
        for token in re.findall(r"\$\{|\}|[^${}]+|.", text, re.DOTALL):
            if token == "${":
                open_parts.append("")
            elif token == "}" and len(open_parts) > 1:
                inside = open_parts.pop()
                resolver, _, arguments = inside.rpartition(":")
                for word in arguments.split(",") if resolver else [inside]:
                    yield _absolute(word.strip(), path)
                named = None if resolver else self._read(_absolute(inside.strip(), path))
                is_known = isinstance(named, (int, float, str)) and "${" not in str(named)
                open_parts[-1] += str(named) if is_known else _UNKNOWN
            else:
                open_parts[-1] += token

    def _matching(self, path: Tuple[str, ...]) -> List[Tuple[str, ...]]:
        """Return the paths that a path with unknown parts may mean."""
        found: List[Tuple[str, ...]] = [()]
        for name in path:
            if _UNKNOWN not in name:
                found = [(*parent, name) for parent in found]
                continue
            pattern = re.compile(".*".join(map(re.escape, name.split(_UNKNOWN))), re.DOTALL)
            found = [(*parent, key) for parent in found for key in self._names_in(parent) if pattern.fullmatch(key)]
        return found

    def _names_in(self, path: Tuple[str, ...]) -> List[str]:
        value = self._read(path)
        names = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        return [str(name) for name in names]

    def _read(self, path: Tuple[str, ...]) -> Any:
        found = self._values
        for depth, name in enumerate(path):
            if isinstance(found, str):  # the path leads through an interpolation
                named = (target for text in self._named_in(found, path[:depth]) for target in self._matching(text))
                found = next((self._read(target) for target in named), None)
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict):
                found = found.get(name, found.get(int(name) if name.isdigit() else name))  # YAML reads `1:` as a number
            else:
                return None
        return found


def _absolute(key: str, path: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return the path of a key as an interpolation at another path names it: ``.key`` is a neighbour."""
    name = key.lstrip(".")
    dots = len(key) - len(name)
    above = path[: max(len(path) - dots, 0)] if dots else ()
    return (*above, *filter(None, re.split(r"[.\[\]]", name)))


def check_allowed(config: RunConfig) -> List[Problem]:
    """Return a problem for everything that the config would import outside `security.allow_targets`.

    To be called before anything is imported.
    """
    prefixes = config.security.allow_targets
    if prefixes is None:
        return []
    problems = [
        _not_allowed(key, path, prefixes) for key, path in _imported(config) if not _is_allowed(str(path), prefixes)
    ]
    if config.custom_ops.libraries:
        key = "custom_ops.libraries"
        fix = f"{key}=[], or security.allow_targets=null if you trust the config"
        what = f"`{key}`: `security.allow_targets` does not allow shared libraries"
        problems.append(Problem(what, seen=listing(config.custom_ops.libraries), fix=fix, key=key))
    return problems


def _not_allowed(key: str, path: Any, prefixes: List[str]) -> Problem:
    return Problem(
        f"`{key}`: `security.allow_targets` does not allow {path}",
        known=listing(prefixes) or "nothing",
        fix=f"add its module to security.allow_targets if you trust it: {str(path).rpartition('.')[0] or path}",
        key=key,
    )


def _is_allowed(path: str, prefixes: List[str]) -> bool:
    # Special names such as `__globals__` lead from any function to everything that its module has imported.
    if any(part.startswith("__") for part in path.split(".")):
        return False
    names = {path, new_path(path)}
    return all(any((name + ".").startswith(prefix.rstrip(".") + ".") for prefix in prefixes) for name in names)


def _imported(config: RunConfig) -> Iterator[Tuple[str, Any]]:
    """Yield the keys that name something to import, with the names."""
    yield from _targets(dataclasses.asdict(config), "")
    for key, path in (("loss.name", config.loss.name), ("loader.collate", config.loader.collate)):
        if path is not None and "." in path:  # a loss without a dot is one of torch's
            yield key, path
    for name, given in config.custom_ops.cpu.items():
        for path in given.values() if isinstance(given, dict) else [given]:
            yield f"custom_ops.cpu.{name}", path


def _targets(value: Any, key: str) -> Iterator[Tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        path = f"{key}.{name}" if key else str(name)
        if name == "_target_":
            yield path, item
        yield from _targets(item, path)


def with_valid_values(config: RunConfig) -> RunConfig:
    """Return a copy with a valid value wherever `check_values` finds a problem, so that the rest can be checked."""
    valid = copy.deepcopy(config)
    for path, key in all_keys().items():
        found = _check(key, _read(valid, path))
        if found is not None:
            _write(valid, path, found[1])
    for group in _GROUPS_OF_TARGETS:
        nodes = _read(valid, group)
        _write(valid, group, {name: node for name, node in nodes.items() if node is None or isinstance(node, dict)})
    return valid


def _check(key: Key, value: Any) -> Optional[Tuple[Problem, Any]]:
    """Return the problem of an invalid value, with a valid one to replace it."""
    path = key.path
    if key.choices and value is not None and str(value) not in key.choices:
        close = nearest(str(value), key.choices, most=1)
        fix = f"{path}={close[0] if close else key.choices[0]}"
        if path == "precision" and "bf16" in str(value):
            fix = "precision=16-mixed: IPUs have no bfloat16"
        return Problem(f"`{path}` cannot be `{value}`", known=listing(key.choices), fix=fix, key=path), key.default
    if not isinstance(value, (int, float)):
        return None
    default = "" if key.default is None else f"{path}={key.default_text}"
    largest = _LARGEST if key.maximum is None else key.maximum
    if key.minimum is not None and value < key.minimum:
        fix = default if isinstance(key.default, float) else f"{path}={max(key.minimum, 1)}"
        what, valid = f"must be {key.minimum} or more", key.minimum
    elif value > largest and (key.maximum is not None or isinstance(value, int)):
        fix = f"{path}={largest}" if key.maximum is not None and isinstance(value, int) else default or f"{path}=1"
        what, valid = f"must be {largest} or less", key.default
    elif isinstance(value, float) and not math.isfinite(value):
        what, fix, valid = "must be a finite number", default, key.default
    elif key.positive and value <= 0:
        what, fix, valid = "must be above 0", default, key.default
    else:
        return None
    return Problem(f"`{path}` {what}", seen=str(value), fix=fix, key=path), valid


def _write(config: RunConfig, path: str, value: Any) -> None:
    group, _, name = path.rpartition(".")
    setattr(_read(config, group) if group else config, name, value)


def _read(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
