"""Files that a run writes besides its log: compiled executables, PopVision's reports and checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from typing import Dict, Mapping, Optional

from ipurun.api.calls import Call
from ipurun.api.values import BadValueError, convert
from ipurun.config.schema import CacheConfig, ProfileConfig, RunConfig
from ipurun.errors import Findings
from ipurun.executables import absolute, cache_root, parse_size
from ipurun.inspect.facts import Facts
from ipurun.planning.key_calls import KeyCalls
from ipurun.planning.optimizer import optimizer_state
from ipurun.planning.plan import BatchSizes, Saving, Steps
from ipurun.planning.user_settings import UserSettings

__all__ = ["CacheState", "Profile", "folder_calls", "plan_profile", "plan_saving", "profiling_entries", "read_variable"]

# What a checkpoint has besides tensors: random states, progress, and the description of each tensor.
_CHECKPOINT_BYTES = 16_000
_BYTES_OF_TENSOR = 500

_ENGINE_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_PVTI_VARIABLE = "PVTI_OPTIONS"
_POPVISION = ("graph", "system")


@dataclass(frozen=True)
class CacheState:
    """Whether a run will find its executables in the cache.

    Args:
        training: State of the executable of training: ``hit``, ``miss``, ``unknown``, or ``off`` without a cache.
        executables: Number of executables in the folder.
        inference: State of the executable of inference; "" where that of training is unknown or the folder is empty.
        why: Why it is unknown.
    """

    training: str
    executables: int = 0
    inference: str = ""
    why: str = ""


@dataclass(frozen=True)
class Profile:
    """The report folder, the call on Options and the environment variables for profiling."""

    directory: Optional[str]
    call: Optional[Call]
    environment: Mapping[str, str]


def plan_profile(
    profile: ProfileConfig, name: str, environ: Mapping[str, str], found: Findings, engine: str = "ipu"
) -> Profile:
    """Return what `profile` asks for.

    Engine options are part of the executable cache's key, so the report folder must be the same in every run; the
    report is moved into the run's folder later.

    Args:
        profile: The config group.
        name: Name of the run.
        environ: The user's environment, whose entries are kept.
        found: Takes the problems, and a note where nothing will be recorded.
        engine: ``ipu``, ``ipu_model`` or ``cpu``.
    """
    chosen = _chosen_options(profile, found)
    if engine == "cpu" and profile.kind in _POPVISION:
        found.note(
            f"profile={profile.kind} records nothing on the CPU engine, because PopVision's files come from "
            "Graphcore's libraries; profile=trace shows every op"
        )
    if profile.kind not in _POPVISION and not chosen:
        return Profile(absolute(profile.dir) if profile.kind != "none" and profile.dir else None, None, {})
    users = read_variable(_ENGINE_VARIABLE, environ, found)
    directory = absolute(profile.dir) if profile.dir else _run_dir("profiles", name, environ)
    environment: Dict[str, str] = {}
    options: Dict[str, str] = {}
    if profile.kind == "graph":
        directory = (
            chosen.get("autoReport.directory", "" if profile.dir else users.get("autoReport.directory", ""))
            or directory
        )
        # An entry of the user's variable wins over our defaults, but not over the config.
        defaults = profiling_entries(directory)
        options = {key: users.get(key, value) for key, value in defaults.items()}
        options["autoReport.directory"] = directory
    options.update(chosen)
    if users and options:
        environment[_ENGINE_VARIABLE] = json.dumps({**users, **options}, sort_keys=True)
    if profile.kind == "system":
        traced = {"enable": "true", "directory": directory, **read_variable(_PVTI_VARIABLE, environ, found)}
        if profile.dir:
            traced["directory"] = directory
        directory = traced["directory"]
        environment[_PVTI_VARIABLE] = json.dumps({**traced, "enable": "true"}, sort_keys=True)
    call = None
    if options:
        origin = f"profile={profile.kind}" if profile.kind == "graph" else "profile.engine_options"
        call = Call("_Popart.setEngineOptions", (options,), origin=origin)
    return Profile(directory if profile.kind in _POPVISION else None, call, environment)


def profiling_entries(directory: str) -> Dict[str, str]:
    """Return the engine options that ``enableProfiling`` sets."""
    return {"debug.allowOutOfMemory": "true", "autoReport.directory": directory, "autoReport.all": "true"}


def folder_calls(
    cache: CacheConfig,
    name: str,
    profile: Profile,
    settings: UserSettings,
    environ: Mapping[str, str],
    found: Findings,
) -> KeyCalls:
    """Return the calls of the executable cache and the profiler, which both modes share.

    Args:
        cache: The config group.
        name: Name of the run.
        profile: The planned profile.
        settings: What the user set.
        environ: The user's environment.
        found: Takes the note on a folder that cannot be written.
    """
    calls = KeyCalls()
    _check_size(cache, found)
    folder = _executable_dir(cache, name, environ)
    obstacle = _obstacle(folder) if cache.enabled else ""
    if obstacle:
        found.note(f"executables are not cached: {obstacle}; cache.dir=FOLDER or IPURUN_CACHE_DIR names another folder")
        calls.add("enableExecutableCaching", None, origin="cache", chosen=True)
    elif cache.enabled:
        calls.add("enableExecutableCaching", folder, origin="cache", chosen=settings.has("cache.dir"))
    elif environ.get("POPTORCH_CACHE_DIR") or settings.argument("enableExecutableCaching"):
        # Options() reads the variable itself; None overrides it, and poptorch.conf.
        calls.add("enableExecutableCaching", None, origin="cache.enabled=false")
    if profile.call is not None:
        calls.chosen.append(profile.call)
    return calls


def _check_size(cache: CacheConfig, found: Findings) -> None:
    if cache.max_size is None:
        return
    try:
        parse_size(cache.max_size)
    except ValueError as error:
        found.problem(
            "`cache.max_size` is not a size", seen=str(error), fix="cache.max_size=20GB", key="cache.max_size"
        )


def _obstacle(folder: str) -> str:
    """Return what keeps files from being written to a folder that may not exist yet, empty for nothing."""
    existing = folder
    while not os.path.lexists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return f"{existing} is not a folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"no permission to write in {existing}"


def plan_saving(
    config: RunConfig, facts: Facts, optimizer: Call, precision: str, batch: BatchSizes, steps: Steps, found: Findings
) -> Optional[Saving]:
    """Return how large checkpoints are and what saving costs; None if nothing is saved.

    Args:
        config: When to save, where, and how many to keep.
        facts: The model.
        optimizer: The optimizer's constructor.
        precision: Normalised.
        batch: The batch arithmetic of training.
        steps: How long training lasts.
        found: Takes a note if the disk is too full.
    """
    asked = config.checkpoint
    if not (asked.every_epochs or asked.every_steps or asked.every_minutes or asked.at_end):
        return None
    size = _checkpoint_bytes(facts, optimizer, 2 if precision.endswith("16") else 4, batch)
    if config.averaging.kind != "none":
        size += 4 * sum(math.prod(shape) for shape in facts.parameter_shapes.values()) + facts.buffer_bytes
    saves = _count_saves(config, steps)
    # While one is written, those before it are still there; the best one is kept as well.
    by_number = asked.keep and asked.keep_hours is None
    most = saves if not by_number else asked.keep + 2 if saves is None else min(saves, asked.keep + 2)
    needed = None if most is None else most * size
    free = _free_bytes(config.runs_dir)
    if needed is not None and free is not None and needed > free:
        found.note(
            f"checkpoints take up to {needed / 1e9:,.2f} GB, but the disk of runs_dir={config.runs_dir} has only "
            f"{free / 1e9:,.2f} GB free"
        )
    seconds = None if facts.engine == "cpu" else size / config.machine.host_bytes_per_second
    return Saving(size, saves, needed, free, seconds)


def _checkpoint_bytes(facts: Facts, optimizer: Call, weight_bytes: int, batch: BatchSizes) -> int:
    kept = optimizer_state(optimizer, weight_bytes)
    accumulates = batch.gradient_accumulation > 1 or kept.is_combined
    state = sum(kept.moments) + (kept.accumulator if accumulates else 0)
    if not optimizer.path.startswith("poptorch.optim.") and facts.engine != "cpu":
        state = 0  # PopTorch does not return it
    values = sum(math.prod(shape) for shape in facts.parameter_shapes.values())
    tensors = len(facts.parameter_shapes) * (2 + len(kept.moments))
    others = _CHECKPOINT_BYTES + tensors * _BYTES_OF_TENSOR + facts.buffer_bytes
    return values * weight_bytes + facts.parameters * state + others


def _count_saves(config: RunConfig, steps: Steps) -> Optional[int]:
    asked, calls, per_epoch = config.checkpoint, steps.total_calls, steps.calls_per_epoch
    if calls is None or asked.every_minutes or (asked.every_epochs and not per_epoch):
        return None
    by_step = calls // steps.save_every_calls if steps.save_every_calls else 0
    by_epoch = calls // per_epoch // asked.every_epochs if asked.every_epochs and per_epoch else 0
    return max(by_step + by_epoch, 1) if asked.at_end else by_step + by_epoch


def _free_bytes(runs_dir: str) -> Optional[int]:
    """Return what the disk of a folder has free, also if the folder does not exist yet; None if unknown."""
    place = os.path.abspath(runs_dir)
    while not os.path.isdir(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    try:
        return shutil.disk_usage(place).free
    except (OSError, ValueError):
        return None


def _executable_dir(cache: CacheConfig, name: str, environ: Mapping[str, str]) -> str:
    # A folder for each run name, because PopART opens every file of a cache folder at each start.
    if cache.dir:
        return absolute(cache.dir)
    poptorch_dir = environ.get("POPTORCH_CACHE_DIR", "").strip()
    if poptorch_dir and not environ.get("IPURUN_CACHE_DIR", "").strip():
        return absolute(poptorch_dir)
    return _run_dir("executables", name, environ)


def _run_dir(kind: str, name: str, environ: Mapping[str, str]) -> str:
    """Return a run's folder in ipurun's cache folder."""
    return os.path.join(cache_root(environ), kind, re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "run")


def _chosen_options(profile: ProfileConfig, found: Findings) -> Dict[str, str]:
    try:
        chosen: Dict[str, str] = convert(profile.engine_options, "Dict[str, str]")
    except BadValueError as error:
        found.problem(
            f"`profile.engine_options` takes {error.takes}",
            seen=str(profile.engine_options),
            key="profile.engine_options",
        )
        return {}
    return chosen


def read_variable(name: str, environ: Mapping[str, str], found: Findings) -> Dict[str, str]:
    """Return the entries of an environment variable that holds a JSON object; report one that does not."""
    text = environ.get(name, "")
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        value = str(error)
    if not isinstance(value, dict):
        found.problem(
            f"the environment variable {name} is not a JSON object",
            seen=text,
            fix=f'{name}=\'{{"autoReport.all": "true"}}\', or unset {name}',
        )
        return {}
    return {str(key): entry for key, entry in value.items()}
