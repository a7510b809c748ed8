"""One plan out of one config: the order in which the parts of a plan are settled."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.api.calls import Call, last_call
from ipurun.api.conf_file import read_conf
from ipurun.api.options import read_setters
from ipurun.config.checks import check_values, with_valid_values
from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError, Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.artifacts import Profile, executable_dir, plan_profile, profile_dir
from ipurun.planning.host_io import check_loading, check_overlap, output_call, output_mode, strategy_for_overlap
from ipurun.planning.key_calls import KeyCalls, input_group_type, resolved_calls, shared_calls, training_calls
from ipurun.planning.modules import (
    module_precisions,
    module_proportions,
    normal_precision,
    note_loss_scale,
    recompute_modules,
    serialized_layers,
)
from ipurun.planning.optimizer import plan_optimizer
from ipurun.planning.options import Layer, compose_layers
from ipurun.planning.plan import Plan
from ipurun.planning.sizes import Sizes, plan_sizes
from ipurun.planning.steps import count_evaluation, count_steps
from ipurun.planning.user_settings import INFERENCE_TWINS, TWINS, UserSettings, unlike_defaults

__all__ = ["make_plan", "sane_config"]

_TRAINING_KEYS = ("Precision.enableStochasticRounding", "broadcastBuffers")
_TRAINING_ONLY = ("Training.", "TensorLocations.setOptimizerLocation", "TensorLocations.setAccumulatorLocation")


def make_plan(
    config: RunConfig,
    facts: Facts,
    environ: Optional[Mapping[str, str]] = None,
    keys: Optional[Mapping[str, str]] = None,
) -> Plan:
    """Everything that a run will do; see `ipurun.planning.make_plan`."""
    environ = os.environ if environ is None else environ
    found = Findings(facts.notes)
    config = sane_config(config, found)
    name = config.name or "run"
    given = _given(config, unlike_defaults(config) if keys is None else keys, found)
    _note_processes(given, environ, found)
    numbers = plan_sizes(config, facts, given, found)
    config, given = strategy_for_overlap(config, numbers.layout.ipus > 1, given, found)
    steps = count_steps(config, numbers.training, facts.train_samples, found)
    check_loading(config.loader, numbers.training, found)
    precision = normal_precision(config.precision, found)
    optimizer, groups = plan_optimizer(config, found)
    note_loss_scale(config, precision, optimizer.kwargs.get("loss_scaling"), found)
    profile = plan_profile(config.profile, profile_dir(name, environ), environ, found)
    mode, every = output_mode(config, given, numbers.training.device_iterations, found)
    storage = _storage_calls(config, name, profile, given, environ)
    training_options = _training_options(
        config, facts, numbers, given, storage, output_call(mode, every, f"output.mode={config.output.mode}"), found
    )
    inference_options = _inference_options(config, facts, numbers, given, storage, found)
    _note_host_schedule(config, numbers, found)
    _note_never_attached(training_options, found)
    check_overlap(config, mode, training_options, found)
    checkpoints = recompute_modules(config, facts, numbers.layout, found)
    serialized = serialized_layers(config, facts, found)
    proportions = module_proportions(config, facts, found)
    rules = module_precisions(config, facts.module_names, found)
    if found.problems:
        raise ConfigError(found.problems)
    cache_call = last_call("enableExecutableCaching", training_options)
    return Plan(
        name=name,
        engine=facts.engine,
        engine_version=facts.engine_version,
        devices=numbers.devices,
        training=numbers.training,
        inference=numbers.inference,
        steps=steps,
        evaluation=count_evaluation(config, numbers.inference, facts),
        precision=precision,
        output_mode=mode,
        training_options=training_options,
        inference_options=inference_options,
        placements=numbers.layout.placements,
        inference_placements=numbers.inference_layout.placements,
        optimizer=optimizer,
        environment=_environment(config, profile),
        cache_dir=cache_call.args[0] if cache_call else None,
        profile_dir=profile.directory,
        parameters=facts.parameters,
        notes=tuple(found.notes),
        parameter_groups=groups,
        recompute=checkpoints,
        module_precision=rules,
        stages=numbers.layout.stages,
        inference_stages=numbers.inference_layout.stages,
        user_blocks=facts.user_blocks,
        ended_blocks=facts.ended_blocks,
        serialized=serialized,
        module_proportions=proportions,
        overlap_io=config.memory.overlap_io,
        is_left_whole=facts.is_left_whole,
    )


def _given(config: RunConfig, keys: Mapping[str, str], found: Findings) -> UserSettings:
    options, problems = read_setters(config.options, "options")
    found.problems += problems
    inference, problems = read_setters(config.inference.options, "inference.options")
    found.problems += problems
    file: List[Call] = []
    if config.poptorch_conf:
        file, problems = read_conf(config.poptorch_conf)
        found.problems += problems
    return UserSettings(file, options, inference, keys)


def _note_never_attached(calls: Sequence[Call], found: Findings) -> None:
    offline = last_call("useOfflineIpuTarget", calls)
    connection = last_call("connectionType", calls)
    if offline or (connection and str(connection.args[0]).endswith(".Never")):
        origin = (offline or connection or calls[0]).origin
        found.note(f"{origin}: the model can be compiled and not run, because no device is attached")


def _note_processes(given: UserSettings, environ: Mapping[str, str], found: Findings) -> None:
    configured = given.argument("Distributed.configureProcessId", 1)
    launched = environ.get("OMPI_COMM_WORLD_SIZE", "")
    processes = configured or (int(launched) if launched.isdigit() else 1)
    if processes > 1:
        found.note(f"batches and steps shown are those of one process; there are {processes}")


def _storage_calls(
    config: RunConfig, name: str, profile: Profile, given: UserSettings, environ: Mapping[str, str]
) -> KeyCalls:
    """The executable cache and the profiler: folders that both modes share."""
    own = KeyCalls()
    folder = executable_dir(config.cache, name, environ)
    if folder is not None:
        own.add("enableExecutableCaching", folder, origin="cache", chosen=given.has("cache.dir"))
    elif environ.get("POPTORCH_CACHE_DIR") or given.argument("enableExecutableCaching"):
        # Options() has read the variable by itself; None takes it back, and what poptorch.conf says.
        own.add("enableExecutableCaching", None, origin="cache.enabled=false")
    if profile.call is not None:
        own.chosen.append(profile.call)
    return own


def _training_options(
    config: RunConfig,
    facts: Facts,
    numbers: Sizes,
    given: UserSettings,
    storage: KeyCalls,
    output: Call,
    found: Findings,
) -> Tuple[Call, ...]:
    own = training_calls(config, facts, numbers, given, found)
    shared = shared_calls(config, facts, numbers, given, True, found)
    grouped = given.argument("inputReplicaGrouping") is not None
    resolved = resolved_calls(numbers.training, input_group_type(config, given), True, _origins(given), grouped)
    chosen_output = given.has("output.mode") or (len(output.args) > 1 and given.has("output.every"))
    return compose_layers(
        (
            Layer(shared.defaults + own.defaults + [output] * (not chosen_output) + storage.defaults),
            Layer(given.file, tell=True),
            Layer(given.options, tell=True, twins=TWINS),
            Layer(resolved + own.chosen + shared.chosen + [output] * chosen_output + storage.chosen),
        ),
        given,
        found,
    )


def _origins(given: UserSettings) -> Dict[str, str]:
    """What decided each number of training."""
    accumulation = given.origin(
        "Training.gradientAccumulation", "global_batch_size", "gradient_accumulation", default="gradient_accumulation"
    )
    return {
        "device_iterations": given.origin("deviceIterations", "device_iterations", default="device_iterations"),
        "replicas": given.origin("replicationFactor", "replication.factor", default="devices"),
        "gradient_accumulation": accumulation,
        "input_group": given.origin(
            "inputReplicaGrouping", *TWINS["inputReplicaGrouping"], default="replication.input_group_size"
        ),
    }


def _inference_origins(numbers: Sizes, given: UserSettings) -> Dict[str, str]:
    """What decided each number of inference: what is set for it alone, else what training has."""
    origins = _origins(given)
    if numbers.inference.device_iterations != numbers.training.device_iterations:
        origins["device_iterations"] = "rule: one iteration for each pipeline stage"
    for name, path in (("device_iterations", "deviceIterations"), ("replicas", "replicationFactor")):
        call = last_call(path, given.inference)
        set_keys = [key for key in INFERENCE_TWINS[path] if given.has(key)]
        origins[name] = set_keys[0] if set_keys else origins[name] if call is None else call.origin
    grouping = last_call("inputReplicaGrouping", given.inference)
    if grouping is not None:
        origins["input_group"] = grouping.origin
    return origins


def _inference_options(
    config: RunConfig, facts: Facts, numbers: Sizes, given: UserSettings, storage: KeyCalls, found: Findings
) -> Tuple[Call, ...]:
    shared = shared_calls(config, facts, numbers, given, False, found)
    output = output_call("all", 1, "rule: evaluation reads every output")
    asked = last_call("outputMode", given.inference)
    if asked is not None and asked.args != output.args:
        found.problem(
            "evaluation and prediction read every output",
            seen=f"inference.options.outputMode: {asked.args[0]}",
            fix="inference.options.outputMode: All, or leave it out",
            key="inference.options.outputMode",
        )
    buffers = facts.changing_buffers and numbers.inference.distinct_replicas > 1
    broadcast = [Call("broadcastBuffers", (False,), origin="rule: training changes buffers")] if buffers else []
    group_type = input_group_type(config, replace(given, options=given.options + given.inference))
    resolved = resolved_calls(numbers.inference, group_type, False, _inference_origins(numbers, given), False)
    return compose_layers(
        (
            Layer(shared.defaults + broadcast + storage.defaults),
            Layer(_for_inference(given.file, given)),
            Layer(_for_inference(given.options, given)),
            Layer(shared.chosen + [output] + storage.chosen),
            Layer(given.inference, tell=True, twins=INFERENCE_TWINS),
            Layer(resolved),
        ),
        given,
        found,
    )


def _for_inference(calls: Sequence[Call], given: UserSettings) -> List[Call]:
    # Groups of training's replicas need not fit inference, whose own are among its resolved numbers.
    left_out = [*_TRAINING_ONLY, "inputReplicaGrouping"]
    # Keys that speak of training alone take away what their setters would do in inference.
    left_out += [path for path in _TRAINING_KEYS if given.has(*TWINS[path])]
    return [call for call in calls if not call.path.startswith(tuple(left_out))]


def _environment(config: RunConfig, profile: Profile) -> Dict[str, str]:
    environment = dict(profile.environment)
    if config.debug.log_level is not None:
        environment["POPTORCH_LOG_LEVEL"] = config.debug.log_level
    return environment


def _note_host_schedule(config: RunConfig, numbers: Sizes, found: Findings) -> None:
    updates = numbers.training.device_iterations
    if config.schedule and updates > 1:
        found.note(f"the learning rate moves once per host call, that is every {updates} weight updates")


def sane_config(config: RunConfig, found: Findings) -> RunConfig:
    """The config, with stand-ins for words that do not exist and numbers out of range; each is a problem."""
    problems = check_values(config, lambda key: "")
    if not problems:
        return config
    found.problems += problems
    return with_valid_values(config)
