"""Compose a command line into typed, checked configs.

Every point of a sweep is composed and checked before anything runs, so that a typo in the last one stops the sweep
before the first. A config is composed without its faulty parts, so that later checks can add to the same report.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ipurun.config import checks, hydra_session, overrides, secrets
from ipurun.config.argv import parse_argv
from ipurun.config.catalog import RECIPE_GROUP
from ipurun.config.documents import Document, NotText, load_file, yaml_problem
from ipurun.config.keys import all_keys, complete, schema, type_problem
from ipurun.config.schema import RunConfig, hydra_plugins
from ipurun.errors import ConfigError, Problem

__all__ = ["ChangedKey", "Point", "Points", "from_yaml", "one", "points", "to_yaml", "where_typed", "with_words"]

_ONE_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:[^{}]*\}")
_OF_NUMBERS = ("optimizer", "schedule")  # open sections whose arguments are numbers
_NO_VARIABLE = re.compile(r"Environment variable '([^']+)' not found")


@dataclass(frozen=True)
class ChangedKey:
    """A key that differs from its default, with the file and line that set it or ``command line``."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Point:
    """One config to run: a plain run, or one point of a sweep.

    Args:
        config: The typed config, resolved.
        overrides: The overrides of the command line for this point.
        recipes: Names of the recipes in it.
        changed: Keys that differ from their defaults.
        given: Keys that were typed or written in a YAML file and are not null, with the override or the file and line
            that set them, empty if unknown. None if only the config is known.
        swept: Sweep key -> this point's value.
        problems: The problems found so far; a point with problems must not run.
        run_dir: The run folder that the user chose (``hydra.run.dir=``).
        hidden: Keys with secrets, each with what is stored in place of its value. All texts above have no secrets.
        line: What it was composed from; None if only the config is known.
    """

    config: RunConfig
    overrides: Tuple[str, ...] = ()
    recipes: Tuple[str, ...] = ()
    changed: Tuple[ChangedKey, ...] = ()
    given: Optional[Mapping[str, str]] = None
    swept: Mapping[str, str] = field(default_factory=dict)
    problems: Tuple[Problem, ...] = ()
    run_dir: Optional[str] = None
    hidden: Mapping[str, str] = field(default_factory=dict)
    line: Optional[_Line] = field(default=None, repr=False, compare=False)

    @property
    def secrets(self) -> Dict[str, Any]:
        """The secret values of the config by key."""
        return secrets.values_of(dataclasses.asdict(self.config), self.hidden)

    def without_secrets(self, text: str) -> str:
        """Return text in which no secret of this config occurs."""
        return secrets.mask_text(text, self.secrets.values())

    def where(self, key: str) -> str:
        """Return where a key was set: the override as typed, or file and line; empty for a default."""
        inside = (origin for given, origin in (self.given or {}).items() if (given + ".").startswith(key + "."))
        return where_typed(self.overrides, key) or next(filter(None, inside), "")

    def complete(self, problems: Iterable[Problem]) -> List[Problem]:
        """Return problems with a place and advice, each once."""
        return list(dict.fromkeys(complete(problem, self.where) for problem in problems))


@dataclass(frozen=True)
class _Line:
    """A composed command line: Hydra, the overrides with their texts, and the config before it is resolved."""

    session: hydra_session.Session
    chosen: Tuple[Tuple[overrides.Parsed, str], ...]
    composed: hydra_session.Composed


@dataclass(frozen=True)
class Points:
    """All points of a command line.

    Args:
        points: The points. Of a search, those at the ends of its ranges and with each of its choices.
        multirun: Whether ``-m`` was given.
        launching: Where points run, and which sweeper chooses them.
        searched: The keys of a search, with what it may choose from.
        composer: Composes a point with values that a search has chosen.
    """

    points: Tuple[Point, ...]
    multirun: bool
    launching: hydra_plugins.Launching = field(default_factory=hydra_plugins.Launching)
    searched: Tuple[overrides.Parsed, ...] = ()
    composer: Optional[Callable[[Mapping[str, str]], Point]] = field(default=None, repr=False, compare=False)


def where_typed(words: Sequence[str], key: str) -> str:
    """Return the last word of a command line that sets a key or something above it, empty if none does."""
    for word in reversed(words):
        typed = word.lstrip("+~").partition("=")[0]
        if typed == key or key.startswith(typed + "."):
            return f"command line: {word}"
    return ""


