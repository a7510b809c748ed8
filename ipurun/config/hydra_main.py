"""What Hydra's own main answers: ``--cfg``, ``--info``, ``--hydra-help`` and shell completion."""

from __future__ import annotations

import os
import re
import sys
from typing import Iterable, List, Optional, Sequence

import hydra
from omegaconf import DictConfig, OmegaConf

from ipurun.config import overrides
from ipurun.config.argv import Argv
from ipurun.config.hydra_session import CONFIG_PATH, opened, prepare_hydra
from ipurun.errors import ConfigError

__all__ = ["complete", "inquire"]

_COMPOSING = ("train", "plan", "validate", "eval", "predict")


def inquire(command: str, words: Argv) -> int:
    """Let Hydra answer a question about the composed config; `words.inquiry` says which."""
    asked = dict(zip(words.inquiry, words.inquiry[1:]))
    if asked.get("--cfg") == "job":
        _show_job(words, asked.get("--package"), "--resolve" in words.inquiry)
        return 0
    prepare_hydra(words)
    return _enter_hydra(command, words.for_hydra())


def complete(argv: Sequence[str], commands: Iterable[str]) -> int:
    """Install a completion script, or answer one (``-sc install=bash``, ``-sc query=bash``).

    Args:
        argv: The words after ``-sc``.
        commands: Argv that may come first.
    """
    prepare_hydra(Argv())
    if any(word.startswith("query=") for word in argv):
        line = os.environ.get("COMP_LINE", "")
        parts = re.match(r"\s*(\S+)\s+(\S*)(.*)", line, flags=re.DOTALL)
        if parts is None or not parts.group(3):
            typed = parts.group(2) if parts else ""
            print(" ".join(name for name in commands if name.startswith(typed)))
            return 0
        if parts.group(2) not in _COMPOSING:
            return 0
        # Hydra knows no subcommands: it must see `ipurun +recipe=m`, not `ipurun train +recipe=m`.
        os.environ["COMP_LINE"] = f"{parts.group(1)}{parts.group(3)}"
    return _enter_hydra("", ["--shell-completion", *argv])


def _show_job(words: Argv, package: Optional[str], resolve: bool) -> None:
    # Hydra's own answer would show a recipe's keys inside a group that the command line chose, which a run drops.
    with opened(words) as session:
        parsed, _ = overrides.parse(words.overrides, session.groups, words.multirun, session.loader)
        for number, chosen in enumerate(overrides.spread(parsed)):
            composed = session.compose(chosen)
            if composed.config is None:
                raise ConfigError(composed.problems)
            shown = composed.config if package is None else OmegaConf.select(composed.config, package)
            if shown is None:
                raise ConfigError(f"the config has no `{package}`", "command line: --package")
            text = OmegaConf.to_yaml(shown, resolve=resolve) if OmegaConf.is_config(shown) else f"{shown}\n"
            print(("---\n" if number else "") + text, end="")


def _enter_hydra(command: str, argv: List[str]) -> int:
    @hydra.main(config_path=CONFIG_PATH, config_name="train", version_base="1.3")
    def never_run(config: DictConfig) -> None:
        raise AssertionError("Hydra's main is entered for questions only")

    program, before = f"ipurun {command}".strip(), sys.argv
    sys.argv = [program, *argv]
    try:
        never_run()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0
