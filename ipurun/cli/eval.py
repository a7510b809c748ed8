"""`ipurun eval`: the metrics of a run's weights on a split."""

from __future__ import annotations

from typing import List, Optional, Tuple

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError

__all__ = ["run", "run_folder_of", "text"]


_USAGE = """\
usage: ipurun eval RUN_FOLDER [key=value ...] [flags]

Loads the config and the newest checkpoint of a run and computes its loss and metrics on the test split where the data
has one, else on the eval split. A last partial batch is padded, and the padding is left out of every number.

flags
  --split NAME        another split: train, eval or test
  --checkpoint FILE   another checkpoint of the run
  --best              the best checkpoint instead of the newest
  --quiet --json --debug

examples
  ipurun eval runs/mnist/2024-05-01_12-30-00
  ipurun eval runs/mnist/2024-05-01_12-30-00 data.root=/data/mnist --split test --best
"""


def run(argv: List[str]) -> int:
    """Evaluate the run that the command line names."""
    flags, rest = split(argv, switches=("--best",), with_value=("--split", "--checkpoint"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    path, words = run_folder_of(rest, "eval")
    with only_json(flags.json):
        from ipurun.interface import evaluate

        result = evaluate(
            path,
            text(flags.values.get("split")),
            text(flags.values.get("checkpoint")),
            "best" in flags.values,
            words,
            quiet=flags.quiet or flags.json,
        )
    if flags.json:
        print_json(result.to_dict())
    else:
        print(result)
    return 0


def run_folder_of(words: List[str], command: str) -> Tuple[str, List[str]]:
    """Return the run folder of a command line, and the other words.

    Raises:
        ConfigError: There is none.
    """
    for position, word in enumerate(words):
        if "=" not in word and not word.startswith(("-", "~")):
            return word, words[:position] + words[position + 1 :]
    raise ConfigError(
        f"`{command}` needs the folder of a run",
        "command line",
        seen=" ".join(words),
        fix=f"ipurun {command} runs/NAME/TIME",
    )


def text(value: object) -> Optional[str]:
    """Return the value of a flag, None where the flag was not given."""
    return None if value is None else str(value)
