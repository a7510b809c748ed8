"""What it means when Hydra cannot compose a config: its exceptions, told with the file that they are about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, Mapping, Sequence

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from ipurun.config import search
from ipurun.config.documents import NotText, display, read_document, yaml_problem
from ipurun.config.folders import builtin_folder
from ipurun.errors import Problem, listing

__all__ = ["NOT_COMPOSED", "explain"]

# ValueError: a defaults list that is none, or a file that is not UTF-8. RecursionError: files that include each other.
NOT_COMPOSED = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError)

_IN_FILE = re.compile(r"[Ii]n '?(?P<config>[\w./-]+)'?[:,]")
_NOTHING_TO_OVERRIDE = re.compile(r"Could not override '(?P<group>[^'@]+)")


def explain(error: BaseException, groups: Mapping[str, Sequence[str]]) -> List[Problem]:
    """The problems that an exception of `NOT_COMPOSED` stands for.

    Args:
        error: What Hydra raised.
        groups: Group name -> names of its files.
    """
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    for met in (error, cause):
        if isinstance(met, UnicodeDecodeError):
            return [_broken_file(NotText(met))]
        if isinstance(met, yaml.YAMLError):
            return [_broken_file(met)]
    if isinstance(error, RecursionError):
        what = "config files include each other without an end"
        return [Problem(what, "a defaults list", fix="take one of them out")]
    if isinstance(error, MissingConfigException):
        return [_missing(error, groups)]
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    detail = str(cause).splitlines()[0] if cause is not error and str(cause) else ""
    named = _IN_FILE.search(message)
    where = display(_file(named["config"])) if named is not None else "composing the config"
    nothing = _NOTHING_TO_OVERRIDE.search(message)
    if nothing is not None:
        group = nothing["group"]
        what = f"the defaults list overrides `{group}`, which "
        what += "nothing has chosen before" if group in groups else "is no config group"
        fix = f"write `- /{group}: NAME` without `override`" if group in groups else ""
        return [Problem(what, where, seen=detail, known="" if fix else listing(sorted(groups), most=40), fix=fix)]
    return [Problem(message, where, seen=detail)]


def _missing(error: MissingConfigException, groups: Mapping[str, Sequence[str]]) -> Problem:
    name = error.missing_cfg_file or str(error).splitlines()[0]
    group, _, option = str(name).rpartition("/")
    if not group:
        seen = f"no {option}.yaml in {', '.join([*search.user_folders(), 'the built-in configs'])}"
        return Problem(f"no config `{option}`", "command line: --config-name", seen, fix="--config-name train")
    where = _chosen_in(group, option) or "a defaults list"
    known = listing(groups.get(group, sorted(groups)), most=40)
    return Problem(f"no config `{option}` in group `{group}`", where, known=known)


def _chosen_in(group: str, option: str) -> str:
    """File and line of the user's that choose an option, since Hydra names the root of all configs."""
    chooses = re.compile(rf"^\s*-\s*(override\s+)?/?{re.escape(group)}\s*:\s*{re.escape(option)}\s*(#.*)?$")
    for folder in search.user_folders():
        for path in search.files(folder):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if chooses.match(line):
                    return f"{display(path)}:{number}"
    return ""


def _file(config: str) -> Path:
    """The file of a config that Hydra calls ``group/name``."""
    folders = [str(builtin_folder()), *search.user_folders()]
    candidates = [Path(folder) / f"{config}.yaml" for folder in folders]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def _broken_file(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is not None and Path(mark.name).is_file():
        return yaml_problem(Path(mark.name), error)
    # Some files are read without their name: parse the candidates until one fails, best in the same way.
    problems = []
    for folder in [*search.user_folders(), str(builtin_folder())]:
        for path in search.files(folder):
            try:
                read_document(path, "")
            except yaml.YAMLError as own:
                if str(own) == str(error):
                    return yaml_problem(path, own)
                problems.append(yaml_problem(path, own))
    return problems[0] if problems else Problem(f"malformed YAML: {error}", "a config file")
