"""`ipurun eval`, `predict` and `export`: compute the metrics, write the outputs and write the weights of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Optional, Tuple

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError

__all__ = ["run_eval", "run_export", "run_predict"]

_EVAL_USAGE = """\
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

_PREDICT_USAGE = """\
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

_EXPORT_USAGE = """\
usage: ipurun export RUN_FOLDER [key=value ...] [flags]

Writes the weights of the newest checkpoint of a run as safetensors. Neither the data of the run nor an IPU is needed.

flags
  --out FILE.safetensors   for plain torch, with the names of the model; default: model.safetensors in the run folder
  --out FOLDER             for transformers: model.safetensors and config.json, with which from_pretrained works
  --checkpoint FILE        another checkpoint of the run
  --best                   the best checkpoint instead of the newest
  --half                   floating-point weights in float16
  --lightning              a checkpoint of Lightning instead, model.ckpt, for load_from_checkpoint
  --quiet --json --debug

examples
  ipurun export runs/mnist/2024-05-01_12-30-00
  ipurun export runs/gpt/2024-05-01_12-30-00 --best --out exported/
"""


def run_eval(argv: List[str]) -> int:
    """Evaluate the run that the command line names."""
    flags, rest = split(argv, switches=("--best",), with_value=("--split", "--checkpoint"))
    if flags.help:
        print(_EVAL_USAGE, end="")
        return 0
    path, words = _run_folder_of(rest, "eval")
    with only_json(flags.json):
        from ipurun.interface import evaluate

        result = evaluate(
            path,
            _text(flags.values.get("split")),
            _text(flags.values.get("checkpoint")),
            "best" in flags.values,
            words,
            quiet=flags.quiet or flags.json,
        )
    if flags.json:
        print_json(result.to_dict())
    else:
        from ipurun.log.screen import make_screen

        *matrices, line = str(result).splitlines()
        for text in matrices:
            print(text)
        make_screen(sys.stdout).result(line)
    return 0


def run_predict(argv: List[str]) -> int:
    """Predict with the run that the command line names."""
    flags, rest = split(argv, switches=("--best",), with_value=("--split", "--checkpoint", "--out", "--columns"))
    if flags.help:
        print(_PREDICT_USAGE, end="")
        return 0
    path, words = _run_folder_of(rest, "predict")
    with only_json(flags.json):
        from ipurun.interface import predict
        from ipurun.log.predictions import check_file, columns_of, describe, write_predictions
        from ipurun.log.screen import make_screen
        from ipurun.runs.folder import RunFolder

        RunFolder.open(path)
        given = _text(flags.values.get("out"))
        wanted = Path(path, "predictions.pt") if given is None else Path(given)
        check_file(wanted)
        columns = columns_of(wanted, _text(flags.values.get("columns")))
        quiet = flags.quiet or flags.json
        result = predict(
            path,
            _text(flags.values.get("split")),
            _text(flags.values.get("checkpoint")),
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


def run_export(argv: List[str]) -> int:
    """Export the run that the command line names."""
    flags, rest = split(argv, switches=("--best", "--half", "--lightning"), with_value=("--checkpoint", "--out"))
    if flags.help:
        print(_EXPORT_USAGE, end="")
        return 0
    path, words = _run_folder_of(rest, "export")
    with only_json(flags.json):
        from ipurun.interface import export

        result = export(
            path,
            _text(flags.values.get("out")),
            _text(flags.values.get("checkpoint")),
            "best" in flags.values,
            "half" in flags.values,
            words,
            quiet=flags.quiet or flags.json,
            lightning="lightning" in flags.values,
        )
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if flags.json:
        print_json(result.to_dict())
    else:
        print(result)
    return 0


def _run_folder_of(words: List[str], command: str) -> Tuple[str, List[str]]:
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


def _text(value: object) -> Optional[str]:
    """Return the value of a flag, None where the flag was not given."""
    return None if value is None else str(value)
