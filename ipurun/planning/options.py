"""The calls on `poptorch.Options` for training and for inference, merged from all sources.

Of two calls that write the same option, the one of the stronger source is kept. Options that are dictionaries (engine
options, convolution options, patterns, memory proportions, tensor locations) are merged entry by entry, because
PopTorch's setters would overwrite each other's entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ipurun.api.calls import Call, Symbol, last_call
from ipurun.api.setters import option_setters
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.artifacts import profiling_entries
from ipurun.planning.host_io import output_call
from ipurun.planning.key_calls import KeyCalls, batch_calls, input_group_type, shared_calls, training_calls
from ipurun.planning.sizes import Sizes
from ipurun.planning.user_settings import INFERENCE_TWINS, TWINS, Twins, UserSettings

__all__ = ["inference_options", "training_options"]

_CONVOLUTION = "convolutionOptions"
_ENGINE = "engineOptions"
_DICTIONARY_SETTERS = (
    "setAvailableMemoryProportion",
    "_Popart.setPatterns",
    "_Popart.setEngineOptions",
    "enableProfiling",
    "Training.setConvolutionDithering",  # PopTorch's setter would hand Poplar "True" instead of "true"
)
# inputReplicaGrouping is checked against the factor that was set so far.
_FIRST = ("deviceIterations", "replicationFactor", "Training.gradientAccumulation")
_TRAINING_ONLY = ("Training.", "TensorLocations.setOptimizerLocation", "TensorLocations.setAccumulatorLocation")
_TRAINING_KEYS = ("Precision.enableStochasticRounding", "broadcastBuffers")  # setters whose keys mean training only


@dataclass(frozen=True)
class _Source:
    """Calls of one source.

    Args:
        calls: Its calls, in order.
        noted: Whether to note each of its calls that a stronger source overrides.
        twins: The keys that must agree with its calls, by setter.
    """

    calls: Sequence[Call]
    noted: bool = False
    twins: Twins = field(default_factory=dict)


@dataclass
class _Entry:
    source: _Source
    call: Call
    slots: Tuple[str, ...]


class _MergedDictionary:
    """A dictionary option under construction, with the call that set each entry."""

    def __init__(self) -> None:
        self.values: Dict[str, Any] = {}
        self._setters: Dict[str, _Entry] = {}

    def update(
        self, target: str, values: Mapping[str, Any], setter: _Entry, settings: UserSettings, found: Findings
    ) -> None:
        for key, value in values.items():
            before = self._setters.get(key)
            if before is not None and self.values[key] != value:
                _report_overridden(setter, before, f" for {target}: {key}", settings, found, key)
            self._setters[key] = setter
        self.values.update(values)

    @property
    def origin(self) -> str:
        return ", ".join(dict.fromkeys(setter.call.origin for setter in self._setters.values()))


def training_options(
    config: RunConfig,
    facts: Facts,
    sizes: Sizes,
    settings: UserSettings,
    folders: KeyCalls,
    output: Tuple[str, int],
    found: Findings,
) -> Tuple[Call, ...]:
    """Return the calls on the options of training, in order.

    Args:
        config: The config.
        facts: The engine and the model.
        sizes: Batch sizes and placement.
        settings: What the user set, and where.
        folders: Calls of the cache and the profiler.
        output: Output mode and period.
        found: Takes a problem for each key and setter that disagree, and a note for each overridden setting.
    """
    mode, every = output
    calls = training_calls(config, facts, sizes, settings, found)
    shared = shared_calls(config, facts, sizes, settings, True, found)
    call = output_call(mode, every, f"output.mode={config.output.mode}")
    is_chosen = settings.has("output.mode") or (mode == "every_n" and settings.has("output.every"))
    outputs = KeyCalls(chosen=[call]) if is_chosen else KeyCalls(defaults=[call])
    grouped = settings.argument("inputReplicaGrouping") is not None
    group_type, origins = input_group_type(config, settings), _origins(settings)
    batch = batch_calls(sizes.training, group_type, True, origins, grouped, sizes.instances)
    sources = (
        _Source(shared.defaults + calls.defaults + outputs.defaults + folders.defaults),
        _Source(settings.file, noted=True),
        _Source(settings.options, noted=True, twins=TWINS),
        _Source(batch + calls.chosen + shared.chosen + outputs.chosen + folders.chosen),
    )
    return _merge(sources, settings, found)


def inference_options(
    config: RunConfig, facts: Facts, sizes: Sizes, settings: UserSettings, folders: KeyCalls, found: Findings
) -> Tuple[Call, ...]:
    """Return the calls on the options of inference, in order; the arguments are those of `training_options`."""
    shared = shared_calls(config, facts, sizes, settings, False, found)
    output = output_call("all", 1, "rule: evaluation reads every output")
    requested = last_call("outputMode", settings.inference)
    if requested is not None and requested.args != output.args:
        found.problem(
            "evaluation and prediction need every output",
            seen=f"inference.options.outputMode: {requested.args[0]}",
            fix="inference.options.outputMode: All, or leave it out",
            key="inference.options.outputMode",
        )
    has_buffers = facts.written_buffers and sizes.inference.distinct_replicas > 1
    broadcast = [Call("broadcastBuffers", (False,), origin="rule: forward writes to buffers")] if has_buffers else []
    group_type = input_group_type(config, replace(settings, options=settings.options + settings.inference))
    sources = (
        _Source(shared.defaults + broadcast + folders.defaults),
        _Source(_for_inference(settings.file, settings)),
        _Source(_for_inference(settings.options, settings)),
        _Source(shared.chosen + [output] + folders.chosen),
        _Source(settings.inference, noted=True, twins=INFERENCE_TWINS),
        _Source(
            batch_calls(sizes.inference, group_type, False, _inference_origins(sizes, settings), False, sizes.instances)
        ),
    )
    return _merge(sources, settings, found)


def _origins(settings: UserSettings) -> Dict[str, str]:
    """Return what decided each batch size of training."""
    return {
        "device_iterations": settings.origin("deviceIterations", "device_iterations", default="device_iterations"),
        "replicas": settings.origin("replicationFactor", "replication.factor", default="devices"),
        "gradient_accumulation": settings.origin(
            "Training.gradientAccumulation",
            "global_batch_size",
            "gradient_accumulation",
            default="gradient_accumulation",
        ),
        "input_group": settings.origin(
            "inputReplicaGrouping", *TWINS["inputReplicaGrouping"], default="replication.input_group_size"
        ),
    }


def _inference_origins(sizes: Sizes, settings: UserSettings) -> Dict[str, str]:
    """Return what decided each batch size of inference: its own settings, else those of training."""
    origins = _origins(settings)
    if sizes.inference.device_iterations != sizes.training.device_iterations:
        origins["device_iterations"] = "rule: one iteration for each pipeline stage"
    for name, path in (("device_iterations", "deviceIterations"), ("replicas", "replicationFactor")):
        call = last_call(path, settings.inference)
        set_keys = [key for key in INFERENCE_TWINS[path] if settings.has(key)]
        origins[name] = set_keys[0] if set_keys else origins[name] if call is None else call.origin
    grouping = last_call("inputReplicaGrouping", settings.inference)
    if grouping is not None:
        origins["input_group"] = grouping.origin
    return origins


def _for_inference(calls: Sequence[Call], settings: UserSettings) -> List[Call]:
    # Input groups of training's replicas need not fit inference, whose grouping is among its batch calls.
    left_out = [*_TRAINING_ONLY, "inputReplicaGrouping"]
    left_out += [path for path in _TRAINING_KEYS if settings.has(*TWINS[path])]
    return [call for call in calls if not call.path.startswith(tuple(left_out))]


def _merge(sources: Sequence[_Source], settings: UserSettings, found: Findings) -> Tuple[Call, ...]:
    """Return the calls to make, in order, from sources listed weakest first."""
    entries: List[_Entry] = []
    merged: Dict[str, _MergedDictionary] = {}
    levels: List[int] = []
    for source in sources:
        for call in source.calls:
            entry = _Entry(source, call, _slots(call))
            for target, values in _dictionaries(call).items():
                merged.setdefault(target, _MergedDictionary()).update(target, values, entry, settings, found)
            if call.path == "_Popart.setPatterns":
                levels += [*call.args[1:], *call.kwargs.values()]
            if not _is_dictionary_only(call):
                entries.append(entry)
    kept = _kept(entries, settings, found)
    calls = kept + _dictionary_calls(merged, kept, levels[-1:])
    return tuple(sorted(calls, key=lambda call: _FIRST.index(call.path) if call.path in _FIRST else len(_FIRST)))


def _kept(entries: Sequence[_Entry], settings: UserSettings, found: Findings) -> List[Call]:
    calls = []
    for index, entry in enumerate(entries):
        later: Dict[str, _Entry] = {slot: other for other in entries[index + 1 :] for slot in other.slots}
        if not entry.slots or not all(slot in later for slot in entry.slots):
            calls.append(entry.call)
            continue
        winner = later[entry.slots[0]]
        if (winner.call.args, winner.call.kwargs) != (entry.call.args, entry.call.kwargs):
            difference = f": {_plain(winner.call.args)}, not {_plain(entry.call.args)}"
            _report_overridden(winner, entry, difference, settings, found)
    return calls


def _report_overridden(
    winner: _Entry, loser: _Entry, difference: str, settings: UserSettings, found: Findings, dictionary_key: str = ""
) -> None:
    if winner.source is loser.source:
        return
    problem = settings.disagreement(winner.call, loser.call, loser.source.twins, dictionary_key)
    if problem is None and loser.source.noted:
        found.note(f"{winner.call.origin} wins over {loser.call.origin}{difference}")
    elif problem is not None and problem not in found.problems:
        found.problems.append(problem)


def _plain(args: Sequence[Any]) -> str:
    return ", ".join(str(value.path if isinstance(value, Call) else value) for value in args)


def _slots(call: Call) -> Tuple[str, ...]:
    """Return what a call writes: of two calls with the same slots only one is kept."""
    if call.path == "_Popart.set":
        return (f"popart:{call.args[0]}",)
    if call.path == "anchorTensor":
        return (f"anchor:{call.args[0]}",)
    if call.path == "appendToLocationExcludes":
        return ()
    if call.path == "useOfflineIpuTarget":
        return ("option:ipu_version", "option:connection_type")
    setter = option_setters().get(call.path)
    writes = tuple(slot for slot in setter.writes if slot != f"popart:{_CONVOLUTION}") if setter else ()
    return writes or (f"call:{call.path}",)


def _is_dictionary_only(call: Call) -> bool:
    if call.path == "_Popart.set":
        return isinstance(call.args[1], Mapping)
    return call.path in _DICTIONARY_SETTERS or call.path.startswith("TensorLocations.set")


def _dictionaries(call: Call) -> Dict[str, Mapping[str, Any]]:
    """Return the entries that a call adds to each dictionary option."""
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


def _dictionary_calls(
    merged: Mapping[str, _MergedDictionary], kept: Sequence[Call], level: Sequence[int]
) -> List[Call]:
    calls = []
    for target, entries in merged.items():
        path = target
        args: List[Any] = [entries.values]
        if target == _ENGINE:
            path = "_Popart.setEngineOptions"
        elif target == "_Popart.setPatterns":
            args += level
        elif target.startswith("TensorLocations."):
            args = [Call("poptorch.TensorLocationSettings", chain=tuple(entries.values.values()))]
        elif target == _CONVOLUTION and _is_complete(entries.values, kept):
            continue
        elif target != "setAvailableMemoryProportion":
            path, args = "_Popart.set", [target, entries.values]
        calls.append(Call(path, tuple(args), origin=entries.origin))
    return calls


def _is_complete(convolution_options: Mapping[str, Any], kept: Sequence[Call]) -> bool:
    """Whether one of the calls that are kept writes all convolution options, so that no other call is needed."""
    writers = [call for call in kept if _CONVOLUTION in _dictionaries(call)]
    return len(writers) == 1 and _dictionaries(writers[0])[_CONVOLUTION] == convolution_options
