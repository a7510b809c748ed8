"""The environment variables of Graphcore's libraries: what the config sets, and who wins over whom.

Poplar says that its variables win over what a program sets; PopTorch's options and the keys of the config win over
PopTorch's variables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

from ipurun.api.calls import Call
from ipurun.api.values import BadValueError, convert
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings
from ipurun.planning.artifacts import Profile, read_variable
from ipurun.planning.user_settings import UserSettings

__all__ = ["Variables", "plan_variables"]

_ENGINE = "POPLAR_ENGINE_OPTIONS"
_TARGET = "POPLAR_TARGET_OPTIONS"
_FIXED_ORDER = "POPTORCH_EMULATOR_FIXED_ORDER"
_WAIT = "POPTORCH_WAIT_FOR_IPU"
_VARIABLES_OF = {
    "debug.log_level": ("POPTORCH_LOG_LEVEL",),
    "poplar.log_level": ("POPLAR_LOG_LEVEL",),
    "poplar.popart_log_level": ("POPART_LOG_LEVEL",),
    "poplar.log_dest": ("POPTORCH_LOG_DEST", "POPART_LOG_DEST", "POPLAR_LOG_DEST"),
    "poplar.ipu_model_version": ("POPTORCH_IPU_MODEL_VERSION",),
    "cache.min_seconds": ("POPTORCH_EMULATOR_CACHE_SECONDS",),
}


@dataclass(frozen=True)
class Variables:
    """The variables to set, and the calls on Options in place of one.

    Args:
        values: Name -> value.
        origins: Name -> the key that it comes from, with where that was set.
        calls: The calls that pass engine options on.
    """

    values: Mapping[str, str]
    origins: Mapping[str, str]
    calls: Tuple[Call, ...]


def plan_variables(
    config: RunConfig, profile: Profile, settings: UserSettings, environ: Mapping[str, str], found: Findings
) -> Variables:
    """Return the variables that the config asks for.

    Args:
        config: The config.
        profile: The planned profile, which has its own variables.
        settings: What was set, and where.
        environ: The user's environment.
        found: Takes problems, and a note for each value that another one wins over.
    """
    values = dict(profile.environment)
    origins = {name: _origin("profile", settings) for name in values}
    for key, names in _VARIABLES_OF.items():
        group, _, field = key.partition(".")
        value = getattr(getattr(config, group), field)
        if value is None:
            continue
        if not str(value).strip():
            found.problem(f"`{key}` is empty", fix=f"{key}=stderr, or leave it out", key=key)
            continue
        for name in names:
            values[name] = str(value)
            origins[name] = _origin(key, settings)
            before = environ.get(name)
            if before not in (None, str(value)):
                found.note(f"{key}={value} wins over {name}={before} of the environment")
    if config.distributed.deterministic:
        values[_FIXED_ORDER], origins[_FIXED_ORDER] = "1", _origin("distributed.deterministic", settings)
    targets = _merged("poplar.target_options", config.poplar.target_options, _TARGET, environ, found)
    if config.poplar.target_options and targets:
        values[_TARGET] = json.dumps(targets, sort_keys=True)
        origins[_TARGET] = _origin("poplar.target_options", settings)
    calls: List[Call] = []
    if config.poplar.engine_options:
        options = _merged("poplar.engine_options", config.poplar.engine_options, _ENGINE, environ, found)
        chosen = {name: options[name] for name in config.poplar.engine_options if name in options}
        calls.append(Call("_Popart.setEngineOptions", (chosen,), origin="poplar.engine_options"))
    _note_waiting(config, environ, found)
    return Variables(values, origins, tuple(calls))


def _merged(key: str, given: Any, name: str, environ: Mapping[str, str], found: Findings) -> Dict[str, str]:
    """Return the entries of a key and of a variable; the variable's win."""
    if not given:
        return {}
    try:
        chosen: Dict[str, str] = convert(given, "Dict[str, str]")
    except BadValueError as error:
        found.problem(f"`{key}` takes {error.takes}", seen=str(given), key=key)
        return {}
    users = read_variable(name, environ, found)
    for entry, value in chosen.items():
        if users.get(entry, value) != value:
            found.note(f"{name} of the environment wins over {key}: {entry}={users[entry]}, not {value}")
    return {**chosen, **users}


def _note_waiting(config: RunConfig, environ: Mapping[str, str], found: Findings) -> None:
    text = environ.get(_WAIT, "").strip()
    if not text:
        return
    if not text.lstrip("+-").isdigit():
        found.problem(
            f"the environment variable {_WAIT} is not a number",
            where="environment",
            seen=text,
            fix=f"{_WAIT}=1, or unset it and set poplar.wait_for_ipu_minutes=10",
        )
    elif int(text) and config.poplar.wait_for_ipu_minutes is not None:
        found.note(f"{_WAIT}={text} lets PopTorch wait without a limit; poplar.wait_for_ipu_minutes has no effect")


def _origin(key: str, settings: UserSettings) -> str:
    places = [place for name, place in settings.keys.items() if name == key or name.startswith(f"{key}.")]
    place = next(filter(None, places), "")
    return f"{key} ({place})" if place else key
