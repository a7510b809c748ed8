"""The Python API that `import ipurun` offers; the commands are written on it.

Calls run one after the other, also from several threads: Hydra, the capture of models and torch's random state belong
to the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ipurun.errors import ConfigError, Interrupted, IpurunError, Problem
from ipurun.training.callbacks import Callback
from ipurun.training.events import Summary

if TYPE_CHECKING:
    from ipurun.build.cached_executables import Prospect
    from ipurun.config.compose import Point
    from ipurun.estimate.advice import PlanEstimate
    from ipurun.estimate.search import Solution
    from ipurun.planning.artifacts import CacheState
    from ipurun.planning.plan import Plan
    from ipurun.runs.bench import BenchReport
    from ipurun.runs.compile import CompiledJob
    from ipurun.runs.prepare import PreparedRun
    from ipurun.runs.reload import LoadedModel, LoadedRun

__all__ = [
    "Callback",
    "Evaluated",
    "Exported",
    "PlanReport",
    "Predicted",
    "Result",
    "bench_words",
    "check_words",
    "compile_words",
    "evaluate",
    "export",
    "explain_cache_words",
    "load",
    "plan",
    "plan_words",
    "predict",
    "train",
    "train_words",
    "validate",
]

PathLike = Union[str, "os.PathLike[str]"]
Recipe = Union[None, str, Sequence[str]]


@dataclass(frozen=True)
class Result(Summary):
    """How a run ended, as `Summary` says, with its name, its folder and the exit code of the command."""

    name: str = ""
    folder: Path = Path()
    exit_code: int = 0

    def load(self, best: bool = False) -> LoadedModel:
        """Load the model with the weights of the newest or the best checkpoint."""
        return load(self.folder, best=best)

    def to_dict(self) -> Dict[str, object]:
        """Return the document of `ipurun train --json`."""
        document = {**super().to_dict(), "folder": str(self.folder)}
        return {key: document[key] for key in ("name", "folder", *document)}


@dataclass(frozen=True)
class PlanReport:
    """A plan with its estimate; `str` gives what `ipurun plan` prints.

    Args:
        plan: Devices, batch, steps, notes and the calls of PopTorch.
        estimate: Memory and speed on IPUs; None where there is none.
        no_estimate: Why there is none.
        solutions: What `solve` found, the quickest first; None where it was not asked for.
        calibrated: Overrides of machine constants that agree with the run that `calibrate` names.
        cache: Whether the executable is in the cache; known where there is an estimate.
        words: The command line of the plan.
        unsolved: Why `solve` found nothing, if what it tried was refused.
        program: Tells its executables from those of other points of a sweep; empty without one.
    """

    plan: Plan
    estimate: Optional[PlanEstimate]
    no_estimate: Optional[Problem]
    solutions: Optional[List[Solution]]
    calibrated: List[str]
    cache: Optional[CacheState]
    words: Sequence[str]
    unsolved: str = ""
    program: str = ""

    @property
    def fits(self) -> Optional[bool]:
        """Whether the plan, or a solution where one was asked for, is estimated to fit; None without an estimate."""
        from ipurun.estimate.types import Verdict

        if self.solutions is not None:
            return bool(self.solutions)
        return None if self.estimate is None else self.estimate.verdict is not Verdict.DOES_NOT_FIT

    def __str__(self) -> str:
        return self.text()

    def text(self, explain: bool = False, inference: bool = False, quiet: bool = False) -> str:
        """Return the report as text.

        Args:
            explain: List what the estimate assumes.
            inference: Show memory and speed of evaluation and prediction in full.
            quiet: One line for plan and estimate.
        """
        from ipurun.log.estimate_text import estimate_lines, explain_lines, inference_lines, quiet_text, solution_lines
        from ipurun.log.format import batch_equation
        from ipurun.log.plan_text import plan_lines

        if quiet:
            estimate = "" if self.estimate is None else f"; {quiet_text(self.estimate)}"
            lines = [f"{self.plan.name}: {batch_equation(self.plan.training)}{estimate}"]
        else:
            lines = plan_lines(self.plan)
            if self.estimate is not None and self.cache is not None:
                lines += ["", *estimate_lines(self.estimate, self.cache)]
            else:
                lines += ["", *str(self.no_estimate).replace("error: ", "no estimate: ", 1).splitlines()]
        if self.estimate is not None and inference:
            lines += inference_lines(self.estimate)
        if self.estimate is not None and explain:
            lines += explain_lines(self.estimate)
        if self.solutions is not None:
            lines += ["", *solution_lines(self.solutions, self.unsolved)]
        if self.calibrated:
            lines += ["", "constants that agree with the run", *(f"  {word}" for word in self.calibrated)]
        return "\n".join(lines)

    def to_dict(self) -> Dict[str, Any]:
        """Return the document of `ipurun plan --json`."""
        from ipurun.log.estimate_text import estimate_dict, solution_dict
        from ipurun.log.plan_text import plan_dict

        document = plan_dict(self.plan)
        document["estimate"] = None
        if self.estimate is not None and self.cache is not None:
            document["estimate"] = estimate_dict(self.estimate, self.cache)
        if self.no_estimate is not None:
            document["no_estimate"] = self.no_estimate.to_dict()
        if self.solutions is not None:
            document["solutions"] = [solution_dict(solution) for solution in self.solutions]
        if self.calibrated:
            document["calibrated"] = self.calibrated
        if self.program:
            document["program"] = self.program
        return document

    def html(self) -> str:
        """Return the estimate as one self-contained page.

        Raises:
            ConfigError: There is no estimate.
        """
        from ipurun.pages.plan import plan_page

        if self.estimate is None:
            raise ConfigError(self.no_estimate or "there is no estimate")
        return plan_page(self.plan, self.estimate, self.words)

    def solution_yaml(self) -> str:
        """Return the config file of the best solution, empty where there is none."""
        from ipurun.log.estimate_text import solution_yaml

        return solution_yaml(self.solutions[0], self.words) if self.solutions else ""


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a run's weights on a split; `str` gives what `ipurun eval` prints.

    `left_out` has the indices of samples that could not be read (`loader.on_error=skip`).
    """

    folder: Path
    checkpoint: Path
    step: int
    split: str
    samples: int
    metrics: Dict[str, float]
    seconds: float
    left_out: Tuple[int, ...] = ()
    matrices: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def __str__(self) -> str:
        from ipurun.log.format import duration, matrix_lines, metric, plural

        values = "  ".join(f"{key} {metric(value)}" for key, value in self.metrics.items())
        left_out = f", {len(self.left_out):,} left out" if self.left_out else ""
        how = f"[{plural(self.samples, 'sample')}{left_out}, {duration(self.seconds)}]"
        tables = [line for name, matrix in self.matrices.items() for line in matrix_lines(name, matrix)]
        return "\n".join([*tables, f"step {self.step:,} on {self.split}: {values}  {how}"])

    def to_dict(self) -> Dict[str, Any]:
        """Return the document of `ipurun eval --json`."""
        return {**vars(self), "folder": str(self.folder), "checkpoint": str(self.checkpoint)}


