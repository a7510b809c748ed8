"""Prediction and record of executable-cache use: hits and misses of a run, and of each compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import ipurun
from ipurun import executables
from ipurun.build.run import Run, build_run, collate_of
from ipurun.config.schema import RunConfig
from ipurun.config.secrets import hidden_values, with_hidden
from ipurun.emulator.graph import (
    CacheUse,
    cache_prospect,
    cache_use,
    cache_versions,
    executables_described,
    export_problem,
)
from ipurun.engine import Engine
from ipurun.errors import Problem, RunError
from ipurun.files import write_atomically
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.data import first_sample
from ipurun.inspect.model import make_model
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.sampling import seeded
from ipurun.planning.artifacts import CacheState
from ipurun.planning.plan import BatchSizes, Plan

__all__ = [
    "Compiled",
    "Prospect",
    "about_program",
    "compile_and_report",
    "current_versions",
    "explain_cache",
    "export",
    "look_into_cache",
    "precompiled_problems",
]

_MODES = ("training", "inference")
# PopART does not say whether it loaded an executable. A compilation that took minutes before, and takes more than this
# part of them again, did not.
_CLOSE_TO_COMPILING = 0.5
_LONG_SECONDS = 60.0
_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Compiled:
    """Duration of a compilation and the result of its cache lookup: see `ipurun.training.events.CompileEnd`."""

    seconds: float
    cache: str
    saved_seconds: Optional[float] = None
    why: str = ""


def compile_and_report(run: Run, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
    """Compile, find out what the executable cache did, and keep its files about executables and its size in order.

    Args:
        run: The run.
        mode: ``training`` or ``inference``.
        args: Positional arguments of a host call.
        kwargs: Named arguments of a host call.
    """
    executor = run.training_model if mode == "training" else run.inference_model
    file = _precompiled_file(run.config, mode)

    def compile_model() -> None:
        run.model_with_loss.tracing_flag.retry(lambda: executor.compile(*args, **kwargs))

    about = about_program(run.config, run.plan.name, mode)
    begun = time.perf_counter()
    if file is not None:
        _load_export(run, executor, file)
        return Compiled(time.perf_counter() - begun, "precompiled", why=str(file))
    if run.engine.kind == "cpu":
        with executables_described(about):
            compile_model()
        seconds = time.perf_counter() - begun
        use = cache_use(executor)
        found = Compiled(seconds, "") if use is None else Compiled(seconds, use.state, use.saved_seconds, use.why)
        _limit_size(run, set())
        return found
    folder = run.plan.cache_dir
    before = {entry.path for entry in executables.entries(folder, "ipu")} if folder else set()
    compile_model()
    seconds = time.perf_counter() - begun
    if folder is None:
        return Compiled(seconds, "off")
    return _report_of_popart(run, {**about, "engine": "ipu"}, folder, before, seconds)


def _load_export(run: Run, executor: Any, file: Path) -> None:
    try:
        executor.loadExecutable(str(file))
    except (run.engine.module.RecoverableError, run.engine.module.UnrecoverableError):
        raise  # of the IPU system, not of the file
    except Exception as error:  # whatever reading another version's objects raises
        seen = str(getattr(error, "message", "") or error or type(error).__name__)
        raise RunError(
            "the file of `precompiled` cannot be loaded", where=str(file), seen=seen, fix=_export_again(run.config)
        ) from error


def _export_again(config: RunConfig) -> str:
    return f"ipurun compile with the same words and --export {config.precompiled}, or leave precompiled out"


def export_file(file: Path, mode: str) -> Path:
    """Return the file of an export: that of inference has ``.inference`` in its name."""
    return file if mode == "training" else file.with_name(f"{file.stem}.inference{file.suffix}")


def export(run: Run, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any], file: Path) -> Path:
    """Compile one mode of a run and write it for `poptorch.load` and `precompiled`, with a JSON file about it."""
    executor = run.training_model if mode == "training" else run.inference_model
    target = export_file(file, mode)
    run.model_with_loss.tracing_flag.retry(lambda: executor.compileAndExport(str(target), *args, **kwargs))
    about = about_program(run.config, run.plan.name, mode)
    versions = {**about["versions"], "engine": run.engine.version}
    write_atomically(_about_export(target), json.dumps({**about, "versions": versions}, indent=1, default=str))
    return target


def precompiled_problems(config: RunConfig, name: str, engine: Engine) -> List[Problem]:
    """Return what keeps the file of `precompiled` from being used: it is missing, or of another version or config."""
    if config.precompiled is None:
        return []
    file, key = Path(config.precompiled), "precompiled"
    if not file.is_file():
        fix = f"ipurun compile ... --export {config.precompiled}"
        return [Problem("the file of `precompiled` does not exist", seen=config.precompiled, fix=fix, key=key)]
    if engine.kind == "cpu":
        for each in (file, export_file(file, "inference")):
            problem = export_problem(str(each)) if each.is_file() else ""
            if problem:
                what = "the file of `precompiled` cannot be loaded"
                return [Problem(what, seen=problem, fix=_export_again(config), key=key)]
    try:
        about = json.loads(_about_export(file).read_text(encoding="utf-8"))
        versions, stored = dict(about["versions"]), dict(about["config"])
    except (OSError, ValueError, TypeError, KeyError):
        return []  # PopTorch's own export: PopTorch checks its version
    if versions.get("engine") != engine.version:
        seen = f"compiled with {versions.get('engine')}, this is {engine.version}"
        fix = "compile it again with this version, or leave precompiled out"
        return [Problem("the file of `precompiled` is of another version", seen=seen, fix=fix, key=key)]
    here = about_program(config, name, "training")["config"]
    differing = executables.differing_keys(here, stored)
    if not differing:
        return []
    seen = "; ".join(f"{name}: {now} here, {then} there" for name, now, then in differing[:5])
    fix = "compile it again with these keys, or leave precompiled out"
    return [Problem("the file of `precompiled` was compiled with other keys", seen=seen, fix=fix, key=key)]


def _precompiled_file(config: RunConfig, mode: str) -> Optional[Path]:
    if config.precompiled is None:
        return None
    file = export_file(Path(config.precompiled), mode)
    return file if mode == "training" or file.is_file() else None


def _about_export(file: Path) -> Path:
    return file.with_name(file.name + ".json")


def _report_of_popart(run: Run, about: Mapping[str, Any], folder: str, before: Set[Path], seconds: float) -> Compiled:
    """Judge by new files, and by the time that the same config took to compile, what PopART does not say."""
    now = executables.entries(folder, "ipu")
    made = [entry.path for entry in now if entry.path not in before]
    if made:
        versions = {**about["versions"], **current_versions(run.engine)["ipu"]}
        when = {"created": time.time(), "last_use": time.time(), "hits": 0}
        with contextlib.suppress(OSError):  # a full disk: the run itself does not need the file
            for path in made:
                executables.write_about(path, {**about, "versions": versions, "compile_seconds": seconds, **when})
        _limit_size(run, set(made))
        return Compiled(seconds, "miss")
    if not before:
        return Compiled(seconds, "uncached", why="PopART stored no executable")
    known = [
        (len(executables.differing_keys(about["config"], entry.config)), entry.compile_seconds, entry)
        for entry in now
        if entry.mode == about["mode"] and entry.compile_seconds is not None
    ]
    if not known:
        return Compiled(seconds, "hit")
    differing, then, nearest = min(known, key=lambda each: each[:2])
    if differing:
        # PopART's keys leave out more than those of a config: such an executable took about as long.
        why = f"estimated: compiling took {then:.0f} s with {differing} other key{'s' if differing > 1 else ''}"
        return Compiled(seconds, "hit", then - seconds, why) if then > seconds else Compiled(seconds, "hit")
    if seconds > max(_LONG_SECONDS, _CLOSE_TO_COMPILING * then):
        return Compiled(seconds, "", why="no new executable, but it took as long as to compile one")
    executables.count_hit(nearest)
    return Compiled(seconds, "hit", then - seconds)


def _limit_size(run: Run, keep: Set[Path]) -> None:
    """Remove the least recently used executables beyond `cache.max_size`, from all folders of the cache."""
    folder = run.plan.cache_dir
    if folder is None or run.config.cache.max_size is None:
        return
    # The folder of a run's name is one of several, unless the user named it.
    root = folder if run.config.cache.dir else str(Path(folder).parent)
    places = executables.cache_folders({}, root)
    for place in places:
        executables.remove_leftovers(place, _DAY_SECONDS)
    found = [entry for place in places for entry in executables.entries(place)]
    executables.prune(found, max_bytes=executables.parse_size(run.config.cache.max_size), keep=keep)


def about_program(config: RunConfig, name: str, mode: str) -> Dict[str, Any]:
    """Return what the file about an executable says of the run that compiled it; secrets are masked."""
    plain = dataclasses.asdict(config)
    program = executables.program_config(with_hidden(plain, hidden_values(plain, plain)))
    return {"name": name, "mode": mode, "config": program, "versions": {"ipurun": ipurun.__version__}}


def current_versions(engine: Optional[Engine] = None) -> Dict[str, Dict[str, str]]:
    """Return the versions that executables depend on, by engine; that of PopTorch only where it is loaded."""
    found = {"cpu": dict(cache_versions())}
    if engine is not None and engine.kind != "cpu":
        found["ipu"] = {"poptorch": engine.version}
    return found


def look_into_cache(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine) -> CacheState:
    """Return which of a run's executables are cached.

    On the CPU engine both programs are traced and looked up by their keys. On an IPU only PopART
    knows the keys, so the executables are merely counted.
    """
    if plan.cache_dir is None:
        return CacheState("off")
    entries = executables.entries(plan.cache_dir, _kind(engine))
    if not entries:
        return CacheState("miss")
    if engine.kind != "cpu":
        return CacheState("unknown", len(entries), why="only PopART knows whether one of them is this program")
    if any(parameter.is_meta for parameter in inspected.model.parameters()):
        return CacheState("unknown", len(entries), why="the model is too large to trace with its weights here")
    try:
        training, inference = _prospects(config, plan, inspected, engine)
    except Exception as error:  # any error of the user's code: the run will report it
        return CacheState("unknown", len(entries), why=f"the model could not be traced ({type(error).__name__})")
    return CacheState(training.state, len(entries), inference.state, why=training.why or inference.why)


@dataclass(frozen=True)
class Prospect:
    """Expected cache lookup of one mode of a run, with the closest entry.

    Args:
        mode: ``training`` or ``inference``.
        state: ``hit``, ``miss``, ``uncached``, ``unknown`` or ``off``.
        why: Why it is not known, or not cached.
        entry: The entry that would be loaded, or the nearest one; None if there is none of this mode.
        differences: Keys that differ from those of the nearest entry: key, value here, value there.
        other_versions: Versions that differ from those of the nearest entry: name, version here, version there.
    """

    mode: str
    state: str
    why: str = ""
    entry: Optional[executables.Entry] = None
    differences: Sequence[Tuple[str, Any, Any]] = ()
    other_versions: Sequence[Tuple[str, str, str]] = ()


def explain_cache(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine) -> List[Prospect]:
    """Return what the cache would do for training and for inference, and why."""
    state = look_into_cache(config, plan, inspected, engine)
    if plan.cache_dir is None:
        return [Prospect(mode, "off") for mode in _MODES]
    found = executables.entries(plan.cache_dir, _kind(engine))
    versions = current_versions(engine).get(_kind(engine), {})
    prospects = []
    for mode, of_mode in zip(_MODES, (state.training, state.inference or state.training)):
        known = [entry for entry in found if entry.mode == mode]
        here = about_program(config, plan.name, mode)["config"]
        nearest = min(known, key=lambda entry: len(executables.differing_keys(here, entry.config)), default=None)
        if nearest is None:
            prospects.append(Prospect(mode, of_mode, state.why))
            continue
        differences = executables.differing_keys(here, nearest.config)
        others = [(name, now, nearest.versions[name]) for name, now in versions.items() if name in nearest.versions]
        others = [row for row in others if row[1] != row[2]]
        if of_mode == "unknown" and engine.kind != "cpu":
            of_mode = "miss" if differences or others else "hit"
        prospects.append(Prospect(mode, of_mode, state.why, nearest, differences, others))
    return prospects


def _kind(engine: Engine) -> str:
    return "cpu" if engine.kind == "cpu" else "ipu"


def _prospects(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine) -> List[CacheUse]:
    """Return what the cache would do for training and for inference."""
    with seeded(config.seed):
        model = make_model(config, engine.module)
        run = build_run(config, plan, ModelAndData(model, inspected.splits, inspected.facts), engine)
        try:
            collate = collate_of(config, plan, inspected.splits)
            run.enter_training()
            training = _prospect(run.training_model, collate(_samples(inspected, "train", plan.local_training)))
            run.enter_inference()
            split = run.eval_split or "train"
            inference = _prospect(run.inference_model, collate(_samples(inspected, split, plan.local_inference)))
        finally:
            run.close()
    return [training, inference]


def _samples(inspected: ModelAndData, split: str, sizes: BatchSizes) -> List[Any]:
    """Return one micro-batch of equal samples, as only their shapes matter."""
    return [first_sample(inspected.splits[split])] * sizes.micro_batch_size


def _prospect(executor: Any, batch: Any) -> CacheUse:
    args, kwargs = as_call(batch)
    return cache_prospect(executor, args, kwargs)
