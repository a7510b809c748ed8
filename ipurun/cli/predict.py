"""`ipurun predict`: what a run's weights say about every sample of a split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Optional

from ipurun.cli.common import only_json, print_json, split
from ipurun.cli.eval import run_folder_of, text

__all__ = ["run"]


_USAGE = """\
usage: ipurun predict RUN_FOLDER [key=value ...] [flags]

Loads the config and the newest checkpoint of a run and writes the model's outputs for the test split where the data has
one, else for the eval split: one row a sample, in the order of the data.

flags
  --split NAME        another split: train, eval or test
  --checkpoint FILE   another checkpoint of the run
  --best              the best checkpoint instead of the newest
  --out FILE          .pt (anything), .npy or .csv (one tensor); default: predictions_<split>.pt in the run folder
  --quiet --json --debug

examples
  ipurun predict runs/mnist/2024-05-01_12-30-00
  ipurun predict runs/mnist/2024-05-01_12-30-00 --split train --out outputs.npy
"""


def run(argv: List[str]) -> int:
    """Predict with the run that the command line names."""
    flags, rest = split(argv, switches=("--best",), with_value=("--split", "--checkpoint", "--out"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    path, words = run_folder_of(rest, "predict")
    with only_json(flags.json):
        from ipurun.log.console import console_for
        from ipurun.log.predictions import check_file, describe, write_predictions
        from ipurun.log.screen import make_screen
        from ipurun.runs.folder import RunFolder
        from ipurun.runs.reload import load_run, split_to_use
        from ipurun.training.evaluate import gathered, predict

        folder = RunFolder.open(path)
        given: Optional[str] = text(flags.values.get("out"))
        if given is not None:
            check_file(Path(given))
        loaded = load_run(folder, words, text(flags.values.get("checkpoint")), "best" in flags.values, "predict")
        name = split_to_use(loaded.run, text(flags.values.get("split")))
        file = Path(given) if given is not None else folder.path / f"predictions_{name}.pt"
        check_file(file)
        screen = make_screen(sys.stdout, quiet=flags.quiet or flags.json)
        try:
            outputs = gathered(predict(loaded.run, name, console_for(loaded.run.plan, screen)))
        finally:
            screen.close()
            loaded.run.close()
        write_predictions(file, outputs)
    if flags.json:
        document = {"folder": str(folder), "checkpoint": str(loaded.checkpoint), "step": loaded.checkpoint.step}
        print_json({**document, "split": name, "file": str(file), "outputs": describe(outputs)})
    else:
        print(f"step {loaded.checkpoint.step:,} on {name}: {describe(outputs)} in {file}")
    return 0
