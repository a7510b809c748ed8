"""Hydra's own questions under a command: ``ipurun train +recipe=mnist --cfg job --resolve``."""

from __future__ import annotations

from typing import List, Optional

from ipurun.cli import flags
from ipurun.config.words import split_words

__all__ = ["answer"]


def answer(command: str, argv: List[str]) -> Optional[int]:
    """Let Hydra answer, if the command line asks it something.

    Returns:
        The exit code, or None when it is an ordinary command line.
    """
    asking = {"--cfg", "-c", "--info", "-i", "--hydra-help"}
    if not any(word.partition("=")[0] in asking for word in argv):
        return None
    from ipurun.config import compose, native
    from ipurun.errors import ConfigError

    _, rest = flags.split(argv)
    words = split_words(rest)
    problems = [problem for point in compose.points(rest, command).points for problem in point.problems]
    if problems:
        raise ConfigError(problems)
    return native.inquire(command, words)