@dataclass(frozen=True)
class Predicted:
    """Outputs of a run's weights for a split: `outputs` has one row per sample, in the order of the data.

    `columns` has what was asked for by name, in this order: ``index``, ``input``, ``target``, ``output``.
    `left_out` has the indices of samples that could not be read (`loader.on_error=skip`): they have no row.
    """

    folder: Path
    checkpoint: Path
    step: int
    split: str
    outputs: Any
    left_out: Tuple[int, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """The weights that were written; `str` gives what `ipurun export` prints.

    Args:
        folder: The run folder.
        checkpoint: The checkpoint that the weights are from.
        step: Number of weight updates that produced them.
        files: The weights, and the config of transformers where a folder was asked for.
        tensors: Number of tensors.
        parameters: Number of values.
        size: Bytes of the weights.
        warnings: What looks wrong about them.
    """

    folder: Path
    checkpoint: Path
    step: int
    files: Tuple[Path, ...]
    tensors: int
    parameters: int
    size: int
    warnings: Tuple[str, ...]

    def __str__(self) -> str:
        from ipurun.log.format import plural, size_text

        what = f"{plural(self.tensors, 'tensor')}, {plural(self.parameters, 'value')}, {size_text(self.size)}"
        return f"step {self.step:,}: {what} in {', '.join(map(str, self.files))}"

    def to_dict(self) -> Dict[str, Any]:
        """Return the document of `ipurun export --json`."""
        return {
            **vars(self),
            "folder": str(self.folder),
            "checkpoint": str(self.checkpoint),
            "files": [str(file) for file in self.files],
            "warnings": list(self.warnings),
        }


def train(
    recipe: Recipe = None,
    *,
    overrides: Sequence[str] = (),
    config_dir: Optional[PathLike] = None,
    quiet: bool = False,
    **keys: Any,
) -> Result:
    """Train a model in this process, as `ipurun train` does.

    Ctrl-C saves and returns a result whose status is ``interrupted``.

    Args:
        recipe: Name of a recipe, or several.
        overrides: Words as on the command line: ``["devices=8", "~logger"]``.
        config_dir: A further folder of configs.
        quiet: Show nothing on standard output.
        **keys: Config keys: ``devices=8``, ``optimizer={"lr": 0.1}``, ``resume="runs/mnist/..."``.

    Raises:
        ConfigError: The config is wrong; nothing was run and nothing was written.
        RunError: The run failed.
    """
    return train_words(_words(recipe, overrides, config_dir, keys), quiet)


def plan(
    recipe: Recipe = None,
    *,
    overrides: Sequence[str] = (),
    config_dir: Optional[PathLike] = None,
    solve: bool = False,
    calibrate: Optional[PathLike] = None,
    **keys: Any,
) -> PlanReport:
    """Plan a run and estimate its memory and speed, as `ipurun plan` does; nothing is run or written.

    Args:
        recipe: As for `train`, as are `overrides`, `config_dir` and `keys`.
        overrides: Words as on the command line.
        config_dir: A further folder of configs.
        solve: Find split, micro-batch, accumulation and replication for `devices` and the global batch.
        calibrate: Folder of a run of this config on IPUs, to fit the constants of the machine to.
        **keys: Config keys.

    Raises:
        ConfigError: The config is wrong.
    """
    words = _words(recipe, overrides, config_dir, keys)
    _refuse_sweep(words)
    return plan_words(words, solve, calibrate)[0]


def validate(
    recipe: Recipe = None,
    *,
    overrides: Sequence[str] = (),
    config_dir: Optional[PathLike] = None,
    **keys: Any,
) -> List[Problem]:
    """Return what is wrong with a config, as far as that can be found without running it; arguments as for `train`."""
    try:
        checked = check_words(_words(recipe, overrides, config_dir, keys))
    except ConfigError as error:
        return list(error.problems)
    return [problem for _, problems in checked for problem in problems]


def load(
    run: PathLike, checkpoint: Optional[PathLike] = None, best: bool = False, overrides: Sequence[str] = ()
) -> LoadedModel:
    """Load the model of a run with its weights, on the CPU and in evaluation mode; its data is not needed.

    Args:
        run: The run folder.
        checkpoint: One of its checkpoints; None: the newest one.
        best: Take the best checkpoint instead of the newest.
        overrides: Changes to the config of the run, as on the command line.

    Raises:
        ConfigError: Not a run folder, a wrong override, or a missing or mismatched checkpoint.
        RunError: The checkpoint is damaged.
    """
    with _one_call(overrides, run):
        from ipurun.runs.folder import RunFolder
        from ipurun.runs.reload import load_model

        return load_model(RunFolder.open(os.fspath(run)), _listed(overrides), _text(checkpoint), best)


def evaluate(
    run: PathLike,
    split: Optional[str] = None,
    checkpoint: Optional[PathLike] = None,
    best: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Evaluated:
    """Compute the loss and the metrics of a run's weights, as `ipurun eval` does.

    Args:
        run: As for `load`, as are `checkpoint`, `best` and `overrides`.
        split: ``train``, ``eval`` or ``test``; None: test where the data has it, else eval.
        checkpoint: One of its checkpoints.
        best: Take the best checkpoint.
        overrides: Changes to the config of the run.
        quiet: Show nothing on standard output.
    """
    with _reloaded("eval", run, checkpoint, best, overrides, split, quiet) as (loaded, name, console):
        from ipurun.training.evaluate import evaluate as evaluate_run

        found = evaluate_run(loaded.run, console, name)
    assert found is not None  # only an interrupt stops it, and that is an exception here
    where = (loaded.folder.path, loaded.checkpoint.path, loaded.checkpoint.step)
    details = (found.seconds, found.left_out, found.matrices)
    return Evaluated(*where, found.split, found.samples, found.metrics, *details)


def predict(
    run: PathLike,
    split: Optional[str] = None,
    checkpoint: Optional[PathLike] = None,
    best: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    columns: Sequence[str] = ("output",),
) -> Predicted:
    """Compute the outputs of a run's weights for every sample of a split; arguments as for `evaluate`.

    Args:
        run: As for `load`, as are `checkpoint`, `best` and `overrides`.
        split: As for `evaluate`.
        checkpoint: One of its checkpoints.
        best: Take the best checkpoint.
        overrides: Changes to the config of the run.
        quiet: Show nothing on standard output.
        columns: What else to return: ``index``, ``input`` and ``target`` of each sample.
    """
    with _reloaded("predict", run, checkpoint, best, overrides, split, quiet) as (loaded, name, console):
        from ipurun.training.evaluate import gathered
        from ipurun.training.evaluate import predict as predict_run

        wanted = tuple(dict.fromkeys(["index", *columns, "output"]))
        total = loaded.run.eval_loaders[name].samples

        def shown() -> Iterator[Any]:
            for part in predict_run(loaded.run, name, console, wanted):
                console.show_progress("predicting", int(part["index"][-1]) + 1, total, "sample")
                yield part

        found = gathered(shown()) or {"output": None}
        left_out = loaded.run.eval_loaders[name].left_out
    where = (loaded.folder.path, loaded.checkpoint.path, loaded.checkpoint.step)
    kept = {column: value for column, value in found.items() if column in columns}
    return Predicted(*where, name, found["output"], left_out, kept)


def export(
    run: PathLike,
    out: Optional[PathLike] = None,
    checkpoint: Optional[PathLike] = None,
    best: bool = False,
    half: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    lightning: bool = False,
) -> Exported:
    """Write the weights of a run as safetensors, as `ipurun export` does; neither data nor devices are needed.

    Args:
        run: As for `load`, as are `checkpoint`, `best` and `overrides`.
        out: A file that ends in ``.safetensors``, or a folder that transformers loads; None: in the run folder.
        checkpoint: One of its checkpoints.
        best: Take the best checkpoint.
        half: Write floating-point weights in float16.
        overrides: Changes to the config of the run.
        quiet: Show nothing on standard output.
        lightning: Write a checkpoint that a LightningModule loads, a ``.ckpt`` file, in place of safetensors.
    """
    with _one_call(overrides):
        from ipurun.log.screen import make_screen
        from ipurun.runs.export import export_run
        from ipurun.runs.folder import RunFolder

        folder = RunFolder.open(os.fspath(run))
        screen = make_screen(sys.stdout, quiet)
        screen.begin(f"exporting {folder}")
        try:
            done = export_run(
                folder,
                _listed(overrides),
                _text(out),
                _text(checkpoint),
                best,
                half,
                lambda written, total: screen.phase("", written / max(total, 1)),
                lightning,
            )
        finally:
            screen.close()
    return Exported(folder.path, **vars(done))


def train_words(
    words: Sequence[str],
    quiet: bool = False,
    set_environment: Optional[Callable[[Plan], None]] = None,
    began: Optional[float] = None,
) -> Result:
    """Train what the words of a command line describe.

    Args:
        words: Overrides and Hydra's flags.
        quiet: Show nothing on standard output.
        set_environment: Sets the variables that a plan needs before the engine is imported; None: those of the CPU
            engine are set during the run, and a config that needs others is refused.
        began: When the time of `max_minutes` began, by `time.monotonic`; None: now.
    """
    began = time.monotonic() if began is None else began
    with _one_call(words):
        point = _point_to_train(words)
        if point.config.distributed.kind != "none":  # torch reads it when it is imported, which comes next
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost connections are reported by ipurun
        from ipurun.log.screen import make_screen
        from ipurun.runs.job import run_job
        from ipurun.runs.prepare import prepare_job, resumed_folder

        interrupt_code = point.config.interrupt_exit_code
        with _exit_code_after_interrupt(interrupt_code):
            prepared = prepare_job(point)
            with _environment_kept(prepared.plan), _threads_kept():
                (set_environment or _set_environment)(prepared.plan)
                screen = make_screen(sys.stdout, quiet)
                folder = resumed_folder(point)
                if folder is None and point.config.resume:
                    screen.line(
                        "note: resume=auto finds no unfinished run with a checkpoint: starting from the beginning"
                    )
                try:
                    if prepared.plan.instances.command:
                        from ipurun.runs.launch import launch_job, train_program  # deferred: few runs need them

                        place, summary = launch_job(prepared, train_program(prepared, words, quiet), screen)
                    else:
                        finished = run_job(prepared, screen, folder, began)
                        place, summary = finished.folder, finished.summary
                finally:
                    screen.close()
    code = interrupt_code if summary.status == "interrupted" else 0
    return Result(**vars(summary), name=prepared.plan.name, folder=place.path, exit_code=code)


@contextlib.contextmanager
def _exit_code_after_interrupt(code: int) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(code) from error


def plan_words(words: Sequence[str], solve: bool = False, calibrate: Optional[PathLike] = None) -> List[PlanReport]:
    """Plan every point that the words of a command line describe, several with ``-m``; else as `plan`."""
    with _one_call(words):
        from ipurun.config.compose import points

        found = points(words, "plan")
        if found.multirun:
            from ipurun.sweep.check import planned, program_of

            prepared = planned(found.points)
            reports = [_report(item, words, solve, calibrate) for item in prepared]
            return [replace(report, program=program_of(item.point)) for report, item in zip(reports, prepared)]
        from ipurun.inspect.facts import Purpose
        from ipurun.runs.prepare import prepare

        return [_report(prepare(found.points[0], Purpose.PLAN), words, solve, calibrate)]


def plan_of_run(run: PathLike) -> PlanReport:
    """Plan the config of a stored run, as `plan` does for a recipe; its model's code is needed.

    Args:
        run: The run folder.
    """
    with _one_call((), run):
        from ipurun.inspect.facts import Purpose
        from ipurun.runs.folder import RunFolder
        from ipurun.runs.prepare import prepare
        from ipurun.runs.reload import stored_point

        point = stored_point(RunFolder.open(os.fspath(run)), [], "plan")
        return _report(prepare(point, Purpose.PLAN), (), False, None)


def compile_words(
    words: Sequence[str], ipu_version: int = 2, export: Optional[PathLike] = None, quiet: bool = False
) -> CompiledJob:
    """Compile what the words of a command line describe for training and inference, without a device.

    Args:
        words: Overrides and Hydra's flags.
        ipu_version: The kind of IPU to compile for: 2 for Mk2, 21 for Mk2 with FP8, 1 for Mk1.
        export: A file to write instead of the cache.
        quiet: Show nothing on standard output.
    """
    with _one_call(words):
        from ipurun.inspect.facts import Purpose
        from ipurun.log.screen import make_screen
        from ipurun.runs.compile import compile_job
        from ipurun.runs.prepare import prepare

        point = _point_to_train([*words, f"options.useOfflineIpuTarget={ipu_version}"])
        prepared = prepare(point, Purpose.COMPILE)
        with _environment_kept(prepared.plan), _threads_kept():
            _set_environment(prepared.plan)
            screen = make_screen(sys.stdout, quiet)
            try:
                return compile_job(prepared, screen, None if export is None else Path(os.fspath(export)))
            finally:
                screen.close()


def explain_cache_words(words: Sequence[str]) -> Tuple[Plan, List[Prospect]]:
    """Return the plan of the words of a command line, and what the executable cache would do for it."""
    with _one_call(words):
        from ipurun.build.cached_executables import explain_cache
        from ipurun.runs.prepare import prepare

        prepared = prepare(_point_to_train(words))
        found = explain_cache(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)
        return prepared.plan, found


def bench_words(
    words: Sequence[str],
    seconds: float = 5.0,
    ladder: Optional[Sequence[int]] = None,
    report: Callable[[str], None] = lambda text: None,
    set_environment: Optional[Callable[[Plan], None]] = None,
) -> BenchReport:
    """Measure the config of a command line. Only how fast its data loads is kept, for plans.

    Args:
        words: Overrides and Hydra's flags.
        seconds: Time for each measurement.
        ladder: Numbers of device_iterations to try beside the configured one; None: 1, 2, 4 and 8.
        report: Called with what is being measured.
        set_environment: As for `train_words`.
    """
    with _one_call(words):
        _refuse_sweep(words)
        from ipurun.config.compose import points
        from ipurun.inspect.facts import Purpose
        from ipurun.inspect.profiles import keep_loading_rate
        from ipurun.runs.bench import DEFAULT_LADDER, bench
        from ipurun.runs.prepare import prepare

        prepared = prepare(points(words, "bench").points[0], Purpose.RUN)
        # Estimated first: measuring trains the model, and its memory is needed then.
        report("the planner's estimate for IPUs")
        estimate = _speed_estimate(prepared, words)
        with _environment_kept(prepared.plan), _threads_kept():
            (set_environment or _set_environment)(prepared.plan)
            measured = bench(prepared, seconds, DEFAULT_LADDER if ladder is None else ladder, report)
        measured.estimate = estimate
        keep_loading_rate(prepared.point.config, measured.loading_rate(prepared.point.config.loader.workers))
        return measured


def _speed_estimate(prepared: PreparedRun, words: Sequence[str]) -> Dict[str, Any]:
    planned = _report(prepared, words, False, None)
    if planned.estimate is None:
        return {"why": "" if planned.no_estimate is None else planned.no_estimate.what}
    time_of_update = planned.estimate.estimate.time
    return {
        "samples_per_second": time_of_update.samples_per_second,
        "host_bound": time_of_update.host_bound,
        "machine": prepared.point.config.machine.name,
    }


def check_words(words: Sequence[str]) -> List[Tuple[str, List[Problem]]]:
    """Return a label and the problems of every point that the words of a command line describe."""
    with _one_call(words):
        from ipurun.config.compose import points
        from ipurun.inspect.facts import Purpose
        from ipurun.runs.prepare import prepare_job

        label = " ".join(words) or "the default config"
        try:
            found = points(words, "validate").points
        except ConfigError as error:
            return [(label, _completed(error.problems, words))]
        results: List[Tuple[str, List[Problem]]] = []
        for point in found:
            problems: List[Problem] = []
            try:
                prepare_job(point, Purpose.CHECK)
            except ConfigError as error:
                problems += error.problems
            results.append((" ".join(point.overrides) or label, _completed(problems, words)))
        return results


_CALLS = threading.RLock()


@contextlib.contextmanager
def _one_call(words: Sequence[str] = (), run: Optional[PathLike] = None) -> Iterator[None]:
    """Run one call at a time; every problem that it raises gets a place and advice.

    Args:
        words: The command line of the call.
        run: The run folder that it is given.
    """
    from ipurun.engine import check_environment

    with _CALLS, _complete_problems(words, run):
        check_environment()
        # Idle OpenMP threads that spin make torch many times slower wherever the machine has other work to do.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        yield


@contextlib.contextmanager
def _complete_problems(words: Sequence[str], run: Optional[PathLike]) -> Iterator[None]:
    try:
        yield
    except IpurunError as error:
        error.set_problems(_completed(error.problems, words, run))
        raise


def _completed(problems: Sequence[Problem], words: Sequence[str], run: Optional[PathLike] = None) -> List[Problem]:
    """Return problems of a command line, or of the folder of a run, with a place and advice."""
    from ipurun.config.compose import where_typed
    from ipurun.config.keys import complete

    def where_set(key: str) -> str:
        given = f"the run folder: {ascii(os.fspath(run))[1:-1][:100]}" if run is not None and key == "resume" else ""
        return where_typed(words, key) or given

    return [complete(problem, where_set) for problem in problems]


@contextlib.contextmanager
def _reloaded(
    command: str,
    run: PathLike,
    checkpoint: Optional[PathLike],
    best: bool,
    overrides: Sequence[str],
    split: Optional[str],
    quiet: bool,
) -> Iterator[Tuple[LoadedRun, str, Any]]:
    """Yield a stored run with its weights, the name of the split to use, and a console."""
    with _one_call(overrides, run):
        from ipurun.log.console import console_for
        from ipurun.log.screen import make_screen
        from ipurun.runs.folder import RunFolder
        from ipurun.runs.reload import load_run, split_to_use

        folder = RunFolder.open(os.fspath(run))
        with _threads_kept():
            loaded = load_run(folder, _listed(overrides), _text(checkpoint), best, command)
            screen = make_screen(sys.stdout, quiet)
            for note in loaded.notes:
                screen.remark(f"warning: {note}")
            try:
                yield loaded, split_to_use(loaded.run, split), console_for(loaded.run.plan, screen)
            finally:
                screen.close()
                loaded.run.close()


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Give torch the number of threads back that it had: `threads` is a key of the run."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _environment_kept(plan: Plan) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in plan.environment}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _set_environment(plan: Plan) -> None:
    missing = {name: value for name, value in plan.environment.items() if os.environ.get(name) != value}
    if missing and plan.engine != "cpu":
        raise ConfigError(
            "Graphcore's libraries read these variables when Python starts",
            seen=", ".join(f"{name}={value}" for name, value in missing.items()),
            fix="set them before Python starts, or use the command `ipurun train`, which does so",
        )
    os.environ.update(missing)


def _point_to_train(words: Sequence[str]) -> Point:
    """Compose the one point of a command line, from the stored config if it only says which run to resume."""
    from ipurun.config.argv import parse_argv

    _refuse_sweep(words)
    overrides = parse_argv(words).overrides
    named = [word.lstrip("+").partition("=") for word in overrides]
    folders = [value for key, _, value in named if key == "resume" and value not in ("", "auto", "null")]
    if folders and not any(key.split(".")[0] in ("recipe", "model") for key, _, _ in named):
        from ipurun.runs.folder import RunFolder
        from ipurun.runs.reload import stored_point

        return stored_point(RunFolder.open(folders[-1].strip("'\"")), overrides)
    from ipurun.config.compose import points

    return points(words).points[0]


def _refuse_sweep(words: Sequence[str]) -> None:
    from ipurun.config.argv import parse_argv

    if parse_argv(words).multirun:
        fix = "leave it out; the command `ipurun train -m` runs sweeps"
        raise ConfigError("this takes one config, not a sweep", seen="-m", fix=fix)


def _report(prepared: PreparedRun, words: Sequence[str], solve: bool, calibrate: Optional[PathLike]) -> PlanReport:
    from ipurun.build.cached_executables import look_into_cache
    from ipurun.estimate import plan_estimate
    from ipurun.runs.compile import estimable

    config = prepared.point.config
    planned, promises = estimable(prepared)
    try:
        found = plan_estimate.estimate_plan(planned, promises)
        cache = look_into_cache(config, prepared.plan, prepared.inspected, prepared.engine)
    except ConfigError as error:
        if solve or calibrate is not None:
            raise
        return PlanReport(prepared.plan, None, error.problems[0], None, [], None, words)
    solutions, unsolved = plan_estimate.solve(planned, found, promises) if solve else (None, "")
    calibrated = [] if calibrate is None else plan_estimate.calibrated_words(found, Path(calibrate))
    return PlanReport(prepared.plan, found, None, solutions, calibrated, cache, words, unsolved)


def _words(
    recipe: Recipe, overrides: Sequence[str], config_dir: Optional[PathLike], keys: Mapping[str, Any]
) -> List[str]:
    """Return the words of the command line that says the same as a call."""
    words = [] if config_dir is None else ["--config-dir", os.fspath(config_dir)]
    if recipe is not None:
        words.append(f"+recipe={_value(recipe)}")
    words += _listed(overrides)
    for key, value in keys.items():
        words += _key_words(key, value)
    return words


def _listed(overrides: Sequence[str]) -> List[str]:
    if isinstance(overrides, str):
        raise ConfigError("`overrides` takes a list of words", seen=repr(overrides), fix=f"overrides=[{overrides!r}]")
    return list(overrides)


def _key_words(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value and all(_is_name(name) for name in value):
        for name, inner in value.items():
            yield from _key_words(f"{key}.{name}", inner)
        return
    try:
        yield f"{key}={_value(value)}"
    except KeyError:  # patterns and other names that Hydra's grammar does not take: YAML does
        import yaml

        yield f"{key}={yaml.safe_dump(_plain(value), default_flow_style=True, width=float('inf')).strip()}"
    except TypeError as error:
        known = "text, numbers, booleans, None, paths, lists and mappings of them"
        raise ConfigError(f"`{key}` cannot be given as {error}", seen=repr(value)[:100], known=known, key=key) from None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII) is not None


def _plain(value: Any) -> Any:
    """Return a value as plain Python data.

    Raises:
        TypeError: With the name of a type that configs cannot have.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy or torch
        return value.item()
    raise TypeError(type(value).__name__)


def _value(value: Any) -> str:
    """Return a value as Hydra's grammar for overrides writes it.

    Raises:
        KeyError: A mapping has a key that it cannot write.
        TypeError: As for `_plain`.
    """
    value = _plain(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, dict):
        for name in value:
            if not _is_name(name):
                raise KeyError(name)
        return "{" + ",".join(f"{name}:{_value(inner)}" for name, inner in value.items()) + "}"
    return repr(value)


def _quoted(text: str) -> str:
    """Return text so that Hydra reads it as this text: bare where that is possible, since groups want bare names."""
    if re.fullmatch(r"[\w./-]+", text, re.ASCII) and text.lower() not in ("null", "true", "false"):
        try:
            float(text)
        except ValueError:
            return text
    # Hydra takes backslashes as they are, except before a quote and at the end.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def _text(path: Optional[PathLike]) -> Optional[str]:
    return None if path is None else os.fspath(path)
