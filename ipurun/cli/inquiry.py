"""Hydra's own questions under a command: ``ipurun train +recipe=mnist --cfg job --resolve``."""

from __future__ import annotations

from typing import List, Optional

from ipurun.cli import flags
from ipurun.config.words import split_words
from ipurun.errors import ConfigError

__all__ = ["answer"]


def answer(command: str, argv: List[str]) -> Optional[int]:
    """Let Hydra answer, if the command line asks it something.

    Returns:
        The exit code, or None when it is an ordinary command line.

    Raises:
        ConfigError: The config has problems, or a flag misses the one it belongs to.
    """
    flagged = {word.partition("=")[0] for word in argv}
    if not flagged & {"--cfg", "-c", "--info", "-i", "--hydra-help"}:
        details = sorted(flagged & {"--resolve", "--package", "-p"})
        if details:
            raise ConfigError(f"`{details[0]}` goes with --cfg", "command line", fix="--cfg job --resolve")
        return None
    from ipurun.config import compose, native

    _, rest = flags.split(argv)
    words = split_words(rest)
    problems = [problem for point in compose.points(rest, command).points for problem in point.problems]
    if problems:
        raise ConfigError(problems)
    return native.inquire(command, words)
