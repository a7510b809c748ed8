"""The setters of `poptorch.Options` and the names that they take, from the API manifest."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.api import manifest

__all__ = ["Parameter", "Setter", "class_setters", "enum_members", "group_names", "option_setters", "popart_keys"]

# Methods of option groups that read, copy or load rather than set one option.
_NOT_SETTERS = {"from_json", "loadFromFile", "toDict", "clone", "defaultOutputMode", "checkIsFrozen"}


@dataclass(frozen=True)
class Parameter:
    """One argument of a setter."""

    name: str
    annotation: str
    required: bool
    variadic: bool


@dataclass(frozen=True)
class Setter:
    """One setter: its dotted path below ``Options``, its arguments, and the storage keys it writes."""

    path: str
    parameters: Tuple[Parameter, ...]
    writes: Tuple[str, ...]  # "option:device_iterations", "popart:engineOptions", "private:_execution_strategy"


@functools.lru_cache(maxsize=1)
def option_setters() -> Mapping[str, Setter]:
    """Return the setters of ``Options`` and all its groups, by dotted path."""
    setters: Dict[str, Setter] = {}
    for group, described in manifest.load()["option_groups"].items():
        if group != "Options" and not group.startswith("Options."):
            continue
        prefix = group[len("Options.") :] + "." if "." in group else ""
        methods = _methods(described["class"])
        for name, details in described["setters"].items():
            if name not in _NOT_SETTERS:
                path = prefix + name
                setters[path] = Setter(path, _parameters(methods[name]), _writes(details["writes"]))
    return setters


def group_names() -> List[str]:
    """Return the names of the groups of options: Training, Precision, ..."""
    return sorted({path.split(".")[0] for path in option_setters() if "." in path})


@functools.lru_cache(maxsize=None)
def class_setters(name: str) -> Mapping[str, Setter]:
    """Return the setters of a settings object or strategy, including inherited ones, by name."""
    setters: Dict[str, Setter] = {}
    described: Optional[Mapping[str, Any]] = _classes().get(name)
    while described is not None:
        for method, details in described.get("methods", {}).items():
            if details.get("returns_self") and not method.startswith("_"):
                setters.setdefault(method, Setter(method, _parameters(details), _writes(details.get("writes", {}))))
        bases = [base for base in described.get("bases", []) if base in _classes()]
        described = _classes()[bases[0]] if bases else None
    return setters


def enum_members(name: str) -> Optional[List[str]]:
    """Return the member names of one of PopTorch's enumerations; None where it does not exist."""
    described = manifest.load()["modules"]["poptorch.enums"]["classes"].get(name)
    return None if described is None else list(described["members"])


@functools.lru_cache(maxsize=1)
def popart_keys() -> Mapping[str, str]:
    """Return the type of each PopART option (bool, uint64, double, string, container, enum) without a setter.

    PopTorch's own options go through the same parser as PopART's and are listed with them. Set a second time
    through ``_Popart.set`` they would collide, so they are left out.
    """
    tables = manifest.load()["popart_option_keys"]
    kinds = {key: kind for kind in ("bool", "uint64", "double", "string", "container") for key in tables[kind]}
    kinds.update({entry["key"]: "enum" for entry in tables["enum"]})
    groups = manifest.load()["option_groups"].items()
    own = {
        key
        for name, group in groups
        if name != "Options._Popart"
        for key in (*group.get("storage_defaults", ()), *group.get("keys_absent_until_set", ()))
    }
    return {key: kind for key, kind in kinds.items() if key not in own and "_" not in key and key != "logDir"}


def _classes() -> Mapping[str, Any]:
    classes: Mapping[str, Any] = manifest.load()["modules"]["poptorch.options"]["classes"]
    return classes


def _methods(class_name: str) -> Mapping[str, Any]:
    methods: Mapping[str, Any] = _classes()[class_name]["methods"]
    return methods


def _parameters(method: Mapping[str, Any]) -> Tuple[Parameter, ...]:
    return tuple(
        Parameter(
            entry["name"],
            entry.get("annotation") or "",
            "default" not in entry and entry["kind"] != "var_positional",
            entry["kind"] == "var_positional",
        )
        for entry in method["params"]
    )


def _writes(details: Mapping[str, Any]) -> Tuple[str, ...]:
    labels = {"option_keys": "option", "popart_keys": "popart", "private_attributes": "private"}
    return tuple(f"{label}:{key}" for kind, label in labels.items() for key in details.get(kind, ()))
