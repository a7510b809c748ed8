"""Make the plan of a run: the one function that puts all parts of a plan together."""

from __future__ import annotations

import os
from typing import List, Mapping, Optional, Sequence

from ipurun.api.calls import Call, last_call
from ipurun.api.conf_file import read_conf
from ipurun.api.options import read_setters
from ipurun.config.checks import check_values, with_valid_values
from ipurun.config.schema import RunConfig, canonical_precision
from ipurun.errors import ConfigError, Findings
from ipurun.inspect.facts import Facts, Purpose
from ipurun.planning.artifacts import folder_calls, plan_profile, plan_saving
from ipurun.planning.environment import plan_variables
from ipurun.planning.host_io import check_loading, check_overlap, output_mode, strategy_for_overlap
from ipurun.planning.modules import (
    frozen_parts,
    module_precisions,
    module_proportions,
    note_loss_scale,
    recompute_modules,
    serialized_layers,
)
from ipurun.planning.optimizer import plan_no_decay, plan_optimizer
from ipurun.planning.options import inference_options, training_options
from ipurun.planning.plan import Plan
from ipurun.planning.sizes import plan_sizes
from ipurun.planning.steps import check_end_and_average, count_evaluation, count_steps, enough_samples
from ipurun.planning.user_settings import UserSettings, unlike_defaults

__all__ = ["make_plan"]


def make_plan(
    config: RunConfig,
    facts: Facts,
    environ: Optional[Mapping[str, str]] = None,
    keys: Optional[Mapping[str, str]] = None,
) -> Plan:
    """Decide everything that a run will do, before anything is done.

    Args:
        config: The typed config.
        facts: The engine, the data and the model.
        environ: Environment variables; None: those of this process.
        keys: The keys that were set, with where (`Point.given`); None: those that differ from their defaults.

    Raises:
        ConfigError: With all problems at once.
    """
    environ = os.environ if environ is None else environ
    found = Findings(facts.notes)
    found.problems += check_values(config)
    if found.problems:
        config = with_valid_values(config)  # so that the other problems are found, too
    name = config.name or "run"
    settings = _user_settings(config, unlike_defaults(config) if keys is None else keys, found)
    _note_processes(settings, found)
    _check_failures(config, settings, found)
    if not config.init_from and settings.has("init"):
        found.note("no init_from: the run starts from the values that the model's code gives, and `init` has no effect")
    sizes = plan_sizes(config, facts, settings, environ, found)
    config, settings = strategy_for_overlap(config, sizes.layout.ipus > 1, settings, found)
    steps = count_steps(config, sizes.training, enough_samples(sizes.training, facts, found), found)
    check_loading(config.loader, sizes.training, found)
    check_end_and_average(config, settings, sizes.training, steps, found)
    precision = canonical_precision(config.precision)
    if config.precision == "16":
        found.note(
            "precision=16 means 16.32 (half operations, float32 weights), as in Lightning; until the last release it "
            "meant 16.16, which precision=16.16 still gives"
        )
    optimizer, groups = plan_optimizer(config, found)
    no_decay = plan_no_decay(config, facts, found)
    frozen = frozen_parts(config, facts, sizes.training, steps, found)
    note_loss_scale(config, precision, optimizer.kwargs.get("loss_scaling"), found)
    profile = plan_profile(config.profile, name, environ, found, facts.engine)
    variables = plan_variables(config, profile, settings, environ, found)
    mode, every = output_mode(config, facts, settings, sizes.training.device_iterations, found)
    folders = folder_calls(config.cache, name, profile, settings, environ, found)
    folders.chosen[:0] = variables.calls
    training = training_options(config, facts, sizes, settings, folders, (mode, every), found)
    inference = inference_options(config, facts, sizes, settings, folders, found)
    updates = sizes.training.device_iterations
    if (config.schedule or facts.has_own_schedule) and updates > 1:
        found.note(f"the learning rate changes once per host call, that is every {updates} weight updates")
    _check_attachable(training, facts.purpose, found)
    check_overlap(config, mode, training, found)
    checkpoints = recompute_modules(config, facts, sizes.layout, found)
    serialized = serialized_layers(config, facts, found)
    proportions = module_proportions(config, facts, found)
    rules = module_precisions(config, facts.module_names, found)
    saving = plan_saving(config, facts, optimizer, precision, sizes.training, steps, found)
    if found.problems:
        raise ConfigError(found.problems)
    cache_call = last_call("enableExecutableCaching", training)
    return Plan(
        name=name,
        engine=facts.engine,
        engine_version=facts.engine_version,
        devices=sizes.devices,
        training=sizes.training,
        inference=sizes.inference,
        steps=steps,
        evaluation=count_evaluation(config, sizes.inference, facts),
        saving=saving,
        precision=precision,
        output_mode=mode,
        training_options=training,
        inference_options=inference,
        placements=sizes.layout.placements,
        inference_placements=sizes.inference_layout.placements,
        optimizer=optimizer,
        environment=variables.values,
        environment_origins=variables.origins,
        cache_dir=cache_call.args[0] if cache_call else None,
        profile_dir=profile.directory,
        parameters=facts.parameters,
        notes=tuple(found.notes),
        parameter_groups=groups,
        no_decay=no_decay,
        frozen=frozen,
        initial_weights=facts.initial_weights,
        recompute=checkpoints,
        module_precision=rules,
        stages=sizes.layout.stages,
        inference_stages=sizes.inference_layout.stages,
        user_blocks=facts.user_blocks,
        ended_blocks=facts.ended_blocks,
        serialized=serialized,
        module_proportions=proportions,
        overlap_io=config.memory.overlap_io,
        is_left_whole=facts.is_left_whole,
        own_optimizer=bool(facts.own_optimizer),
        logged=facts.logged,
        instances=sizes.instances,
    )


