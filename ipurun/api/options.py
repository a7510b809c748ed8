"""`options:` of a config: setters of `poptorch.Options` by name, checked against the API manifest."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipurun.api.calls import Call
from ipurun.api.setters import Setter, group_names, option_setters, popart_keys
from ipurun.api.values import BadValueError, convert, convert_popart, flatten
from ipurun.errors import Problem, listing, nearest

__all__ = ["bind", "read_setters"]

_TAKES_NULL = ("maxRepeatLogs",)
_TAKES_NONE = ("enableExecutableCaching",)  # besides those whose annotation says so
_INSTEAD = {
    "from_json": "write its entries under `options:`",
    "loadFromFile": "poptorch_conf=FILE",
}


def read_setters(options: Mapping[str, Any], key: str = "options") -> Tuple[List[Call], List[Problem]]:
    """Return the calls that a mapping of setters means, and its problems.

    Args:
        options: Nested (``{Training: {gradientAccumulation: 8}}``) or dotted names, or both.
        key: The config key that holds them, for origins and messages.
    """
    calls: List[Call] = []
    problems: List[Problem] = []
    for path, value in _walk(options):
        origin = f"{key}.{path}"
        if path not in option_setters():
            problems.append(_unknown(path, key, value))
            continue
        for args, kwargs in _arguments(option_setters()[path], value):
            if path == "_Popart.set" and len(args) == 2:
                origin, value = f"{key}.{path}.{args[0]}", args[1]
            try:
                calls.append(bind(path, args, kwargs, origin))
            except BadValueError as error:
                problems.append(_bad(error, origin, value))
    return calls, problems


def bind(path: str, args: Sequence[Any], kwargs: Mapping[str, Any], origin: str) -> Call:
    """Return a call of a setter with checked and converted arguments.

    Raises:
        BadValueError: The arguments do not fit the setter.
    """
    parameters = option_setters()[path].parameters
    if path == "_Popart.set":
        named = {**dict(zip(("key", "value"), args)), **kwargs}
        if set(named) != {"key", "value"} or len(args) > 2:
            raise BadValueError("a PopART key and its value")
        return Call(path, (named["key"], convert_popart(named["key"], named["value"])), origin=origin)
    if parameters and parameters[0].variadic:
        return Call(path, tuple(convert(value, parameters[0].annotation) for value in args), origin=origin)
    names = [parameter.name for parameter in parameters]
    unknown = [name for name in kwargs if name not in names]
    if unknown or len(args) > len(names):
        raise BadValueError(f"{len(names)} argument{'s' * (len(names) != 1)}", listing(names))
    given: Dict[str, Any] = {**dict(zip(names, args)), **kwargs}
    missing = [parameter.name for parameter in parameters if parameter.required and parameter.name not in given]
    if missing:
        raise BadValueError(f"`{missing[0]}` as well", listing(names))
    converted = {
        entry.name: None
        if given[entry.name] is None and path in _TAKES_NONE
        else convert(given[entry.name], entry.annotation)
        for entry in parameters
        if entry.name in given
    }
    broken = _RULES[path](converted) if path in _RULES else None
    if broken:
        raise broken
    leading = next((count for count, name in enumerate(names) if name not in converted), len(names))
    later = {name: converted[name] for name in names[leading:] if name in converted}
    return Call(path, tuple(converted[name] for name in names[:leading]), later, origin)


def _walk(options: Mapping[str, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """Yield the path and value of every setter; groups are entered, values that are mappings are not."""
    for name, value in options.items():
        path = f"{prefix}{name}"
        if path in group_names() and (value is None or isinstance(value, Mapping)):
            yield from _walk(value or {}, f"{path}.")
        else:
            yield path, value


def _arguments(setter: Setter, value: Any) -> Iterator[Tuple[Sequence[Any], Mapping[str, Any]]]:
    """Yield the arguments of each call that a YAML value means."""
    parameters = setter.parameters
    names = {parameter.name for parameter in parameters}
    if value is None and setter.path not in _TAKES_NULL:
        return  # null unsets an option of a recipe
    if setter.path == "_Popart.set":
        yield from _popart_entries(value)
    elif setter.path == "anchorTensor":
        yield from _anchors(value)
    elif not parameters:
        # A setter without arguments is a switch; false means not to call it.
        if value is not False:
            yield ((), {}) if value is True or value in ([], {}) else ((value,), {})
    elif isinstance(value, bool) and not parameters[0].required and "bool" not in parameters[0].annotation:
        # So is one with defaults for all arguments (enableProfiling, useOfflineIpuTarget).
        if value:
            yield (), {}
    elif parameters[0].variadic:
        yield value if isinstance(value, list) else [value], {}
    elif len(parameters) > 1 and isinstance(value, Mapping) and set(value) <= names:
        yield (), value
    elif len(parameters) > 1 and isinstance(value, list):
        yield value, {}
    else:
        yield (value,), {}


def _popart_entries(value: Any) -> Iterator[Tuple[Sequence[Any], Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        for key, entry in _popart_flat(value):
            yield (key, entry), {}
    elif isinstance(value, list) and value and all(isinstance(entry, (list, Mapping)) for entry in value):
        for entry in value:
            yield from _popart_entries(entry)
    else:
        yield value if isinstance(value, list) else [value], {}


def _popart_flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        inside = isinstance(value, Mapping) and key not in popart_keys()
        if inside and any(known.startswith(f"{key}.") for known in popart_keys()):
            yield from _popart_flat(value, f"{key}.")
        else:
            yield key, value


def _anchors(value: Any) -> Iterator[Tuple[Sequence[Any], Mapping[str, Any]]]:
    if isinstance(value, list) and value and all(isinstance(entry, (list, Mapping)) for entry in value):
        for entry in value:
            yield from _anchors(entry)
    elif isinstance(value, list):
        yield value, {}
    elif isinstance(value, Mapping) and "short_name" in value:
        yield (), value
    elif isinstance(value, Mapping):
        for short_name, entry in value.items():
            named = entry if isinstance(entry, Mapping) else {"long_name": entry}
            yield (), {"short_name": short_name, **named}
    else:
        yield (value,), {}


def _unknown(path: str, key: str, value: Any) -> Problem:
    name = path.rpartition(".")[2]
    if name in _INSTEAD:
        return Problem(
            f"`{key}.{path}` loads options and cannot be set as one",
            seen=str(value),
            fix=_INSTEAD[name],
            key=f"{key}.{path}",
        )
    if "autocast" in name.lower():
        return Problem(
            f"`{key}.{path}`: PopTorch has no autocast since 3.1",
            seen=str(value),
            fix="precision: 16-mixed (operations in half, weights in float32), and in place of a policy "
            "precision_rules: {'*.norm': 32, head: 32}, by module; a script that uses it: ipurun exec script.py",
            key=f"{key}.{path}",
        )
    dotted = next(iter(flatten({path: value}))) if isinstance(value, Mapping) and value else path
    close = nearest(path, option_setters()) or nearest(dotted, option_setters())
    prefix = path.partition(".")[0] + "."
    siblings = [known for known in option_setters() if known.startswith(prefix)] if prefix[:-1] in group_names() else []
    fix = f"{key}.{close[0]}: ..." if close else "docs/how-to/poptorch-options.md lists all setters"
    known = listing(close or siblings or option_setters())
    return Problem(f"`{key}.{path}`: poptorch.Options has no such setter", known=known, fix=fix, key=f"{key}.{path}")


def _bad(error: BadValueError, origin: str, value: Any) -> Problem:
    fix = f"{origin}: {error.fix}" if error.fix else ""
    return Problem(f"`{origin}` takes {error.takes}", seen=repr(value), known=error.known, fix=fix, key=origin)


def _at_least_one(name: str) -> Callable[[Mapping[str, Any]], Optional[BadValueError]]:
    def rule(values: Mapping[str, Any]) -> Optional[BadValueError]:
        return BadValueError("a whole number of at least 1", fix="1") if values[name] < 1 else None

    return rule


def _output_mode(values: Mapping[str, Any]) -> Optional[BadValueError]:
    mode = str(values["output_mode"])
    if mode.endswith(".EveryN") and not (values.get("output_return_period") or 0) > 0:
        return BadValueError("a period with EveryN", fix="[EveryN, 2]")
    if mode.endswith(".Default"):
        return BadValueError("a mode other than Default, which means not set", fix="Final")
    return None


def _io_tiles(values: Mapping[str, Any]) -> Optional[BadValueError]:
    tiles = values["num_tiles"]
    if 32 <= tiles <= 192 and tiles % 2 == 0:
        return None
    return BadValueError("an even number of tiles from 32 to 192", fix="32")


def _grouping(values: Mapping[str, Any]) -> Optional[BadValueError]:
    if str(values["input_group_type"]).endswith(".All"):
        return BadValueError("Consecutive or Orthogonal groups", fix="[2, Consecutive]")
    return (
        BadValueError("a group size of at least 1", fix="[1, Consecutive]") if values["input_group_size"] < 1 else None
    )


def _proportions(values: Mapping[str, Any]) -> Optional[BadValueError]:
    named = values["available_memory_proportion"]
    if all(re.fullmatch(r"IPU\d+", key) and 0 <= share <= 1 for key, share in named.items()):
        return None
    return BadValueError("numbers from 0 to 1 by IPU", fix="{IPU0: 0.2}")


def _reduction(values: Mapping[str, Any]) -> Optional[BadValueError]:
    refused = str(values["reduction_type"]).endswith(".NoReduction")
    return BadValueError("Mean or Sum", fix="Mean") if refused else None


def _mean_strategy(values: Mapping[str, Any]) -> Optional[BadValueError]:
    refused = str(values["mean_reduction_strategy"]).endswith(".PostAndLoss")
    return BadValueError("Post or Running (PopTorch 3.4 cannot compile PostAndLoss)", fix="Post") if refused else None


def _trace(values: Mapping[str, Any]) -> Optional[BadValueError]:
    return (
        BadValueError("false, as PopTorch 3.4 cannot trace with torch.jit", fix="false")
        if values["trace_model"]
        else None
    )


_RULES: Dict[str, Callable[[Mapping[str, Any]], Optional[BadValueError]]] = {
    "deviceIterations": _at_least_one("device_iterations"),
    "replicationFactor": _at_least_one("replication_factor"),
    "Training.gradientAccumulation": _at_least_one("gradient_accumulation"),
    "Training.accumulationAndReplicationReductionType": _reduction,
    "Training.setMeanAccumulationAndReplicationReductionStrategy": _mean_strategy,
    "outputMode": _output_mode,
    "inputReplicaGrouping": _grouping,
    "setAvailableMemoryProportion": _proportions,
    "TensorLocations.numIOTiles": _io_tiles,
    "Jit.traceModel": _trace,
}
