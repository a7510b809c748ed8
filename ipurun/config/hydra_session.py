"""Hydra for one command line: compose a config from overrides, and explain why it cannot be composed."""

from __future__ import annotations

import contextlib
import copy
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, cast

import yaml
from hydra import initialize_config_module, version
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse as parse_interpolation

from ipurun.config import folders, keys, overrides
from ipurun.config.argv import CommandLine
from ipurun.config.catalog import RECIPE_GROUP
from ipurun.config.documents import (
    Document,
    NotText,
    Unfit,
    check_aliases,
    check_document,
    display,
    read_document,
    without_keys,
    yaml_problem,
)
from ipurun.config.folders import builtin_folder
from ipurun.config.schema import hydra_plugins
from ipurun.errors import ConfigError, Problem, listing, nearest

__all__ = ["CONFIG_PATH", "Composed", "Session", "open_hydra", "prepare_hydra", "with_overrides"]

_CONFIG_MODULE = "ipurun.conf"
CONFIG_PATH = f"pkg://{_CONFIG_MODULE}"
_PRIMARY = "train"
# ValueError: a malformed defaults list, or a file that is not UTF-8. RecursionError: files that include each other.
# OSError: a file that is a single value, or cannot be read.
_COMPOSE_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    RecursionError,
    AssertionError,
    OSError,
)
_IN_FILE = re.compile(r"[Ii]n '?(?P<config>[\w./-]+)'?[:,]")
_NOTHING_TO_OVERRIDE = re.compile(r"Could not override '(?P<group>[^'@]+)")
_UNKNOWN_TO_HYDRA = re.compile(r"not in '(?P<owner>\w+)'\s+full_key: (?P<key>hydra\.(launcher|sweeper)\.\w+)")
_CHOSEN_TWICE = re.compile(r"Multiple values for [\w/]+|force-add of config groups.*|[\w/]+ appears more than once")


@dataclass(frozen=True)
class Composed:
    """The result of composing one list of overrides; without a config if it has problems."""

    config: Optional[DictConfig]
    recipes: Tuple[str, ...] = ()
    documents: Tuple[Document, ...] = ()
    problems: Tuple[Problem, ...] = ()
    run_dir: Optional[str] = None  # that the user chose


@contextmanager
def open_hydra(line: CommandLine) -> Iterator[Session]:
    """Open Hydra for the time of a `with` statement; a caller's own Hydra is restored afterwards."""
    prepare_hydra(line)
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(_CONFIG_MODULE, job_name="ipurun", version_base="1.3"):
            yield Session(GlobalHydra.instance().config_loader(), line.config_name)
    finally:
        GlobalHydra.instance().hydra = before


def prepare_hydra(line: CommandLine) -> None:
    """Register ipurun's schema and the user's folders with Hydra."""
    version.setbase("1.3")
    ConfigStore.instance().store(name="schema", node=keys.schema())
    hydra_plugins.register()
    folders.add_user_folder(line.config_dir)
    if _UserFolders not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(_UserFolders)
    folders.check_user_folders()
    _check_aliases()


def _check_aliases() -> None:
    """Refuse files that Hydra would read for minutes or forever, before it reads any."""
    problems = _unfit_files(check_aliases)
    if problems:
        raise ConfigError(problems)


def _unfit_files(read: Callable[[Path], object]) -> List[Problem]:
    problems: List[Problem] = []
    for path in (path for folder in folders.user_folders() for path in folders.files(folder)):
        try:
            read(path)
        except Unfit as error:
            problems.append(yaml_problem(path, error))
        except (yaml.YAMLError, OSError):
            continue  # composing explains it, if the file is used
    return problems


