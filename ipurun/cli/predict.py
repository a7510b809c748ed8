"""`ipurun predict`: write the outputs of a run for every sample of a split."""

from __future__ import annotations

import sys
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

The ending of the file chooses the format:
  .pt .npy            the outputs as tensors; with --columns a mapping (.pt), an array with fields (.npy)
  .npz .jsonl .parquet   an array, a key or a list for each column (.parquet: pip install 'ipurun[parquet]')
  .csv                a header, and a column for each number: index, target, output_0, output_1, ...

flags
  --split NAME        another split: train, eval or test
  --checkpoint FILE   another checkpoint of the run
  --best              the best checkpoint instead of the newest
  --out FILE          default: predictions_<split>.pt in the run folder
  --columns NAMES     of index, input, target, output; default: index,target,output for tables, output for .pt and .npy
  --quiet --json --debug

examples
  ipurun predict runs/mnist/2024-05-01_12-30-00
  ipurun predict runs/mnist/2024-05-01_12-30-00 --split train --out outputs.csv
  ipurun predict runs/mnist/2024-05-01_12-30-00 --out all.npz --columns index,input,target,output
"""


def run(argv: List[str]) -> int:
    """Predict with the run that the command line names."""
    flags, rest = split(argv, switches=("--best",), with_value=("--split", "--checkpoint", "--out", "--columns"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    path, words = run_folder_of(rest, "predict")
    with only_json(flags.json):
        from ipurun.interface import predict
        from ipurun.log.predictions import check_file, columns_of, describe, write_predictions
        from ipurun.log.screen import make_screen
        from ipurun.runs.folder import RunFolder

        RunFolder.open(path)
        given = text(flags.values.get("out"))
        wanted = Path(path, "predictions.pt") if given is None else Path(given)
        check_file(wanted)
        columns = columns_of(wanted, text(flags.values.get("columns")))
        quiet = flags.quiet or flags.json
        result = predict(
            path,
            text(flags.values.get("split")),
            text(flags.values.get("checkpoint")),
            "best" in flags.values,
            words,
            quiet=quiet,
            columns=columns,
        )
        file = result.folder / f"predictions_{result.split}.pt" if given is None else wanted
        screen = make_screen(sys.stdout, quiet)
        screen.begin(f"writing {file}")
        try:
            write_predictions(file, result.columns, lambda done, total: screen.phase("", done / total))
        finally:
            screen.close()
    outputs = describe(result.outputs)
    if flags.json:
        document = {"folder": str(result.folder), "checkpoint": str(result.checkpoint), "step": result.step}
        document.update(split=result.split, file=str(file), outputs=outputs, left_out=result.left_out)
        print_json({**document, "columns": list(result.columns)})
    else:
        print(f"step {result.step:,} on {result.split}: {outputs} in {file}")
        if result.left_out:
            print(f"no rows for samples that could not be read: {', '.join(map(str, result.left_out))}")
    return 0
