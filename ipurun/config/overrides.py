"""Parse the overrides of a command line, check them against the schema, and expand a sweep."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException

from ipurun.config import catalog, keys
from ipurun.config.documents import load_text
from ipurun.config.foreign import explain, translate
from ipurun.config.keys import ONE_CHOICE, several_choices
from ipurun.config.schema import hydra_plugins
from ipurun.errors import ConfigError, Problem, listing, nearest

__all__ = ["Groups", "Interval", "Parsed", "each_key_once", "only_for_a_search", "parse", "spread"]

Groups = Dict[str, List[str]]


@dataclass(frozen=True)
class Interval:
    """A range of numbers to search: ``interval(1, 8)`` or, for a sweeper that searches, ``range(1, 8)``.

    Args:
        low: The smallest number; an integer if all are.
        high: The largest one.
        log: Whether orders of magnitude are searched (``tag(log, interval(1e-4, 1e-1))``).
        step: Distance between the numbers; None: any number.
    """

    low: float
    high: float
    log: bool = False
    step: Optional[float] = None


@dataclass(frozen=True)
class Parsed:
    """One valid override.

    Args:
        typed: As the user wrote it.
        key: The key or group, without ``+`` and package.
        values: Its value as text for Hydra; several in a sweep.
        prefix: The prefix that Hydra needs: ``+``, ``++``, ``~`` or nothing.
        is_group: Whether it chooses a file of a group.
        late: A value that Hydra's grammar cannot express, to be set after composing.
        written: The keys that get a value, including those inside a mapping.
        interval: What a sweeper that searches may choose a value from, if that is not a list of values.
        is_sampled: Whether such a sweeper has chosen the value.
    """

    typed: str
    key: str
    prefix: str
    values: Tuple[str, ...]
    is_group: bool
    late: Any = None
    written: Tuple[str, ...] = ()
    interval: Optional[Interval] = None
    is_sampled: bool = False

    @property
    def is_swept(self) -> bool:
        return len(self.values) > 1 or self.is_sampled or self.interval is not None

    def sampled(self, value: str) -> Parsed:
        """Return the override with one of its values."""
        return replace(self, values=(value,), interval=None, is_sampled=True)

    def shown(self, value: str) -> str:
        """Return the override with one of its values, as a user would type it."""
        return f"{'+' if self.key == 'recipe' else ''}{self.key}={value}" if self.is_swept else self.typed

    def texts(self) -> List[str]:
        """Return the override as Hydra takes it, once for each value."""
        if self.late is not None:
            return [""]
        if self.prefix == "~":
            return ["~" + self.key + (f"={self.values[0]}" if self.values[0] else "")]
        values = self.values or (str(self.interval.low),) if self.interval is not None else self.values
        return [f"{self.prefix}{self.key}={value}" for value in values]


def parse(
    words: Sequence[str], groups: Groups, multirun: bool, config_loader: Any, command: str = "train"
) -> Tuple[List[Parsed], List[Problem]]:
    """Parse overrides; invalid ones become problems.

    Args:
        words: The overrides as typed.
        groups: Group name -> names of its files.
        multirun: Whether sweeps are allowed.
        config_loader: Hydra's config loader, for ``glob``.
        command: The ipurun command, for suggestions.

    Raises:
        ConfigError: If a chosen recipe or other file does not exist, since the rest cannot be checked without it.
    """
    parser = OverridesParser.create(config_loader=config_loader)
    accepted: List[Parsed] = []
    problems: List[Problem] = []
    missing_files = False
    for word in words:
        try:
            override = parser.parse_override(word)
            override.config_loader = config_loader
            values = _values(override)
        except HydraException as error:
            late = _late(word)
            if late is not None:
                accepted.append(late)
            else:
                problems.append(_unreadable(word, error))
            continue
        key = str(override.key_or_group)
        problem = _check(override, key, values, groups, multirun, word)
        if problem is None and override.is_interval_sweep():
            problem = _check_interval(override, word)
        if problem is None and not (key.startswith("hydra") or key in groups or keys.is_known(key)):
            problem = _unknown_key(override, word, words, command)
        if problem is not None:
            problems.append(problem)
            missing_files = missing_files or key in groups
        else:
            prefix, is_group = _prefix(override, key, groups), key in groups
            written = () if is_group or override.is_delete() else tuple(_written(key, override.value()))
            accepted.append(
                Parsed(
                    word,
                    _with_package(override),
                    prefix,
                    values,
                    is_group,
                    written=written,
                    interval=_interval(override),
                )
            )
    if missing_files:
        raise ConfigError(problems)
    return accepted, problems


def spread(overrides: Sequence[Parsed]) -> List[List[Tuple[Parsed, str]]]:
    """Return every combination of swept values, the last key varying fastest."""
    choices = [[(override, text) for text in override.texts()] for override in overrides]
    return [list(point) for point in itertools.product(*choices)]


def each_key_once(words: Iterable[str]) -> Tuple[str, ...]:
    """Return words without those that a later word of the same key makes void.

    Hydra merges mappings that are given one after the other, so of those both have an effect.
    """
    kept: Dict[Tuple[str, int], str] = {}
    for place, word in enumerate(words):
        key, _, value = word.lstrip("+~").partition("=")
        merges = value.lstrip().startswith("{")
        kept = {other: text for other, text in kept.items() if other[0] != key or (merges and "={" in text)}
        kept[key, place] = word
    return tuple(kept.values())


def only_for_a_search(overrides: Sequence[Parsed]) -> List[Problem]:
    """Return the problems of intervals under the sweeper that takes lists of values."""
    found = []
    for override in overrides:
        if override.interval is None or override.values:
            continue
        low, high = override.interval.low, override.interval.high
        found.append(
            Problem(
                f"`{override.key}` is a range to search, and the basic sweeper runs every value of a list",
                f"command line: {override.typed}",
                fix=f"add hydra/sweeper=optuna hydra.sweeper.n_trials=20, or list values: {override.key}={low},{high}",
                key=override.key,
            )
        )
    return found


def _interval(override: Override) -> Optional[Interval]:
    """Return the numbers that a sweeper may search in; for a range its values are listed, too."""
    sweep = override.value() if override.is_sweep_override() else None
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None and sweep.end is not None
        return Interval(*_whole(str(override.key_or_group), sweep.start, sweep.end), "log" in sweep.tags)
    if isinstance(sweep, RangeSweep):
        numbers = list(sweep.range())
        if numbers:
            return Interval(min(numbers), max(numbers), "log" in sweep.tags, abs(float(sweep.step or 1)))
    return None


def _whole(key: str, low: float, high: float) -> Tuple[float, float]:
    """Return ends as integers where a key takes only those: Hydra reads ``interval(1, 8)`` as floats."""
    ends = (int(low), int(high))
    takes_floats = keys.type_problem(key, float(low)) is None
    return (low, high) if takes_floats or ends != (low, high) or keys.type_problem(key, ends[0]) else ends


def _check_interval(override: Override, word: str) -> Optional[Problem]:
    found = _interval(override)
    assert found is not None
    key = str(override.key_or_group)
    if found.low < found.high and not (found.log and found.low <= 0):
        return None
    what = "must be larger than 0 to be searched by magnitude" if found.low < found.high else "is empty"
    text = f"interval({found.low}, {found.high})"
    return Problem(
        f"the range of `{key}` {what}", f"command line: {word}", seen=text, fix=f"{key}=interval(0.001, 0.1)"
    )


def _values(override: Override) -> Tuple[str, ...]:
    if override.is_interval_sweep():
        return ()
    if override.is_sweep_override():
        return tuple(override.sweep_string_iterator())
    if override.is_delete() and override.value() is None:
        return ("",)
    return (override.get_value_element_as_str(),)


def _written(key: str, value: Any) -> Iterator[str]:
    yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _written(f"{key}.{name}", inner)


def _with_package(override: Override) -> str:
    return f"{override.key_or_group}@{override.package}" if override.package else str(override.key_or_group)


def _prefix(override: Override, key: str, groups: Groups) -> str:
    if override.is_delete():
        return "~"
    if key.startswith("hydra"):
        return "++" if hydra_plugins.is_open(key) else ""  # nothing else can be added there
    if key in groups:
        return "++" if override.is_force_add() else ("+" if override.is_add() else "")
    # Hydra closes every mapping, even open ones, and refuses `+` for existing keys; users should not have to know
    # which of the two a key needs.
    return "++"


def _check(
    override: Override,
    key: str,
    values: Tuple[str, ...],
    groups: Groups,
    multirun: bool,
    word: str,
) -> Optional[Problem]:
    where = f"command line: {word}"
    if key.startswith("hydra/"):
        return hydra_plugins.check_choice(key, values, where)
    if key.startswith("hydra."):
        value = None if override.is_delete() or override.is_sweep_override() else override.value()
        return hydra_plugins.check_key(key, value, where)
    if override.is_interval_sweep() and not multirun:
        fix = f"-m {word} hydra/sweeper=optuna"
        return Problem(f"`{key}` is a range to search, which is a sweep", where, fix=fix, key=key)
    if override.is_sweep_override() and not multirun:
        return Problem(
            f"`{key}` has several values, which is a sweep",
            where,
            fix=f"-m {word}  (or quote a list: '{key}=[{word.partition('=')[2]}]')",
            key=key,
        )
    if key in groups:
        return None if override.is_delete() else _check_choice(key, values, groups, where)
    if override.is_delete() or not keys.is_known(key):
        return None
    parts: List[Any] = [override.value()]
    if override.is_interval_sweep():
        found = _interval(override)
        assert found is not None
        parts = [found.low, found.high]
    elif override.is_sweep_override():
        parts = list(override.sweep_iterator())
    return next(filter(None, (_check_value(key, value, where) for value in parts)), None)


def _check_value(key: str, value: Any, where: str) -> Optional[Problem]:
    """Check the value of a key, or the mapping of a group of keys."""
    wrong = keys.type_problem(key, value)
    if wrong is not None:
        fix = _sweep_of(key, value) or keys.example(key) or keys.advice(key)
        return Problem(f"`{key}` takes {wrong[0]}", where, seen=wrong[1], fix=fix, key=key)
    for name, inner in value.items() if isinstance(value, dict) else ():
        path = f"{key}.{name}"
        if not keys.is_known(path):
            known = ", ".join(keys.suggest(path, inner).keys) or f"run `ipurun ls keys {key}` to see its keys"
            return Problem(f"unknown key `{path}`", where, known=known, fix=keys.example(key), key=path)
        found = _check_value(path, inner, where)
        if found is not None:
            return found
    return None


def _sweep_of(key: str, value: Any) -> str:
    """Return how to sweep over a list given to a key that takes one value."""
    if not isinstance(value, list) or len(value) < 2:
        return ""
    return f"{key}={value[0]}, or one run for each: -m {key}={','.join(map(str, value))}"


def _check_choice(group: str, values: Tuple[str, ...], groups: Groups, where: str) -> Optional[Problem]:
    for value in values:
        if value.startswith("[") and "," in value and group in ONE_CHOICE:
            return several_choices(group, [name.strip() for name in value.strip("[]").split(",")], where)
    chosen = [name for value in values for name in value.strip("[]").split(",")]
    for name in (name.strip() for name in chosen):
        if name in groups[group]:
            continue
        if name in ("", "null"):
            fix = f"{group}=none" if "none" in groups[group] else f"remove it with ~{group}"
            return Problem(
                f"`{group}` takes the name of a config",
                where,
                seen=name or "nothing",
                known=listing(groups[group], most=40),
                fix="ipurun ls" if group == "recipe" else fix,
                key=group,
            )
        close = nearest(name, groups[group], most=1)
        return Problem(
            f"unknown {group} `{name}`",
            where,
            known=listing(groups[group], most=40),
            fix=f"{'+' if group == 'recipe' else ''}{group}={close[0]}" if close else "ipurun ls",
            key=group,
        )
    return None


def _unknown_key(override: Override, word: str, words: Sequence[str], command: str) -> Problem:
    key = str(override.key_or_group)
    value = None if override.is_delete() or override.is_sweep_override() else override.value()
    value = str(value) if isinstance(value, QuotedString) else value
    found = keys.suggest(key, value)
    text = word.partition("=")[2]
    fix = ""
    if found.keys and (value is None or found.value is not None):
        text = text if found.value is None or repr(found.value) == repr(value) else _as_typed(found.value)
        better = [f"{found.keys[0]}={text}" if other == word else _translated(other) for other in words]
        fix = " ".join(["ipurun", command, *map(shlex.quote, better)])
    else:
        why = explain(key, value)
        fix = f"remove {word}" + (f": {why}" if why else "")
    known = ", ".join(found.keys) if found.keys else "run `ipurun ls keys` to see every key"
    return Problem(f"unknown key `{key}`", f"command line: {word}", known=known, fix=fix, key=key)


def _translated(word: str) -> str:
    """Return a word as ipurun has it, if it is one of another tool, so that the advice mends all of them at once."""
    key, equals, text = word.partition("=")
    if not equals or keys.is_known(key.lstrip("+~")):
        return word
    try:
        value = load_text(text)
    except yaml.YAMLError:
        return word
    found = translate(key.lstrip("+~"), value)
    if found is None or found[1] is None:
        return word
    return f"{found[0]}={text if repr(found[1]) == repr(value) else _as_typed(found[1])}"


def _as_typed(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{inner}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_typed, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _late(word: str) -> Optional[Parsed]:
    # Hydra's grammar does not have quoted keys, so patterns such as {"*.norm": 32} are read as plain YAML.
    key, _, text = word.lstrip("+").partition("=")
    try:
        value = load_text(text)
    except yaml.YAMLError:
        return None
    if not isinstance(value, (dict, list)) or not keys.is_known(key) or keys.type_problem(key, value) is not None:
        return None
    return Parsed(word, key, "", (text,), False, late=value, written=tuple(_written(key, value)))


def _unreadable(word: str, error: HydraException) -> Problem:
    where = f"command line: {word}"
    if "=" not in word and not word.startswith("~"):
        close = keys.suggest(word).keys
        if word in (recipe.name for recipe in catalog.recipes()):
            return Problem(f"`{word}` is a recipe, not an override", where, fix=f"+recipe={word}")
        return Problem(
            f"`{word}` is not an override",
            where,
            fix=f"{close[0]}=VALUE" if close else "write key=value, for example devices=8",
        )
    reason = str(error).splitlines()[0]
    key, _, value = word.partition("=")
    return Problem(
        f"cannot read the override: {reason}",
        where,
        fix=f"quote the value for Hydra and for the shell: '{key}=\"{value}\"'",
    )