def points(argv: Sequence[str], command: str = "train") -> Points:
    """Compose every point of a command line.

    Args:
        argv: Overrides and Hydra's flags.
        command: The ipurun command, for suggestions.

    Raises:
        ConfigError: If a point cannot be composed at all; other problems are in `Point.problems`.
    """
    line = parse_argv(argv)
    with hydra_session.open_hydra(line) as session:
        typed_after = f"{command} -m" if line.multirun else command
        parsed, problems = overrides.parse(line.overrides, session.groups, line.multirun, session.loader, typed_after)
        launching = hydra_plugins.Launching()
        if line.multirun:
            launching, declared = session.sweep(parsed)
            parsed += declared
        if launching.sweeper != hydra_plugins.BASIC:
            return _search(session, parsed, problems, launching)
        problems += overrides.only_for_a_search(parsed)
        parsed = [override for override in parsed if override.values]
        composed = [_compose_point(session, chosen, problems) for chosen in overrides.spread(parsed)]
    return Points(tuple(composed), line.multirun, launching)


def _search(
    session: hydra_session.Session,
    parsed: Sequence[overrides.Parsed],
    problems: Sequence[Problem],
    launching: hydra_plugins.Launching,
) -> Points:
    """Return a search: points at the ends of all ranges and with each choice, and how to compose others."""
    searched = tuple(override for override in parsed if override.is_swept)

    def compose(values: Mapping[str, str]) -> Point:
        sampled = [override.sampled(values[override.key]) if override.is_swept else override for override in parsed]
        return _compose_point(session, overrides.spread(sampled)[0], problems)

    tried = {override.key: _ends(override) for override in searched}
    first = {key: values[0] for key, values in tried.items()}
    chosen = [first, *({**first, key: value} for key, values in tried.items() for value in values[1:])]
    return Points(tuple(compose(values) for values in chosen), True, launching, searched, compose)


def _ends(override: overrides.Parsed) -> List[str]:
    """Return the values at the ends of a range, or all choices."""
    if override.interval is None:
        return list(override.values)
    return list(dict.fromkeys((str(override.interval.low), str(override.interval.high))))


def one(argv: Sequence[str], command: str = "train") -> Point:
    """Compose the config of a command line without a sweep.

    Raises:
        ConfigError: If it has problems, or is a sweep.
    """
    found = points(argv, command)
    if found.multirun:
        raise ConfigError("this command takes one config, not a sweep", "command line: -m", fix="leave out -m")
    point = found.points[0]
    if point.problems:
        raise ConfigError(point.problems)
    return point


def with_words(point: Point, words: Sequence[str]) -> Point:
    """Return the point of the same command line with more words of the form ``key=value`` after it.

    Takes a third of the time of `points`: files are not read and merged again. Hydra, too, applies such words to the
    merged files.

    Raises:
        ConfigError: If it cannot be composed at all; other problems are in `Point.problems`.
    """
    line = point.line
    if line is None:
        raise ValueError("only a point that was composed from a command line can take more words")
    parsed, problems = overrides.parse(words, line.session.groups, False, line.session.loader, "plan")
    added = [chosen for alternatives in overrides.spread(parsed) for chosen in alternatives]
    return _point((*line.chosen, *added), hydra_session.with_overrides(line.composed, added), problems)


def to_yaml(config: RunConfig, hidden: Optional[Mapping[str, str]] = None) -> str:
    """Return a resolved config as YAML for `from_yaml`.

    Args:
        config: The config.
        hidden: What to write in place of secrets, as in `Point.hidden`; None: masks, by the names of keys.
    """
    plain = dataclasses.asdict(config)
    hidden = secrets.hidden_values(plain, plain) if hidden is None else hidden
    return OmegaConf.to_yaml(OmegaConf.create(secrets.with_hidden(plain, hidden)))


