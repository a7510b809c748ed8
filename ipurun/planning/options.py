"""One list of calls on `poptorch.Options` out of several sources that may speak of the same thing.

Sources are layers, weakest first. Of two calls that write the same option the stronger layer's is kept. Options
that are dictionaries (engine options, convolution options, patterns, memory proportions, tensor locations) are
merged entry by entry, because PopTorch's own setters would overwrite one another's entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ipurun.api.calls import Call, Symbol
from ipurun.api.setters import option_setters
from ipurun.errors import Findings
from ipurun.planning.user_settings import Twins, UserSettings

__all__ = ["Layer", "compose_layers", "profiling_entries"]

_CONVOLUTION = "convolutionOptions"
_ENGINE = "engineOptions"
# inputReplicaGrouping is checked against the factor that was set so far.
_FIRST = ("deviceIterations", "replicationFactor", "Training.gradientAccumulation")


@dataclass(frozen=True)
class Layer:
    """Calls of one source.

    Args:
        calls: Its calls, in order.
        tell: Whether a note says so when a stronger layer overrules it.
        twins: The keys that must not disagree with its calls, by setter.
    """

    calls: Sequence[Call]
    tell: bool = False
    twins: Twins = field(default_factory=dict)


@dataclass
class _Entry:
    layer: Layer
    call: Call
    slots: Tuple[str, ...]


class _Merged:
    """A dictionary option under construction, with the call that gave each entry."""

    def __init__(self) -> None:
        self.values: Dict[str, Any] = {}
        self._givers: Dict[str, _Entry] = {}

    def update(
        self, target: str, values: Mapping[str, Any], giver: _Entry, given: UserSettings, found: Findings
    ) -> None:
        for key, value in values.items():
            before = self._givers.get(key)
            if before is not None and self.values[key] != value:
                _report_overruled(giver, before, f" for {target}: {key}", given, found)
            self._givers[key] = giver
        self.values.update(values)

    @property
    def origin(self) -> str:
        return ", ".join(dict.fromkeys(giver.call.origin for giver in self._givers.values()))


def compose_layers(layers: Sequence[Layer], given: UserSettings, found: Findings) -> Tuple[Call, ...]:
    """The calls to perform, in order.

    Args:
        layers: Weakest first.
        given: What the user set, and where.
        found: Takes a problem for each key and setter that disagree, and a note for each user's setting that a
            stronger layer overrules.
    """
    entries: List[_Entry] = []
    merged: Dict[str, _Merged] = {}
    levels: List[int] = []
    for layer in layers:
        for call in layer.calls:
            entry = _Entry(layer, call, _slots(call))
            for target, values in _dictionaries(call).items():
                merged.setdefault(target, _Merged()).update(target, values, entry, given, found)
            if call.path == "_Popart.setPatterns":
                levels += [*call.args[1:], *call.kwargs.values()]
            if not _is_dictionary_only(call):
                entries.append(entry)
    kept = _kept(entries, given, found)
    calls = kept + _dictionary_calls(merged, kept, levels[-1:])
    return tuple(sorted(calls, key=lambda call: _FIRST.index(call.path) if call.path in _FIRST else len(_FIRST)))


def _kept(entries: Sequence[_Entry], given: UserSettings, found: Findings) -> List[Call]:
    calls = []
    for index, entry in enumerate(entries):
        later: Dict[str, _Entry] = {slot: other for other in entries[index + 1 :] for slot in other.slots}
        if not entry.slots or not all(slot in later for slot in entry.slots):
            calls.append(entry.call)
            continue
        winner = later[entry.slots[0]]
        if (winner.call.args, winner.call.kwargs) != (entry.call.args, entry.call.kwargs):
            difference = f": {_plain(winner.call.args)}, not {_plain(entry.call.args)}"
            _report_overruled(winner, entry, difference, given, found)
    return calls


def _report_overruled(winner: _Entry, loser: _Entry, difference: str, given: UserSettings, found: Findings) -> None:
    if winner.layer is loser.layer:
        return
    problem = given.disagreement(winner.call, loser.call, loser.layer.twins)
    if problem is None and loser.layer.tell:
        found.note(f"{winner.call.origin} wins over {loser.call.origin}{difference}")
    elif problem is not None and problem not in found.problems:
        found.problems.append(problem)


def _plain(args: Sequence[Any]) -> str:
    return ", ".join(str(value.path if isinstance(value, Call) else value) for value in args)


def profiling_entries(directory: str) -> Dict[str, str]:
    """The engine options that ``enableProfiling`` sets."""
    return {"debug.allowOutOfMemory": "true", "autoReport.directory": directory, "autoReport.all": "true"}


def _slots(call: Call) -> Tuple[str, ...]:
    """What a call writes: two calls with the same slots exclude each other."""
    if call.path == "_Popart.set":
        return (f"popart:{call.args[0]}",)
    if call.path == "anchorTensor":
        return (f"anchor:{call.args[0]}",)
    if call.path == "appendToLocationExcludes":
        return ()
    if call.path == "Training.setConvolutionDithering":
        return (f"{_CONVOLUTION}:enableConvDithering",)
    if call.path == "useOfflineIpuTarget":
        return ("option:ipu_version", "option:connection_type")
    setter = option_setters().get(call.path)
    writes = tuple(slot for slot in setter.writes if slot != f"popart:{_CONVOLUTION}") if setter else ()
    return writes or (f"call:{call.path}",)


def _is_dictionary_only(call: Call) -> bool:
    if call.path == "_Popart.set":
        return isinstance(call.args[1], Mapping)
    return call.path in _DICTIONARY_SETTERS or call.path.startswith("TensorLocations.set")


_DICTIONARY_SETTERS = (
    "setAvailableMemoryProportion",
    "_Popart.setPatterns",
    "_Popart.setEngineOptions",
    "enableProfiling",
)


def _dictionaries(call: Call) -> Dict[str, Mapping[str, Any]]:
    """Dictionary option -> the entries that a call gives it."""
    first = call.args[0] if call.args else None
    if call.path == "_Popart.set" and isinstance(call.args[1], Mapping):
        return {call.args[0]: call.args[1]}
    if call.path in ("setAvailableMemoryProportion", "_Popart.setPatterns"):
        return {call.path: first or {}}
    if call.path == "_Popart.setEngineOptions":
        return {_ENGINE: first or {}}
    if call.path == "enableProfiling":
        return {_ENGINE: profiling_entries(first or ".")}
    if call.path == "Precision.setPartialsType" and isinstance(first, Symbol):
        return {_CONVOLUTION: {"partialsType": "half" if first.name.endswith("16") else "float"}}
    if call.path == "Training.setConvolutionDithering":
        return {_CONVOLUTION: {"enableConvDithering": "true" if first else "false"}}
    if call.path.startswith("TensorLocations.set") and isinstance(first, Call):
        return {call.path: {setter.path: setter for setter in first.chain}}
    return {}


def _dictionary_calls(merged: Mapping[str, _Merged], kept: Sequence[Call], level: Sequence[int]) -> List[Call]:
    calls = []
    for target, entries in merged.items():
        origin = entries.origin
        if target == _ENGINE:
            calls.append(Call("_Popart.setEngineOptions", (entries.values,), origin=origin))
        elif target == "_Popart.setPatterns":
            calls.append(Call(target, (entries.values, *level), origin=origin))
        elif target == "setAvailableMemoryProportion":
            calls.append(Call(target, (entries.values,), origin=origin))
        elif target.startswith("TensorLocations."):
            chain = tuple(entries.values.values())
            calls.append(Call(target, (Call("poptorch.TensorLocationSettings", chain=chain),), origin=origin))
        elif target != _CONVOLUTION or not _written_alone(entries.values, kept):
            calls.append(Call("_Popart.set", (target, entries.values), origin=origin))
    return calls


def _written_alone(values: Mapping[str, Any], kept: Sequence[Call]) -> bool:
    """Whether the setters that are called anyway leave the convolution options complete."""
    writers = [call for call in kept if _CONVOLUTION in _dictionaries(call)]
    return len(writers) == 1 and _dictionaries(writers[0])[_CONVOLUTION] == values
