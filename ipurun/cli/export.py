"""`ipurun export`: write the weights of a run as safetensors."""

from __future__ import annotations

import sys
from typing import List

from ipurun.cli.common import only_json, print_json, split
from ipurun.cli.eval import run_folder_of, text

__all__ = ["run"]


_USAGE = """\
usage: ipurun export RUN_FOLDER [key=value ...] [flags]

Writes the weights of the newest checkpoint of a run as safetensors. Neither the data of the run nor an IPU is needed.

flags
  --out FILE.safetensors   for plain torch, with the names of the model; default: model.safetensors in the run folder
  --out FOLDER             for transformers: model.safetensors and config.json, with which from_pretrained works
  --checkpoint FILE        another checkpoint of the run
  --best                   the best checkpoint instead of the newest
  --half                   floating-point weights in float16
  --quiet --json --debug

examples
  ipurun export runs/mnist/2024-05-01_12-30-00
  ipurun export runs/gpt/2024-05-01_12-30-00 --best --out exported/
"""


def run(argv: List[str]) -> int:
    """Export the run that the command line names."""
    flags, rest = split(argv, switches=("--best", "--half"), with_value=("--checkpoint", "--out"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    path, words = run_folder_of(rest, "export")
    with only_json(flags.json):
        from ipurun.interface import export

        result = export(
            path,
            text(flags.values.get("out")),
            text(flags.values.get("checkpoint")),
            "best" in flags.values,
            "half" in flags.values,
            words,
            quiet=flags.quiet or flags.json,
        )
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if flags.json:
        print_json(result.to_dict())
    else:
        print(result)
    return 0