def from_yaml(path: Path, values: Optional[Mapping[str, Any]] = None) -> RunConfig:
    """Read a stored config.

    Args:
        path: The file.
        values: The secrets by key; those that are not given remain as they are stored.

    Raises:
        ConfigError: If it is missing, not YAML, or not a config of this version.
    """
    try:
        stored = load_file(path)
        if not isinstance(stored, DictConfig) or not stored:
            what = "the stored config is not a mapping of keys" if stored else "the stored config is empty"
            raise ConfigError(what, str(path), fix="use the folder of another run")
        plain = secrets.with_hidden(OmegaConf.to_container(stored), values or {})
        merged = OmegaConf.merge(schema(), secrets.escaped(plain))
        return cast(RunConfig, OmegaConf.to_object(merged))
    except FileNotFoundError:
        raise ConfigError("the stored config does not exist", str(path), fix="use the folder of a run") from None
    except UnicodeDecodeError as error:
        raise ConfigError(yaml_problem(path, NotText(error))) from error
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(path, error)) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        fix = "correct the key in the file, or use the folder of another run"
        raise ConfigError(f"the stored config does not fit this version: {reason}", str(path), fix=fix) from error


def _compose_point(
    session: hydra_session.Session,
    chosen: Sequence[Tuple[overrides.Parsed, str]],
    problems: Sequence[Problem],
) -> Point:
    composed = session.compose(chosen)
    unresolved = dataclasses.replace(composed, config=copy.deepcopy(composed.config))
    point = _point(chosen, composed, problems)
    return dataclasses.replace(point, line=_Line(session, tuple(chosen), unresolved))


def _point(
    chosen: Sequence[Tuple[overrides.Parsed, str]],
    composed: hydra_session.Composed,
    problems: Sequence[Problem],
) -> Point:
    words = [(override, _shown(override, text)) for override, text in chosen]
    found = list(problems) + list(composed.problems)
    config, unresolved = None, None
    if composed.config is not None:
        unresolved = OmegaConf.to_container(composed.config)
        more = checks.check_interpolations(unresolved)
        if not more:
            _read_numbers(composed.config, unresolved)
            config, more = _typed(composed.config, composed.recipes)
        found += more
    if config is not None:
        found += checks.check_allowed(config)
    if config is None or len(found) > len(problems):
        raise ConfigError(
            complete(problem, lambda key: _where_written(key, [word for _, word in words], composed))
            for problem in found
        )
    resolved = dataclasses.asdict(config)
    hidden = secrets.hidden_values(unresolved, resolved)
    shown = secrets.with_hidden(resolved, dict.fromkeys(hidden, secrets.MASK))
    changed = tuple(_changed(shown, chosen, composed.documents))
    point = Point(
        config,
        overrides=overrides.each_key_once(word for _, word in words),
        recipes=composed.recipes,
        changed=changed,
        given=_given_keys(config, chosen, composed.documents, changed),
        swept={override.key: word.partition("=")[2] for override, word in words if override.is_swept},
        run_dir=composed.run_dir,
        hidden=hidden,
    )
    found += secrets.masked_keys(resolved, point.where)
    return dataclasses.replace(point, problems=tuple(point.complete([*found, *checks.check_values(config)])))


def _where_written(key: str, words: Sequence[str], composed: hydra_session.Composed) -> str:
    """Return where a key of a config without values was set."""
    lines = ((document, document.line_of(key)) for document in reversed(composed.documents))
    written = (document.where(line) for document, line in lines if line is not None)
    return where_typed(words, key) or next(written, "")


def _shown(override: overrides.Parsed, text: str) -> str:
    """Return an override with one of its values, as a user would type it, without secrets."""
    return secrets.mask_word(override.shown(text.partition("=")[2]))


def _read_numbers(config: DictConfig, unresolved: Any) -> None:
    """Let variables of the environment, which are text, be read as if their value had been typed, in place.

    The schema does this for its own keys.
    """
    for section in _OF_NUMBERS:
        for key, written in _leaves(unresolved.get(section) or {}, section):
            if isinstance(written, str) and _ONE_VARIABLE.fullmatch(written):
                OmegaConf.update(config, key, f"${{oc.decode:{written}}}")


def _typed(config: DictConfig, recipes: Tuple[str, ...]) -> Tuple[Optional[RunConfig], List[Problem]]:
    try:
        OmegaConf.resolve(config)
        typed = cast(RunConfig, OmegaConf.to_object(config))  # Hydra keeps the schema's types
    except MissingMandatoryValue:
        missing = sorted(OmegaConf.missing_keys(config))
        fixes = " ".join(f"{key}=VALUE" for key in missing)
        return None, [Problem(f"`{key}` has no value", seen="???", fix=fixes, key=key) for key in missing]
    except (OmegaConfBaseException, RecursionError) as error:
        return None, list(_unresolvable(config)) or [_cannot_resolve(getattr(error, "full_key", None) or "", error)]
    # YAML 1.1 reads the key `on` as true.
    typed.metrics = {
        name: {"on" if key is True else key: value for key, value in node.items()} if isinstance(node, dict) else node
        for name, node in typed.metrics.items()
    }
    if typed.name is None:
        typed.name = "+".join(recipes) or "run"
    return typed, []


