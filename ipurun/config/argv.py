"""The words of a command line that Hydra would read: its flags, and overrides such as ``devices=8``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from ipurun.config.keys import is_known, meant
from ipurun.errors import ConfigError, Problem

__all__ = ["Argv", "parse_argv"]

_MULTIRUN = ("-m", "--multirun")
_FLAGS_WITH_VALUE = {
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--cfg": "cfg",
    "-c": "cfg",
    "--package": "package",
    "-p": "package",
}
_CFG_KINDS = ("job", "hydra", "all")
_INFO = ("--info", "-i")
_INFO_KINDS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_SHELL_COMPLETION = ("--shell-completion", "-sc")
_PASSED_ON = ("--resolve", "--hydra-help")


@dataclass(frozen=True)
class Argv:
    """A command line, sorted.

    Args:
        overrides: ``key=value`` words in the order typed, ``recipe=x`` turned into ``+recipe=x``.
        multirun: Whether ``-m`` was there.
        inquiry: Flags that only ask Hydra something (``--cfg job --resolve``), as Hydra takes them.
        config_dir: A further folder of configs.
        config_name: Another primary config than ``train``.
    """

    overrides: Tuple[str, ...] = ()
    multirun: bool = False
    inquiry: Tuple[str, ...] = ()
    config_dir: Optional[str] = None
    config_name: str = "train"

    def for_hydra(self) -> List[str]:
        """The line as Hydra 1.3 wants it: flags first, since it refuses overrides on both sides of one."""
        flags = list(self.inquiry)
        if self.config_dir is not None:
            flags += ["--config-dir", self.config_dir]
        if self.config_name != "train":
            flags += ["--config-name", self.config_name]
        if self.multirun:
            flags.append("--multirun")
        return flags + list(self.overrides)


def parse_argv(argv: Sequence[str]) -> Argv:
    """Sort a command line into Hydra's flags and overrides.

    Raises:
        ConfigError: For a flag that neither ipurun nor Hydra has.
    """
    overrides: List[str] = []
    inquiry: List[str] = []
    values = {"config_name": "train"}
    problems: List[Problem] = []
    multirun = False
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        flag, has_value, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if flag in _MULTIRUN:
            multirun = True
        elif flag in _FLAGS_WITH_VALUE:
            name = _FLAGS_WITH_VALUE[flag]
            if not has_value and not waiting:
                problems.append(Problem(f"`{flag}` needs a value", "command line", fix=f"{flag} VALUE"))
                continue
            value = value if has_value else waiting.pop(0)
            if name == "cfg" and value not in _CFG_KINDS:
                where, known = f"command line: {flag} {value}", ", ".join(_CFG_KINDS)
                problems.append(Problem(f"`{flag}` does not know `{value}`", where, known=known, fix=f"{flag} job"))
            if name in ("cfg", "package"):
                inquiry += [f"--{name}", value]
            else:
                values[name] = value
        elif flag in _INFO:
            kind = value if has_value else (waiting.pop(0) if waiting and waiting[0] in _INFO_KINDS else "all")
            inquiry += ["--info", kind]
        elif flag in _SHELL_COMPLETION or flag in _PASSED_ON:
            inquiry.append(flag)
        elif word.startswith("-") and not re.match(r"-?\d", word):
            known = "--multirun (-m), --cfg, --resolve, --info, --config-dir, --quiet, --json, --debug, --help"
            key = flag.lstrip("-")
            close = (key,) if is_known(key) else meant(key).keys
            fix = f"{close[0]}={value or 'VALUE'}, without dashes" if close else ""
            problems.append(Problem(f"unknown flag `{word}`", "command line", known=known, fix=fix))
        else:
            overrides.append(_as_addition(word))
    if problems:
        raise ConfigError(problems)
    return Argv(tuple(overrides), multirun, tuple(inquiry), values.get("config_dir"), values["config_name"])


def _as_addition(word: str) -> str:
    # `recipe` stays out of the defaults list (Hydra cannot otherwise take `+recipe=`), so a plain
    # `recipe=mnist`, which is what people type, has to become an addition.
    return "+" + word if word.startswith("recipe=") else word