class Session:
    """Hydra's config loader and the groups of configs."""

    def __init__(self, loader: ConfigLoader, config_name: str) -> None:
        self.loader = loader
        self.config_name = config_name
        self.groups = folders.groups()

    def sweep(self, parsed: Sequence[overrides.Parsed]) -> Tuple[hydra_plugins.Launching, List[overrides.Parsed]]:
        """Return how points are run, and the sweeps that a config declares (``hydra.sweeper.params``).

        Keys of the command line are not declared again.
        """
        plain = [text for override in parsed if not override.is_swept for text in override.texts() if text]
        composed = self._load(plain)
        if composed is None:
            return hydra_plugins.Launching(), []
        declared = OmegaConf.select(composed, "hydra.sweeper.params")
        typed = {override.key for override in parsed}
        words = [f"{key}={value}" for key, value in (declared or {}).items() if key.lstrip("+") not in typed]
        found, problems = overrides.parse(words, self.groups, True, self.loader)
        if problems:
            raise ConfigError(problems)
        return hydra_plugins.read_launching(composed.hydra), found

    def compose(self, chosen: Sequence[Tuple[overrides.Parsed, str]]) -> Composed:
        """Compose a config. Groups chosen on the command line win over a recipe's keys inside them.

        Args:
            chosen: Overrides, each with its text as Hydra takes it.
        """
        texts = [text for _, text in chosen if text]
        typed_groups = {override.key for override, _ in chosen if override.is_group}
        documents: List[Document] = []

        def check(defaults: Sequence[ResultDefault]) -> None:
            documents.extend(_documents(defaults, typed_groups))
            problems = [problem for document in documents for problem in check_document(document, self.groups)]
            problems += [problem for document in documents for problem in _hydra_problems(document)]
            if problems:
                raise ConfigError(problems)

        try:
            with self._checking_files(check):
                config = self.loader.load_configuration(self.config_name, list(texts), RunMode.RUN)
        except ConfigError as error:
            return Composed(None, _recipes(documents), tuple(documents), tuple(error.problems))
        except _COMPOSE_ERRORS as error:
            return Composed(None, documents=tuple(documents), problems=tuple(_explain(error, self.groups, chosen)))
        try:
            run_dir = hydra_plugins.resolved(config.hydra, "run.dir")
        except ConfigError as error:
            return Composed(None, _recipes(documents), tuple(documents), tuple(error.problems))
        with open_dict(config):
            config.pop("hydra")
        explicit = [override for override, _ in chosen if override.is_group]
        for choice in explicit:
            self._let_choice_win(config, choice, explicit, texts, documents)
        for override, _ in chosen:
            if override.late is not None:
                OmegaConf.update(config, override.key, override.late, force_add=True)
        return Composed(config, _recipes(documents), tuple(documents), run_dir=None if run_dir == "." else run_dir)

    @contextmanager
    def _checking_files(self, check: Callable[[Sequence[ResultDefault]], None]) -> Iterator[None]:
        """Let Hydra call a function with the files of a config, in their order, before it merges them.

        Finding them takes half of the time of composing. Hydra shows them in public only by finding them once more.
        """
        merge = self.loader._compose_config_from_defaults_list  # type: ignore[attr-defined]  # of all Hydra 1.3

        def check_and_merge(defaults: List[ResultDefault], repo: object) -> DictConfig:
            check(defaults)
            return cast(DictConfig, merge(defaults=defaults, repo=repo))

        self.loader._compose_config_from_defaults_list = check_and_merge  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.loader._compose_config_from_defaults_list = merge  # type: ignore[attr-defined]

    def _load(self, texts: Sequence[str]) -> Optional[DictConfig]:
        try:
            return self.loader.load_configuration(self.config_name, list(texts), RunMode.MULTIRUN)
        except _COMPOSE_ERRORS:
            return None  # `compose` fails in the same way and explains it

    def _let_choice_win(
        self,
        config: DictConfig,
        choice: overrides.Parsed,
        explicit: Sequence[overrides.Parsed],
        texts: Sequence[str],
        documents: Sequence[Document],
    ) -> None:
        # Hydra merges a recipe after the groups, so keys of a recipe would survive `data=synthetic`.
        group = choice.key
        set_by_recipe = any(
            entry.key.startswith(group + ".")
            for document in documents
            if document.package in ("", "_global_")
            for entry in document.entries
        )
        if group not in config or not set_by_recipe:
            return
        # Other groups of the command line count as well: a pipeline preset may set keys of the optimizer.
        groups = {other.key for other in explicit if other.key != RECIPE_GROUP}
        own = [text for text in texts if text.lstrip("+").partition("=")[0] in groups]
        inside = [text for text in texts if text.lstrip("+~").startswith(f"{group}.")]
        fresh = self.loader.load_configuration(self.config_name, own + inside, RunMode.RUN)
        with open_dict(config):
            config[group] = fresh[group]


