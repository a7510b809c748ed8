"""Sort a command line into Hydra's flags and overrides such as ``devices=8``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from ipurun.config.keys import is_known, suggest
from ipurun.errors import ConfigError, Problem

__all__ = ["CommandLine", "parse_argv"]

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
class CommandLine:
    """A parsed command line.

    Args:
        overrides: ``key=value`` in the order typed, with ``recipe=x`` turned into ``+recipe=x``.
        multirun: Whether ``-m`` was given.
        info_flags: Flags that only show something about the config (``--cfg job --resolve``), as Hydra takes them.
        config_dir: An additional folder of configs.
        config_name: The primary config.
    """

    overrides: Tuple[str, ...] = ()
    multirun: bool = False
    info_flags: Tuple[str, ...] = ()
    config_dir: Optional[str] = None
    config_name: str = "train"

    def for_hydra(self) -> List[str]:
        """Return the line for Hydra 1.3: flags first, since it refuses overrides on both sides of one."""
        flags = list(self.info_flags)
        if self.config_dir is not None:
            flags += ["--config-dir", self.config_dir]
        if self.config_name != "train":
            flags += ["--config-name", self.config_name]
        if self.multirun:
            flags.append("--multirun")
        return flags + list(self.overrides)


def parse_argv(argv: Sequence[str]) -> CommandLine:
    """Parse a command line.

    Raises:
        ConfigError: For a flag that neither ipurun nor Hydra has.
    """
    overrides: List[str] = []
    info_flags: List[str] = []
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
                problems.append(Problem(f"`{flag}` cannot be `{value}`", where, known=known, fix=f"{flag} job"))
            if name in ("cfg", "package"):
                info_flags += [f"--{name}", value]
            else:
                values[name] = value
        elif flag in _INFO:
            kind = value if has_value else (waiting.pop(0) if waiting and waiting[0] in _INFO_KINDS else "all")
            info_flags += ["--info", kind]
        elif flag in _SHELL_COMPLETION or flag in _PASSED_ON:
            info_flags.append(flag)
        elif word.startswith("-") and not re.match(r"-?\d", word):
            known = "--multirun (-m), --cfg, --resolve, --info, --config-dir, --quiet, --json, --debug, --help"
            key = flag.lstrip("-")
            close = (key,) if is_known(key) else suggest(key).keys
            fix = f"{close[0]}={value or 'VALUE'}, without dashes" if close else ""
            problems.append(Problem(f"unknown flag `{word}`", "command line", known=known, fix=fix))
        elif word.startswith("hydra.mode="):  # Hydra's other way to write -m
            multirun = multirun or word.partition("=")[2].upper() == "MULTIRUN"
            overrides.append(word)
        else:
            # `recipe` is not in the defaults list (Hydra could not take `+recipe=` otherwise), so a plain
            # `recipe=mnist`, which is what people type, has to become an addition.
            overrides.append("+" + word if word.startswith("recipe=") else word)
    if problems:
        raise ConfigError(problems)
    return CommandLine(tuple(overrides), multirun, tuple(info_flags), values.get("config_dir"), values["config_name"])
