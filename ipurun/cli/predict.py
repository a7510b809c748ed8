"""`ipurun predict`: write the outputs of a run for every sample of a split."""

from __future__ import annotations

from pathlib import Path
from typing import List

from ipurun.cli.common import only_json, print_json, split
from ipurun.cli.eval import run_folder_of, text

__all__ = ["run"]


_USAGE = """\
usage: ipurun predict RUN_FOLDER [key=value ...] [flags]

Loads the config and the newest checkpoint of a run and writes the model's outputs for the test split where the data has
one, else for the eval split: one row per sample, in the order of the data. With loader.on_error=skip, samples that
cannot be read have no row, and are listed.

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
        from ipurun.interface import predict
        from ipurun.log.predictions import check_file, describe, write_predictions
        from ipurun.runs.folder import RunFolder

        RunFolder.open(path)
        given = text(flags.values.get("out"))
        check_file(Path(path, "predictions.pt") if given is None else Path(given))
        result = predict(
            path,
            text(flags.values.get("split")),
            text(flags.values.get("checkpoint")),
            "best" in flags.values,
            words,
            quiet=flags.quiet or flags.json,
        )
        file = result.folder / f"predictions_{result.split}.pt" if given is None else Path(given)
        write_predictions(file, result.outputs)
    outputs = describe(result.outputs)
    if flags.json:
        document = {"folder": str(result.folder), "checkpoint": str(result.checkpoint), "step": result.step}
        document.update(split=result.split, file=str(file), outputs=outputs, left_out=result.left_out)
        print_json(document)
    else:
        print(f"step {result.step:,} on {result.split}: {outputs} in {file}")
        if result.left_out:
            print(f"no rows for samples that could not be read: {', '.join(map(str, result.left_out))}")
    return 0
