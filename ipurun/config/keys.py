"""Look up single keys: whether one exists, what an unknown one may mean, whether a value fits."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ipurun.config.foreign import explain, translate
from ipurun.config.schema import Key, RunConfig, walk_keys
from ipurun.errors import Problem, nearest

__all__ = [
    "ONE_CHOICE",
    "Suggestion",
    "advice",
    "all_keys",
    "complete",
    "example",
    "is_known",
    "schema",
    "several_choices",
    "suggest",
    "suggest_arguments",
    "type_problem",
]

# Groups whose files each describe one object: the second of two in a list would silently win.
ONE_CHOICE = ("model", "data", "optimizer", "schedule", "machine")

# Names of types as messages write them.
_TYPES = {
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "list of any": "a list",
    "list of int": "a list of whole numbers",
    "list of str": "a list of names",
    "mapping": "a mapping",
    "mapping of str": "a mapping of names to text",
    "str": "text",
}


@functools.lru_cache(maxsize=None)
def all_keys() -> Dict[str, Key]:
    """Return every key of the schema by its full path."""
    return {key.path: key for key in walk_keys(RunConfig)}


@functools.lru_cache(maxsize=None)
def schema() -> DictConfig:
    """Return the schema with its defaults as OmegaConf sees it: to be merged with or copied, not changed.

    Making it from the dataclasses takes five times as long as a copy.
    """
    return OmegaConf.structured(RunConfig)


def is_known(path: str) -> bool:
    """Whether the schema has the path as a key, as a group of keys, or inside an open mapping."""
    return path in all_keys() or _is_node(path) or _is_in_open_mapping(path)


@dataclass(frozen=True)
class Suggestion:
    """Keys that an unknown one may mean, best first.

    Args:
        keys: The keys.
        value: The value of the first key that means the same; None if there is none.
    """

    keys: Tuple[str, ...] = ()
    value: Any = None


def suggest(path: str, value: Any = None) -> Suggestion:
    """Suggest keys for an unknown one: its translation from another tool, or similar names that take the value.

    Args:
        path: The unknown key.
        value: The value it was set to; None: any.
    """
    if explain(path):
        return Suggestion()
    key, translated = translate(path, value) or ("", None)
    if key and (value is None or (translated is not None and (translated != value or _takes(key, translated)))):
        return Suggestion((key,), translated)
    nodes = {name.rpartition(".")[0] for name in all_keys()} - {""} if isinstance(value, dict) else set()
    close = nearest(path, [*all_keys(), *sorted(nodes)], most=8)
    fitting = [name for name in close if value is None or _takes(name, value)][:3]
    if fitting:
        return Suggestion(tuple(fitting), value)
    return Suggestion((key,) if key else ())


def suggest_arguments(key: str, name: str, known: Sequence[str]) -> List[str]:
    """Suggest known arguments of a key for an unknown one: ``lr`` for ``learning_rate`` of the optimizer."""
    ours = (translate(name) or ("",))[0]
    return [argument for argument in known if f"{key}.{argument}" == ours] or nearest(name, known)


def _is_node(path: str) -> bool:
    """Whether the path is a group of keys rather than a key."""
    return any(key.startswith(path + ".") for key in all_keys())


def _is_in_open_mapping(path: str) -> bool:
    """Whether a path lies in a mapping without a schema, as ``model.width`` does."""
    parts = path.split(".")
    above = [all_keys().get(".".join(parts[:length])) for length in range(1, len(parts))]
    return any(key.is_open or key.type_name.startswith(("any", "list of any")) for key in above if key is not None)


def _takes(path: str, value: Any) -> bool:
    key = all_keys().get(path)
    if "." not in path and isinstance(value, str) and (_is_node(path) or (key is not None and key.is_open)):
        return True  # the choice of a file, as in `optimizer=adam`
    if key is not None and key.choices and str(value) not in key.choices:
        return False
    if key is not None and key.minimum is not None and isinstance(value, (int, float)) and value < key.minimum:
        return False
    return type_problem(path, value) is None


def several_choices(group: str, chosen: Sequence[str], where: str) -> Problem:
    """Return the problem of several files chosen in a group of `ONE_CHOICE`."""
    sweep = f"one run for each: -m {group}={','.join(chosen)}"
    groups = "; for parameters that need other values: optimizer.groups" if group == "optimizer" else ""
    return Problem(
        f"`{group}` takes one choice, not a list",
        where,
        seen=", ".join(chosen),
        fix=f"{group}={chosen[0]}, or {sweep}{groups}",
        key=group,
    )


def type_problem(path: str, value: Any) -> Optional[Tuple[str, str]]:
    """Compare a value with the type of its key.

    Returns:
        ``(takes, seen)``, or None when the value fits.
    """
    if isinstance(value, str) and "${" in value:
        # The value of an interpolation is known only after composing.
        return None if _is_well_formed(value) else ("text with a well-formed ${...}", value)
    if _is_in_open_mapping(path) or path not in all_keys():
        if _is_node(path) and not isinstance(value, dict):
            return "a mapping of keys", _shown(value)
        above = _key_above(path)
        if above is not None and above.type_name == "mapping of str" and (value is None or _is_container(value)):
            return "text", _shown(value)
        return None
    if path == "gradient_accumulation" and _is_container(value):  # other tools take a value for each epoch
        return "one whole number for the whole run: it is compiled into the program and cannot change", _shown(value)
    default = all_keys()[path].default
    if _is_container(value) and _is_container(default) and isinstance(value, dict) != isinstance(default, dict):
        return f"a {'mapping' if isinstance(default, dict) else 'list'}", _shown(value)  # the two cannot be merged
    if isinstance(value, bool) and not _takes_bool(path):
        return _accepted(path), str(value).lower()  # OmegaConf would accept it as 0 or 1, or as text
    try:
        OmegaConf.update(_scratch(), path, value, merge=False)
    except OmegaConfBaseException:
        takes = all_keys()[path].type_name
        if isinstance(value, list) and len(value) > 1 and "list" not in takes:
            return f"one {'number' if 'int' in takes or 'float' in takes else 'value'}, not a list", _shown(value)
        return _accepted(path), _shown(value)
    return None


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _is_well_formed(text: str) -> bool:
    try:
        OmegaConf.create([text])
    except OmegaConfBaseException:
        return False
    return True


def _accepted(path: str) -> str:
    """Describe the values that a key takes: ``a whole number or null``."""
    names = all_keys()[path].type_name.split(" | ")
    described = [_TYPES.get(name, name) for name in names]
    return " or ".join([", ".join(described[:-1]), described[-1]] if len(described) > 1 else described)


def example(path: str) -> str:
    """Return an example override of the key, or of a key inside it."""
    key = all_keys().get(path)
    if key is None:
        inside = [name for name in all_keys() if name.startswith(path + ".")]
        return f"{inside[0]}=VALUE, or another key of `{path}`" if inside else ""
    if key.is_open:
        return f"{path}.NAME=VALUE"
    value = key.default_text if key.default is not None else (key.choices[0] if key.choices else "")
    if not value and "int" in key.type_name:
        value = str(max(key.minimum or 1, 1))
    if not value:
        value = "null" if key.type_name.endswith("null") else "VALUE"
    return f"{path}={value}"


def advice(path: str) -> str:
    """Return what to do about a problem of a key, from the schema: an example, or how to remove it, with its help."""
    known = _key_above(path)
    if known is None:
        return example(path) or "run `ipurun ls keys` to see every key"
    first = example(path) if known.path == path else f"~{path} removes it"
    return f"{first}; `{known.path}`: {known.help}"


def complete(problem: Problem, where_set: Callable[[str], str]) -> Problem:
    """Fill in the place and the advice of a problem from its key, where it has none.

    Args:
        problem: The problem.
        where_set: Returns where a key was set, empty if unknown.
    """
    if problem.where and problem.fix:
        return problem
    parts = problem.key.split(".") if problem.key else []
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    where = problem.where or next(filter(None, map(where_set, above)), "")
    if not where:
        where = f"`{problem.key}`: not set, so the default applies" if problem.key else "the command line"
    return replace(problem, where=where, fix=problem.fix or advice(problem.key))


def _key_above(path: str) -> Optional[Key]:
    """Return the key of the schema that a path is, or lies in."""
    parts = path.split(".")
    above = (all_keys().get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    return next(filter(None, above), None)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


@functools.lru_cache(maxsize=None)
def _scratch() -> DictConfig:
    # Types do not depend on values, so one config serves all checks.
    return copy.deepcopy(schema())


def _takes_bool(path: str) -> bool:
    return "bool" in all_keys()[path].type_name or all_keys()[path].type_name.startswith("any")
