"""What the executable cache will do for a run, and what it did for a compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

import ipurun
from ipurun import executables
from ipurun.build.run import Run, build_run, collate_of
from ipurun.config.schema import RunConfig
from ipurun.config.secrets import hidden_values, with_hidden
from ipurun.emulator.graph import CacheUse, cache_prospect, cache_use, cache_versions, executables_described
from ipurun.engine import Engine
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.data import first_sample
from ipurun.inspect.model import make_model
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.sampling import seeded
from ipurun.planning.artifacts import CacheState
from ipurun.planning.plan import BatchSizes, Plan

__all__ = ["Compiled", "about_program", "compile_and_report", "current_versions", "look_into_cache"]

_CLOSE_TO_COMPILING = 0.5  # of the known compile time: PopART does not say whether it loaded an executable


@dataclass(frozen=True)
class Compiled:
    """What a compilation took, and what the cache did: see `ipurun.training.events.CompileEnd`."""

    seconds: float
    cache: str
    saved_seconds: Optional[float] = None
    why: str = ""


def compile_and_report(run: Run, mode: str, compile_model: Callable[[], None]) -> Compiled:
    """Compile, find out what the executable cache did, and keep its files about executables and its size in order.

    Args:
        run: The run.
        mode: ``training`` or ``inference``.
        compile_model: Compiles the executor of that mode.
    """
    about = about_program(run.config, run.plan.name, mode)
    begun = time.perf_counter()
    if run.engine.kind == "cpu":
        with executables_described(about):
            compile_model()
        seconds = time.perf_counter() - begun
        use = cache_use(run.training_model if mode == "training" else run.inference_model)
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
    config = about["config"]
    known = [e for e in now if e.mode == about["mode"] and not executables.differing_keys(config, e.config)]
    if not known or known[0].compile_seconds is None:
        return Compiled(seconds, "hit")
    if seconds > _CLOSE_TO_COMPILING * known[0].compile_seconds:
        return Compiled(seconds, "", why="no new executable, but it took as long as to compile one")
    executables.count_hit(known[0])
    return Compiled(seconds, "hit", known[0].compile_seconds - seconds)


def _limit_size(run: Run, keep: Set[Path]) -> None:
    """Remove the least recently used executables beyond `cache.max_size`, from all folders of the cache."""
    folder = run.plan.cache_dir
    if folder is None or run.config.cache.max_size is None:
        return
    # The folder of a run's name is one of several, unless the user named it.
    root = folder if run.config.cache.dir else str(Path(folder).parent)
    found = [entry for place in executables.cache_folders({}, root) for entry in executables.entries(place)]
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
    entries = executables.entries(plan.cache_dir, "cpu" if engine.kind == "cpu" else "ipu")
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


def _prospects(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine) -> List[CacheUse]:
    """Return what the cache would do for training and for inference."""
    with seeded(config.seed):
        model = make_model(config, engine.module)
        run = build_run(config, plan, ModelAndData(model, inspected.splits, inspected.facts), engine)
        try:
            collate = collate_of(config, plan)
            run.enter_training()
            training = _prospect(run.training_model, collate(_samples(inspected, "train", plan.training)))
            run.enter_inference()
            split = run.eval_split or "train"
            inference = _prospect(run.inference_model, collate(_samples(inspected, split, plan.inference)))
        finally:
            run.close()
    return [training, inference]


def _samples(inspected: ModelAndData, split: str, sizes: BatchSizes) -> List[Any]:
    """Return one micro-batch of equal samples, as only their shapes matter."""
    return [first_sample(inspected.splits[split])] * sizes.micro_batch_size


def _prospect(executor: Any, batch: Any) -> CacheUse:
    args, kwargs = as_call(batch)
    return cache_prospect(executor, args, kwargs)
