"""Values for `poptorch.Options` setters, converted from YAML.

Enumerations, dtypes and settings objects need an engine; until one is loaded they are `Symbol`s and `Call`s.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, Mapping, Tuple

from ipurun.api.calls import Call, Symbol
from ipurun.api.setters import class_setters, enum_members, popart_keys
from ipurun.errors import listing, nearest

__all__ = ["BadValueError", "convert", "convert_popart", "flatten"]

_DTYPES = {"float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}
_STRATEGIES = ("PipelinedExecution", "ShardedExecution", "SerialPhasedExecution", "ParallelPhasedExecution")


class BadValueError(ValueError):
    """A value that a setter does not take: what it takes, what exists instead, and a fix."""

    def __init__(self, takes: str, known: str = "", fix: str = "") -> None:
        super().__init__(takes)
        self.takes = takes
        self.known = known
        self.fix = fix


def convert(value: Any, annotation: str) -> Any:
    """Return a YAML value as the type that the manifest gives for the argument.

    Raises:
        BadValueError: The value does not fit.
    """
    optional = re.fullmatch(r"Optional\[(.*)\]", annotation)
    if optional:
        return None if value is None else convert(value, optional.group(1))
    if annotation in _CONVERTERS:
        return _CONVERTERS[annotation](value)
    if annotation.startswith("Union[poptorch.ParallelPhasedExecution"):
        return _strategy(value)
    enum = annotation[len("poptorch.") :] if annotation.startswith("poptorch.") else ""
    return _enum(value, enum) if enum_members(enum) else value


def convert_popart(key: str, value: Any) -> Any:
    """Return a value for ``_Popart.set``, in the Python type by which PopART looks up the key.

    Raises:
        BadValueError: The key does not exist, or the value does not fit it.
    """
    kind = popart_keys().get(key)
    if kind is None:
        close = nearest(key, popart_keys())
        raise BadValueError("keys that PopART has", listing(close or popart_keys()), close[0] if close else "")
    if kind == "container":
        return _mapping_of(_word)(value) if isinstance(value, Mapping) else _texts(value)
    simple = {"bool": _boolean, "double": _number, "string": _text}.get(kind, _integer)
    return simple(value)


def flatten(mapping: Mapping[Any, Any]) -> Dict[str, Any]:
    """Return ``{debug: {allowOutOfMemory: true}}``, as from the command line, as ``{debug.allowOutOfMemory: true}``."""
    flat: Dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{key}.{inner}": entry for inner, entry in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValueError("a whole number")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValueError("true or false")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadValueError("a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValueError("a string")
    return value


def _word(value: Any) -> str:
    # Poplar takes its options as strings; YAML gives true and 4.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, str)):
        return str(value)
    raise BadValueError("a string, a number or true/false")


def _texts(value: Any) -> List[str]:
    return [_text(item) for item in ([value] if isinstance(value, str) else _items(value))]


def _items(value: Any) -> List[Any]:
    if not isinstance(value, (list, tuple, set)):
        raise BadValueError("a list")
    return list(value)


def _mapping_of(item: Callable[[Any], Any]) -> Callable[[Any], Dict[str, Any]]:
    def mapping(value: Any) -> Dict[str, Any]:
        if not isinstance(value, Mapping):
            raise BadValueError("a mapping of names to values")
        return {key: item(entry) for key, entry in flatten(value).items()}

    return mapping


def _dtype(value: Any) -> Symbol:
    name = str(value).rpartition("torch.")[2]
    if name not in _DTYPES:
        raise BadValueError("a dtype by name", known="float16 (half), float32 (float)", fix="float16")
    return Symbol(f"torch.{_DTYPES[name]}")


def _enum(value: Any, enum: str) -> Symbol:
    members = enum_members(enum) or []
    name = str(value).rpartition(".")[2]
    prefix = str(value).rpartition(".")[0]
    if name not in members or prefix not in ("", enum, f"poptorch.{enum}"):
        close = nearest(name, members, most=1)
        raise BadValueError(f"a member of {enum} by name", listing(members), close[0] if close else members[0])
    return Symbol(f"poptorch.{enum}.{name}")


def _settings(value: Any) -> Call:
    """Return a ``TensorLocationSettings`` with the setters of a mapping called on it."""
    if isinstance(value, Call) and value.path == "poptorch.TensorLocationSettings":
        return value
    if not isinstance(value, Mapping):
        raise BadValueError("a mapping of TensorLocationSettings' setters", _names("TensorLocationSettings"))
    return Call("poptorch.TensorLocationSettings", chain=_chain("TensorLocationSettings", value))


def _chain(class_name: str, setters: Mapping[str, Any]) -> Tuple[Call, ...]:
    known = class_setters(class_name)
    calls = []
    for name, value in setters.items():
        if name not in known:
            close = nearest(name, known, most=1)
            raise BadValueError(f"setters of {class_name}, not `{name}`", _names(class_name), close[0] if close else "")
        annotation = known[name].parameters[0].annotation
        # None unsets the choice, where PopTorch allows it (useOnChipStorage).
        calls.append(Call(name, (None if value is None else convert(value, annotation),)))
    return tuple(calls)


def _names(class_name: str) -> str:
    return listing(sorted(class_setters(class_name)))


def _strategy(value: Any) -> Call:
    """Convert ``ShardedExecution``, ``{PipelinedExecution: AutoIncrement}``, ``{SerialPhasedExecution: [A, B]}``."""
    if isinstance(value, Call) and value.path.rpartition(".")[2] in _STRATEGIES:
        return value
    if isinstance(value, str):
        value = {value: []}
    name = next((key for key in value if key in _STRATEGIES), None) if isinstance(value, Mapping) else None
    if name is None:
        raise BadValueError("an execution strategy by name", listing(_STRATEGIES), "ShardedExecution")
    given = value[name]
    stages = [] if given is None else given if isinstance(given, list) else [given]
    setters = {key: entry for key, entry in value.items() if key != name}
    return Call(f"poptorch.{name}", tuple(_stage(stage) for stage in stages), chain=_chain(name, setters))


def _stage(stage: Any) -> Any:
    if isinstance(stage, str) and stage.rpartition(".")[2] in (enum_members("AutoStage") or ()):
        return _enum(stage, "AutoStage")
    if isinstance(stage, list):
        return [_text(block) for block in stage]
    return _text(stage)


_CONVERTERS: Dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "bool": _boolean,
    "float": _number,
    "str": _text,
    "List[str]": _texts,
    "Dict[str, float]": _mapping_of(_number),
    "Dict[str, bool]": _mapping_of(_boolean),
    "Dict[str, str]": _mapping_of(_word),
    "torch.dtype": _dtype,
    "poptorch.TensorLocationSettings": _settings,
}
