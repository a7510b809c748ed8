"""`ipurun bench`: measure how fast a config trains, and what limits it."""

from __future__ import annotations

import sys
from typing import List, Optional, Tuple

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError

__all__ = ["run"]

_USAGE = """\
usage: ipurun bench +recipe=NAME [key=value ...] [flags]

Trains for some seconds, without a run folder, and shows the throughput with its spread, what the device and the
data pipeline do alone, whether the run is host-bound or compute-bound, other numbers of device_iterations, and the
planner's estimate for IPUs. data=synthetic leaves the data set out. Later plans use what was measured of the data.

flags
  --seconds N     time for each measurement, after the warm-up (5)
  --ladder N,...  numbers of device_iterations to try beside the configured one (1,2,4,8)
  --quiet         only the result
  --json          one JSON document on standard output
  --debug         show tracebacks

examples
  ipurun bench +recipe=mnist
  ipurun bench +recipe=mnist data=synthetic devices=4 --ladder 1,16,64
"""


def run(argv: List[str]) -> int:
    """Measure the config of the command line."""
    flags, rest = split(argv, with_value=("--seconds", "--ladder"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    seconds = _seconds(flags.values.get("seconds"))
    ladder = _ladder(flags.values.get("ladder"))
    with only_json(flags.json):
        from ipurun.interface import bench_words
        from ipurun.runs.bench import bench_lines

        quiet = flags.quiet or flags.json
        report = bench_words(rest, seconds, ladder, _silent if quiet else _progress)
    if flags.json:
        print_json(report.to_dict())
    else:
        print("\n".join(bench_lines(report)))
    return 0


def _progress(text: str) -> None:
    print(f"measuring {text} ...", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    pass


def _seconds(text: object) -> float:
    if text is None:
        return 5.0
    try:
        seconds = float(str(text))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError("`--seconds` takes a number above 0", "command line", f"--seconds={text}", fix="--seconds=5")
    return seconds


def _ladder(text: object) -> Optional[Tuple[int, ...]]:
    if text is None:
        return None
    words = str(text).split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        what = "`--ladder` takes whole numbers above 0, separated by commas"
        raise ConfigError(what, "command line", f"--ladder={text}", fix="--ladder=1,4,16")
    return tuple(int(word) for word in words)