def _unresolvable(config: DictConfig) -> Iterator[Problem]:
    for key, value in _leaves(OmegaConf.to_container(config, resolve=False)):
        try:
            resolved = OmegaConf.select(config, key)
        except (OmegaConfBaseException, RecursionError) as error:
            yield _cannot_resolve(key, error, secrets.mask_word(f"{key}={value}").partition("=")[2])
            continue
        resolved = OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved
        wrong = type_problem(key, resolved) if isinstance(value, str) and "${" in value else None
        if wrong is not None:
            yield Problem(f"`{key}` takes {wrong[0]}", seen=f"{value}, which is {wrong[1]}", key=key)


def _cannot_resolve(key: str, error: BaseException, seen: str = "") -> Problem:
    reason = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    what = f"`{key}`" if key else "the config"
    variable = _NO_VARIABLE.search(reason)
    if variable is not None:
        name = variable[1]
        fix = f"export {name}=VALUE, {key}=VALUE, or a default: ${{oc.env:{name},DEFAULT}}"
        return Problem(f"{what} needs the environment variable {name}, which is not set", seen=seen, fix=fix, key=key)
    fix = f"write the value itself; `ipurun ls keys {key}` describes the key" if key else "write the values themselves"
    if "HydraConfig was not set" in reason:
        fix = f"write the value: ipurun reads configs without starting a Hydra application; {key}=VALUE"
    return Problem(f"{what} cannot be resolved: {reason}", seen=seen, fix=fix, key=key)


def _changed(
    shown: Mapping[str, Any], chosen: Sequence[Tuple[overrides.Parsed, str]], documents: Sequence[Document]
) -> Iterator[ChangedKey]:
    typed_keys = {override.key for override, _ in chosen if not override.is_group}
    groups = {override.key for override, _ in chosen if override.is_group}
    defaults = {key: entry.default for key, entry in all_keys().items()}
    for key, value in _leaves(shown):
        if value == defaults.get(key):
            continue
        yield ChangedKey(key, value, _origin(key, typed_keys, groups, documents))


def _origin(key: str, typed: Any, groups: Any, documents: Sequence[Document]) -> str:
    if any(key == other or key.startswith(other + ".") for other in typed):
        return "command line"
    chosen_group = key.split(".")[0] in groups
    for document in reversed(documents):
        if chosen_group and document.package != key.split(".")[0]:
            continue  # a group chosen on the command line wins over a recipe's keys inside it
        line = document.line_of(key)
        if line is not None:
            return document.where(line)
    return "command line" if chosen_group else "derived"


def _given_keys(
    config: RunConfig,
    chosen: Sequence[Tuple[overrides.Parsed, str]],
    documents: Sequence[Document],
    changed: Sequence[ChangedKey],
) -> Dict[str, str]:
    """Return the keys that were typed or written, with their place; defaults of every config do not count."""
    groups = {override.key for override, _ in chosen if override.is_group}
    given: Dict[str, str] = {change.key: "" for change in changed}
    for document in documents:
        group = document.path.parent.name
        if document.is_default and group not in groups:
            continue
        file = document.where()
        for entry in document.entries:
            top = entry.key.split(".")[0]
            # A group chosen on the command line wins over a recipe's keys inside it.
            if top not in groups or (group != RECIPE_GROUP and groups & {document.package, group}):
                given[entry.key] = f"{file}:{entry.line}"
    for override, text in chosen:
        if override.prefix == "~":
            given = {key: origin for key, origin in given.items() if not (key + ".").startswith(override.key + ".")}
        given.update(dict.fromkeys(override.written, f"command line: {_shown(override, text)}"))
    values = dict(_nodes(dataclasses.asdict(config)))
    return {key: origin for key, origin in given.items() if values.get(key) is not None}


def _nodes(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _nodes(inner, f"{path}.{key}" if path else str(key))


def _leaves(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