def _user_settings(config: RunConfig, keys: Mapping[str, str], found: Findings) -> UserSettings:
    options, problems = read_setters(config.options, "options")
    found.problems += problems
    inference, problems = read_setters(config.inference.options, "inference.options")
    found.problems += problems
    file: List[Call] = []
    if config.poptorch_conf:
        file, problems = read_conf(config.poptorch_conf)
        found.problems += problems
    return UserSettings(file, options, inference, keys)


def _note_processes(settings: UserSettings, found: Findings) -> None:
    processes = settings.argument("Distributed.configureProcessId", 1)
    if processes is not None and processes > 1:
        found.note(f"batch sizes and steps are those of one of the {processes} processes")


def _check_failures(config: RunConfig, settings: UserSettings, found: Findings) -> None:
    """Check the keys that say what happens when something fails, and note the old name of one of them."""
    if config.debug.stop_on_nonfinite is not None and settings.has("debug.stop_on_nonfinite"):
        now = "stop" if config.debug.stop_on_nonfinite else "continue"
        found.note(f"debug.stop_on_nonfinite is now on_nonfinite={now}; the old key works until the next release")
    if config.on_nonfinite != "rollback":
        return
    saving = config.checkpoint
    if not (saving.every_epochs or saving.every_steps or saving.every_minutes):
        found.note("on_nonfinite=rollback returns to the beginning: no checkpoints are saved before the end")
    target = str(config.optimizer.get("_target_") or "")
    if config.rollback.lower == "loss_scaling" and (config.loss_scaling == "auto" or target.startswith("torch.")):
        why = "the device adjusts it" if config.loss_scaling == "auto" else f"{target} has none"
        found.problem(
            "`rollback.lower=loss_scaling`: the loss scale of this run cannot be lowered",
            seen=why,
            fix="rollback.lower=lr",
            key="rollback.lower",
        )


def _check_attachable(calls: Sequence[Call], purpose: Purpose, found: Findings) -> None:
    """Report options with which PopTorch compiles a model but never attaches a device: a run could not begin."""
    offline = last_call("useOfflineIpuTarget", calls)
    connection = last_call("connectionType", calls)
    call = offline or connection
    if purpose is Purpose.COMPILE or call is None or (offline is None and not str(call.args[0]).endswith(".Never")):
        return
    if purpose is Purpose.PLAN:
        found.note(f"{call.origin}: the model can be compiled but not run, because no device is attached")
        return
    found.problem(
        f"`{call.origin}`: the model could be compiled but not run, because no device is attached",
        fix="leave it out, or compile without a device: ipurun compile with the same words; "
        "options.connectionType=OnDemand attaches after compiling",
        key=call.origin,
    )