def with_overrides(composed: Composed, chosen: Sequence[Tuple[overrides.Parsed, str]]) -> Composed:
    """Return a composed config with more overrides of keys, as if they had been the last words of its command line.

    Args:
        composed: The config; it is not changed.
        chosen: Overrides of keys, each with its text as Hydra takes it.
    """
    config = cast(DictConfig, copy.deepcopy(composed.config))
    parser = OverridesParser.create()
    try:
        for override, text in chosen:
            value = parser.parse_override(text).value() if override.late is None else override.late
            OmegaConf.update(config, override.key, value, force_add=override.prefix != "" or override.late is not None)
    except _COMPOSE_ERRORS as error:
        return replace(composed, config=None, problems=tuple(_explain(error, {}, chosen)))
    return replace(composed, config=config)


def _documents(defaults: Sequence[ResultDefault], typed_groups: Set[str]) -> List[Document]:
    """Read the files of a config.

    Args:
        defaults: The files as Hydra lists them.
        typed_groups: The groups that the command line chooses from.
    """
    found: List[Tuple[ResultDefault, Document]] = []
    for default in defaults:
        name = default.config_path
        path = None if name is None or name.startswith("hydra/") else _file(name)
        if path is not None and path.is_file():
            found.append((default, read_document(path, default.package or "")))
    chosen = {entry.key for default, document in found if not default.primary for entry in document.choices}
    return [
        replace(document, is_default=default.parent == _PRIMARY and _group(default) not in chosen | typed_groups)
        for default, document in found
    ]


def _hydra_problems(document: Document) -> Iterator[Problem]:
    """Yield the problems of a file that sets keys of Hydra."""
    for entry in document.entries:
        is_leaf = not any(other.key.startswith(entry.key + ".") for other in document.entries)
        if entry.key.startswith("hydra.") and is_leaf:
            problem = hydra_plugins.check_key(entry.key, entry.value, document.where(entry.line))
            if problem is not None:
                yield problem


def _group(default: ResultDefault) -> str:
    return str(default.config_path).rpartition("/")[0]


def _recipes(documents: Sequence[Document]) -> Tuple[str, ...]:
    return tuple(document.path.stem for document in documents if document.path.parent.name == RECIPE_GROUP)


class _UserFolders(SearchPathPlugin):
    """Append the user's folders, so that built-in names keep their documented meaning."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in folders.user_folders():
            search_path.append("user", f"file://{folder}")


def _explain(
    error: BaseException, groups: Mapping[str, Sequence[str]], chosen: Sequence[Tuple[overrides.Parsed, str]] = ()
) -> List[Problem]:
    """Turn one of `_COMPOSE_ERRORS` into problems."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    for raised in (error, cause):
        if isinstance(raised, UnicodeDecodeError):
            return [_broken_file(NotText(raised))]
        if isinstance(raised, yaml.YAMLError):
            return [_broken_file(raised)]
    if isinstance(error, RecursionError):
        what = "config files include each other in a loop"
        looped = Problem(what, "a defaults list", fix="remove one of them from the list")
        return _unfit_files(lambda path: read_document(path, "")) or [looped]
    if isinstance(error, OSError) and (single := _files_without_keys()):
        return single
    if isinstance(error, MissingConfigException):
        return [_missing(error, groups)]
    if isinstance(cause, GrammarParseError):
        return _unreadable_interpolations(str(cause).splitlines()[0])
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    detail = str(cause).splitlines()[0] if cause is not error and str(cause) else ""
    named = _IN_FILE.search(message)
    where = display(_file(named["config"])) if named is not None else "composing the config"
    nothing = _NOTHING_TO_OVERRIDE.search(message)
    unknown = _UNKNOWN_TO_HYDRA.search(str(cause))
    if unknown is not None:
        typed = [f"command line: {override.typed}" for override, _ in chosen if override.key == unknown["key"]]
        return [hydra_plugins.unknown_key(unknown["key"], unknown["owner"], typed[0] if typed else where)]
    if nothing is not None:
        group = nothing["group"]
        what = f"the defaults list overrides `{group}`, which "
        what += "has not been chosen before" if group in groups else "is not a config group"
        known = "" if group in groups else listing(sorted(groups), most=40)
        fix = f"write `- /{group}: NAME` without `override`" if group in groups else f"remove `override /{group}`"
        return [Problem(what, where, seen=detail, known=known, fix=fix)]
    twice = _CHOSEN_TWICE.search(f"{message} {detail}")
    for override, _ in chosen:
        if twice is not None and override.is_group and override.prefix.startswith("+") and override.key in twice[0]:
            what = f"`{override.key}` has a file already, which `{override.prefix}` does not replace"
            known = listing(groups.get(override.key, ()), most=40)
            return [Problem(what, f"command line: {override.typed}", known=known, fix=override.typed.lstrip("+"))]
    for override, text in chosen:
        if text and text.partition("=")[0] in message:
            what = f"`{override.key}` does not fit the rest of the config"
            fix = "see docs/how-to/sweeps.md" if override.key.startswith("hydra.") else ""
            return [Problem(what, f"command line: {override.typed}", seen=detail or message, fix=fix, key=override.key)]
    fix = "check the names and the form of the file named above" if named else "run `ipurun ls` to see what exists"
    if twice is not None:
        where, fix = "a defaults list", "choose the group once, or write `- override /GROUP: NAME`"
    return [Problem(message, where, seen=detail, fix=fix)]


