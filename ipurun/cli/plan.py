"""`ipurun plan`: show everything that would happen, without doing it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

from ipurun.cli.common import Flags, only_json, print_json, split
from ipurun.errors import ConfigError, visible

if TYPE_CHECKING:
    from ipurun.interface import PlanReport

__all__ = ["EXIT_DOES_NOT_FIT", "run"]

EXIT_DOES_NOT_FIT = 3

_USAGE = """\
usage: ipurun plan +recipe=NAME [key=value ...] [flags]

Shows the devices, the batch equation, the steps, what is rounded or dropped, and the PopTorch calls of a config; then
an estimate of memory and speed on IPUs, from a trace of the model, which is kept in ipurun's cache folder for the next
plan. Nothing else is written, and nothing is compiled. With -m it shows every point of a
sweep. The exit code is 3 if a config is estimated not to fit.

flags
  --inference     also show memory and speed of evaluation and prediction in full
  --explain       list what the estimate assumes
  --solve         find split, micro-batch, accumulation and replication for `devices` and the global batch
  --solve=FILE    the same, and write the config to a YAML file
  --html FILE     write the estimate as one self-contained page
  --calibrate RUN fit the machine constants to a run of this config on IPUs
  --quiet         one line per plan
  --json          one JSON document on standard output (a list with -m)
  --debug         show tracebacks

examples
  ipurun plan +recipe=mnist devices=8
  ipurun plan +recipe=gpt model=gpt2_medium devices=16 global_batch_size=1024 precision=16 --solve
  ipurun plan +recipe=mnist devices=8 device_iterations=32 --json
"""


def run(argv: List[str]) -> int:
    """Show the plan of every point of the command line."""
    argv, solve_file = _take_solve(argv)
    flags, rest = split(argv, switches=("--explain", "--inference", "--solve"), with_value=("--html", "--calibrate"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    with only_json(flags.json):
        from ipurun.config.argv import parse_argv
        from ipurun.interface import plan_words
        from ipurun.log.format import columns
        from ipurun.log.style import draws_blocks, has_colour, is_drawn_on, paint_plan

        calibrate = flags.values.get("calibrate")
        reports = plan_words(rest, "solve" in flags.values, None if calibrate is None else str(calibrate))
        _write_files(reports, flags, solve_file)
    if flags.json:
        documents = [report.to_dict() for report in reports]
        print_json(documents if parse_argv(rest).multirun else documents[0])
    else:
        texts = [report.text("explain" in flags.values, "inference" in flags.values, flags.quiet) for report in reports]
        texts += _sweep_lines(reports) if parse_argv(rest).multirun else []
        text = visible(("\n" if flags.quiet else "\n\n").join(texts))
        if is_drawn_on(sys.stdout) and not flags.quiet:
            text = paint_plan(text, columns(), draws_blocks(sys.stdout), has_colour(sys.stdout))
        print(text)
    return EXIT_DOES_NOT_FIT if any(report.fits is False for report in reports) else 0


def _sweep_lines(reports: List[PlanReport]) -> List[str]:
    """Return how many points a sweep has, and how many programs are compiled for them."""
    from ipurun.log.format import plural

    found = {report.program: report for report in reports}
    cached = [report for report in found.values() if report.cache is not None and report.cache.training == "hit"]
    evaluates = any(report.plan.evaluation is not None for report in reports)
    modes = "for training and for inference" if evaluates else "for training"
    text = f"sweep: {plural(len(reports), 'point')}, {plural(len(found), 'program')} to compile {modes}"
    return [text + (f", {len(cached)} of them cached" if cached else "")]


def _take_solve(argv: List[str]) -> Tuple[List[str], Optional[str]]:
    """Split ``--solve=FILE`` into ``--solve`` and the file."""
    named = [word for word in argv if word.startswith("--solve=")]
    if not named:
        return argv, None
    kept = ["--solve" if word.startswith("--solve=") else word for word in argv]
    return kept, named[-1].partition("=")[2]


def _write_files(reports: List[PlanReport], flags: Flags, solve_file: Optional[str]) -> None:
    page = flags.values.get("html")
    if (page or solve_file) and len(reports) > 1:
        raise ConfigError("a file is written for one plan", seen=f"{len(reports)} points", fix="leave -m out")
    if page:
        _write(str(page), reports[0].html(), "--html")
    if solve_file and reports[0].solutions:
        _write(solve_file, reports[0].solution_yaml(), "--solve")


def _write(path: str, text: str, flag: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`{flag}` cannot write its file",
            seen=f"{path}: {error.strerror}",
            fix=f"{flag}=FILE in a folder that exists",
        ) from error
