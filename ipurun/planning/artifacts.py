"""Folders of compiled executables and of PopVision's reports, and what fills them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Dict, Mapping, Optional

from ipurun.api.calls import Call
from ipurun.api.values import BadValueError, convert
from ipurun.config.schema import CacheConfig, ProfileConfig
from ipurun.errors import Findings
from ipurun.planning.options import profiling_entries

__all__ = ["CacheState", "Profile", "cache_root", "executable_dir", "plan_profile", "profile_dir"]

_ENGINE_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_PVTI_VARIABLE = "PVTI_OPTIONS"


@dataclass(frozen=True)
class CacheState:
    """What a run would find in its executable cache.

    Args:
        training: Of the executable of training: ``hit``, ``miss``, ``unknown``, or ``off`` without a cache.
        executables: Executables in the folder.
        inference: The same of the executable of inference; "" where that of training is unknown, or no file is there.
        why: Why it is unknown.
    """

    training: str
    executables: int = 0
    inference: str = ""
    why: str = ""


@dataclass(frozen=True)
class Profile:
    """The report folder, the call on Options and the environment that profiling needs."""

    directory: Optional[str]
    call: Optional[Call]
    environment: Mapping[str, str]


def plan_profile(profile: ProfileConfig, stable_dir: str, environ: Mapping[str, str], found: Findings) -> Profile:
    """What `profile` means.

    Engine options are part of the executable cache's key, so the report folder must be the same in every run.

    Args:
        profile: The config group.
        stable_dir: Folder of the report unless the user names one.
        environ: The user's environment, which is merged with and never replaced.
        found: Takes the problems.
    """
    chosen = _chosen_options(profile, found)
    if profile.kind == "none" and not chosen:
        return Profile(None, None, {})
    users = _variable(_ENGINE_VARIABLE, environ, found)
    directory = os.path.abspath(os.path.expanduser(profile.dir)) if profile.dir else stable_dir
    environment: Dict[str, str] = {}
    options: Dict[str, str] = {}
    if profile.kind == "graph":
        directory = (
            chosen.get("autoReport.directory", "" if profile.dir else users.get("autoReport.directory", ""))
            or directory
        )
        # An entry of the user's variable stands against our defaults, not against the config.
        defaults = profiling_entries(directory)
        options = {key: users.get(key, value) for key, value in defaults.items()}
        options["autoReport.directory"] = directory
    options.update(chosen)
    if users and options:
        environment[_ENGINE_VARIABLE] = json.dumps({**users, **options}, sort_keys=True)
    if profile.kind == "system":
        traced = {"enable": "true", "directory": directory, **_variable(_PVTI_VARIABLE, environ, found)}
        if profile.dir:
            traced["directory"] = directory
        directory = traced["directory"]
        environment[_PVTI_VARIABLE] = json.dumps({**traced, "enable": "true"}, sort_keys=True)
    call = None
    if options:
        origin = f"profile={profile.kind}" if profile.kind == "graph" else "profile.engine_options"
        call = Call("_Popart.setEngineOptions", (options,), origin=origin)
    return Profile(directory if profile.kind != "none" else None, call, environment)


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


def _variable(name: str, environ: Mapping[str, str], found: Findings) -> Dict[str, str]:
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


def cache_root(environ: Mapping[str, str]) -> str:
    """The cache folder of ipurun: IPURUN_CACHE_DIR, else ``~/.cache/ipurun``."""
    chosen = environ.get("IPURUN_CACHE_DIR", "").strip()
    if chosen:
        return _absolute(chosen)
    base = environ.get("XDG_CACHE_HOME", "").strip() or os.path.join("~", ".cache")
    return os.path.join(_absolute(base), "ipurun")


def executable_dir(cache: CacheConfig, name: str, environ: Mapping[str, str]) -> Optional[str]:
    """Where executables are kept, None where they are not.

    A folder for each run name, because PopART opens every file of a cache folder at each start.
    """
    if not cache.enabled:
        return None
    if cache.dir:
        return _absolute(cache.dir)
    users = environ.get("POPTORCH_CACHE_DIR", "").strip()
    if users and not environ.get("IPURUN_CACHE_DIR", "").strip():
        return _absolute(users)
    return os.path.join(cache_root(environ), "executables", _folder_name(name))


def profile_dir(name: str, environ: Mapping[str, str]) -> str:
    """Where profiles are recorded before they are moved into the run's folder."""
    return os.path.join(cache_root(environ), "profiles", _folder_name(name))


def _folder_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "run"


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
