"""`ipurun eval`: the metrics of a run's weights on a split."""

from __future__ import annotations

import sys
from typing import List, Optional

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError

__all__ = ["run", "run_folder_of"]


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
        from ipurun.log.console import console_for
        from ipurun.log.format import duration, metric, plural
        from ipurun.log.screen import make_screen
        from ipurun.runs.folder import RunFolder
        from ipurun.runs.reload import load_run, split_to_use
        from ipurun.training.evaluate import evaluate

        loaded = load_run(RunFolder.open(path), words, text(flags.values.get("checkpoint")), "best" in flags.values)
        name = split_to_use(loaded.run, text(flags.values.get("split")))
        screen = make_screen(sys.stdout, quiet=flags.quiet or flags.json)
        try:
            result = evaluate(loaded.run, console_for(loaded.run.plan, screen), name)
        finally:
            screen.close()
            loaded.run.close()
    assert result is not None  # nothing asks it to stop
    if flags.json:
        print_json(
            {
                "folder": str(loaded.folder),
                "checkpoint": str(loaded.checkpoint),
                "step": loaded.checkpoint.step,
                "split": result.split,
                "samples": result.samples,
                "metrics": result.metrics,
                "seconds": result.seconds,
            }
        )
        return 0
    values = "  ".join(f"{key} {metric(value)}" for key, value in result.metrics.items())
    where = f"step {loaded.checkpoint.step:,} on {result.split}"
    print(f"{where}: {values}  [{plural(result.samples, 'sample')}, {duration(result.seconds)}]")
    return 0


def run_folder_of(words: List[str], command: str) -> tuple:
    """The run folder at the head of a command line, and the words behind it.

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
    """A flag's value, None where the flag is not there."""
    return None if value is None else str(value)