def _unreadable_interpolations(detail: str) -> List[Problem]:
    """Return a problem for each value of the user's files that looks like an interpolation and cannot be read."""
    fix = "write ${key}, ${.neighbour} or ${resolver:argument}; a computed name is a whole part: ${data.${name}}"
    problems: List[Problem] = []
    for path in (path for folder in folders.user_folders() for path in folders.files(folder)):
        with contextlib.suppress(yaml.YAMLError, OSError):
            for entry in read_document(path, "").entries:
                text = entry.node.value if isinstance(entry.node, yaml.ScalarNode) else ""
                try:
                    if "${" in text:
                        parse_interpolation(text)
                except GrammarParseError as error:
                    what = f"`{entry.key}`: OmegaConf cannot read this interpolation"
                    seen = f"{text}: {str(error).splitlines()[0]}"
                    problems.append(Problem(what, f"{display(path)}:{entry.line}", seen, fix=fix, key=entry.key))
    what = "OmegaConf cannot read an interpolation of the config"
    return problems or [Problem(what, "composing the config", detail, fix=fix)]


def _files_without_keys() -> List[Problem]:
    problems: List[Problem] = []
    for path in (path for folder in folders.user_folders() for path in folders.files(folder)):
        with contextlib.suppress(yaml.YAMLError, OSError):
            document = read_document(path, "")
            problems += [] if document.holds_keys else [without_keys(document)]
    return problems


def _missing(error: MissingConfigException, groups: Mapping[str, Sequence[str]]) -> Problem:
    name = error.missing_cfg_file or str(error).splitlines()[0]
    group, _, option = str(name).rpartition("/")
    if not group:
        seen = f"no {option}.yaml in {', '.join([*folders.user_folders(), 'the built-in configs'])}"
        return Problem(f"no config `{option}`", "command line: --config-name", seen, fix="--config-name train")
    where = _chosen_in(group, option) or "a defaults list"
    known = listing(groups.get(group, sorted(groups)), most=40)
    close = nearest(option, groups.get(group, ()), most=1)
    fix = f"choose {group}: {close[0]}" if close else f"choose one of these, or add {group}/{option}.yaml"
    return Problem(f"no config `{option}` in group `{group}`", where, known=known, fix=fix)


def _chosen_in(group: str, option: str) -> str:
    """Return the line of a user's file that chooses an option; Hydra only names the primary config."""
    chooses = re.compile(rf"^\s*-\s*(override\s+)?/?{re.escape(group)}\s*:\s*{re.escape(option)}\s*(#.*)?$")
    for folder in folders.user_folders():
        for path in folders.files(folder):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if chooses.match(line):
                    return f"{display(path)}:{number}"
    return ""


def _file(config: str) -> Path:
    """Return the file of a config that Hydra calls ``group/name``."""
    places = [str(builtin_folder()), *folders.user_folders()]
    candidates = [Path(folder) / f"{config}.yaml" for folder in places]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def _broken_file(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is not None and Path(mark.name).is_file():
        return yaml_problem(Path(mark.name), error)
    # Some files are read without their name: parse all, and prefer the one that fails in the same way.
    problems = []
    for folder in [*folders.user_folders(), str(builtin_folder())]:
        for path in folders.files(folder):
            try:
                read_document(path, "")
            except yaml.YAMLError as own:
                if str(own) == str(error):
                    return yaml_problem(path, own)
                problems.append(yaml_problem(path, own))
    return problems[0] if problems else Problem(f"malformed YAML: {error}", "a config file", fix="check them all")
