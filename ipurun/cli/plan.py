"""`ipurun plan`: everything that would happen, and nothing that happens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ipurun.cli.common import Flags, only_json, print_json, split
from ipurun.errors import ConfigError, Problem

if TYPE_CHECKING:
    from ipurun.config.compose import Points
    from ipurun.estimate.advice import PlanEstimate
    from ipurun.estimate.search import Solution
    from ipurun.planning.artifacts import CacheState
    from ipurun.runs.prepare import PreparedRun

__all__ = ["EXIT_DOES_NOT_FIT", "run"]

EXIT_DOES_NOT_FIT = 3

_USAGE = """\
usage: ipurun plan +recipe=NAME [key=value ...] [flags]

Shows the devices, the batch equation, the steps, what is rounded or dropped, and the PopTorch calls that a config
stands for; then an estimate of memory and speed on IPUs, from a trace of the model: nothing is compiled. Writes
nothing. With -m it shows every point of a sweep. The exit code is 3 where a config is estimated not to fit.

flags
  --inference     show the memory and the speed of evaluation and prediction in full, too
  --explain       list what the estimate takes for granted
  --solve         find split, micro-batch, accumulation and replication for `devices` and the global batch
  --solve=FILE    the same, and write the config to a YAML file
  --html FILE     write the estimate as one self-contained page
  --calibrate RUN machine constants with which the estimate agrees with a run of this config on IPUs
  --quiet         one line a plan
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
        from ipurun.config.compose import points

        found = points(rest, "plan")
        shown = [_look(prepared, flags) for prepared in _prepared(found)]
        _write_files(shown, flags, solve_file, rest)
    if flags.json:
        documents = [_document(item) for item in shown]
        print_json(documents if found.multirun else documents[0])
    else:
        for number, item in enumerate(shown):
            if number and not flags.quiet:
                print()
            print("\n".join(_lines(item, flags)))
    return EXIT_DOES_NOT_FIT if any(item.does_not_fit for item in shown) else 0


def _prepared(found: Points) -> List[PreparedRun]:
    if found.multirun:
        from ipurun.sweep.check import planned

        return planned(found.points)
    from ipurun.inspect.facts import Purpose
    from ipurun.runs.prepare import prepare

    return [prepare(found.points[0], Purpose.PLAN)]


class _Shown:
    """One plan with its estimate, or with the reason why there is none."""

    def __init__(self, prepared: PreparedRun) -> None:
        self.prepared = prepared
        self.outlook: Optional[PlanEstimate] = None
        self.cache: CacheState  # known whenever there is an estimate
        self.obstacle: Optional[Problem] = None
        self.solutions: Optional[List[Solution]] = None
        self.constants: List[str] = []

    @property
    def does_not_fit(self) -> bool:
        """Whether the plan as it stands is estimated not to fit; a solution that fits takes its place."""
        from ipurun.estimate.types import Verdict

        if self.solutions is not None:
            return not self.solutions
        return self.outlook is not None and self.outlook.verdict is Verdict.DOES_NOT_FIT


def _take_solve(argv: List[str]) -> Tuple[List[str], Optional[str]]:
    """``--solve=FILE`` as ``--solve`` and the file."""
    named = [word for word in argv if word.startswith("--solve=")]
    if not named:
        return argv, None
    kept = ["--solve" if word.startswith("--solve=") else word for word in argv]
    return kept, named[-1].partition("=")[2]


def _look(prepared: PreparedRun, flags: Flags) -> _Shown:
    from ipurun.build.cached_executables import look_into_cache
    from ipurun.estimate.plan_estimate import calibrated_words, estimate_plan, solve

    shown = _Shown(prepared)
    config = prepared.point.config
    try:
        shown.outlook = estimate_plan(config, prepared.plan, prepared.subject)
        shown.cache = look_into_cache(config, prepared.plan, prepared.subject, prepared.engine)
    except ConfigError as error:
        if any(flags.values.get(name) for name in ("solve", "html", "calibrate")):
            raise
        shown.obstacle = error.problems[0]
    if flags.values.get("solve") and shown.outlook is not None:
        shown.solutions = solve(config, prepared.plan, shown.outlook)
    folder = flags.values.get("calibrate")
    if folder and shown.outlook is not None:
        shown.constants = calibrated_words(shown.outlook, Path(str(folder)))
    return shown


def _write_files(shown: List[_Shown], flags: Flags, solve_file: Optional[str], words: List[str]) -> None:
    page = flags.values.get("html")
    if (page or solve_file) and len(shown) > 1:
        raise ConfigError("a file is written for one plan", seen=f"{len(shown)} points", fix="leave -m out")
    item = shown[0]
    if page and item.outlook is not None:
        from ipurun.log.estimate_html import page_of

        _write(str(page), page_of(item.prepared.plan, item.outlook), "--html")
    if solve_file and item.solutions:
        from ipurun.log.estimate_text import solution_yaml

        _write(solve_file, solution_yaml(item.solutions[0], words), "--solve")


def _write(path: str, text: str, flag: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`{flag}` cannot write its file", seen=str(error), fix=f"{flag}=FILE in a folder that exists"
        ) from error


def _document(item: _Shown) -> Dict[str, Any]:
    from ipurun.log.estimate_text import estimate_dict, solution_dict
    from ipurun.log.plan_text import plan_dict

    document = plan_dict(item.prepared.plan)
    document["estimate"] = None if item.outlook is None else estimate_dict(item.outlook, item.cache)
    if item.obstacle is not None:
        document["no_estimate"] = item.obstacle.to_dict()
    if item.solutions is not None:
        document["solutions"] = [solution_dict(solution) for solution in item.solutions]
    if item.constants:
        document["calibrated"] = item.constants
    return document


def _lines(item: _Shown, flags: Flags) -> List[str]:
    from ipurun.log.estimate_text import estimate_lines, explain_lines, inference_lines, quiet_text, solution_lines
    from ipurun.log.format import batch_equation
    from ipurun.log.plan_text import plan_lines

    plan = item.prepared.plan
    if flags.quiet:
        estimate = "" if item.outlook is None else f"; {quiet_text(item.outlook)}"
        lines = [f"{plan.name}: {batch_equation(plan.training)}{estimate}"]
    else:
        lines = plan_lines(plan)
        if item.outlook is not None:
            lines += ["", *estimate_lines(item.outlook, item.cache)]
        elif item.obstacle is not None:
            lines += ["", *str(item.obstacle).replace("error: ", "no estimate: ", 1).splitlines()]
    if item.outlook is not None and flags.values.get("inference"):
        lines += inference_lines(item.outlook)
    if item.outlook is not None and flags.values.get("explain"):
        lines += explain_lines(item.outlook)
    if item.solutions is not None:
        lines += ["", *solution_lines(item.solutions)]
    if item.constants:
        lines += ["", "constants that agree with the run", *(f"  {word}" for word in item.constants)]
    return lines
