"""Flags that Hydra's own main answers: ``--cfg``, ``--info``, ``--hydra-help`` and shell completion."""

from __future__ import annotations

import os
import sys
from typing import List, Optional, Sequence

import hydra
from omegaconf import DictConfig, OmegaConf

from ipurun.config import overrides
from ipurun.config.argv import CommandLine
from ipurun.config.completion import after_program
from ipurun.config.hydra_session import CONFIG_PATH, open_hydra, prepare_hydra
from ipurun.errors import ConfigError

__all__ = ["complete", "show_info"]


def show_info(command: str, line: CommandLine) -> int:
    """Show what `line.info_flags` ask about the composed config, and return the exit code."""
    flags = dict(zip(line.info_flags, line.info_flags[1:]))
    if flags.get("--cfg") == "job":
        _show_job(line, flags.get("--package"), "--resolve" in line.info_flags)
        return 0
    prepare_hydra(line)
    return _call_hydra(command, line.for_hydra())


def complete(argv: Sequence[str]) -> int:
    """Install shell completion (``-sc install=bash``), or answer a query about a composed config.

    Args:
        argv: The arguments after ``-sc``.
    """
    prepare_hydra(CommandLine())
    # Hydra does not have subcommands: it must see `ipurun optimizer.`, not `ipurun train optimizer.`.
    os.environ["COMP_LINE"] = f"ipurun{after_program(os.environ.get('COMP_LINE', ''))[1]}"
    return _call_hydra("", ["--shell-completion", *argv])


def _show_job(line: CommandLine, package: Optional[str], resolve: bool) -> None:
    # Hydra would also show a recipe's keys inside a group that the command line chose, which a run drops.
    with open_hydra(line) as session:
        parsed, _ = overrides.parse(line.overrides, session.groups, line.multirun, session.loader)
        for number, chosen in enumerate(overrides.spread(parsed)):
            composed = session.compose(chosen)
            if composed.config is None:
                raise ConfigError(composed.problems)
            shown = composed.config if package is None else OmegaConf.select(composed.config, package)
            if shown is None:
                raise ConfigError(f"the config has no `{package}`", "command line: --package")
            text = OmegaConf.to_yaml(shown, resolve=resolve) if OmegaConf.is_config(shown) else f"{shown}\n"
            print(("---\n" if number else "") + text, end="")


def _call_hydra(command: str, argv: List[str]) -> int:
    @hydra.main(config_path=CONFIG_PATH, config_name="train", version_base="1.3")
    def never_run(config: DictConfig) -> None:
        raise AssertionError("Hydra's main only answers flags")

    program, before = f"ipurun {command}".strip(), sys.argv
    sys.argv = [program, *argv]
    try:
        never_run()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0
