"""Find out whether the executables of a run are cached, without compiling or writing anything."""

from __future__ import annotations

from typing import Any, List

from ipurun import executables
from ipurun.build.run import build_run, collate_of
from ipurun.config.schema import RunConfig
from ipurun.emulator.graph import CacheUse, cache_prospect
from ipurun.engine import Engine
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.data import first_sample
from ipurun.inspect.model import make_model
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.sampling import seeded
from ipurun.planning.artifacts import CacheState
from ipurun.planning.plan import BatchSizes, Plan

__all__ = ["look_into_cache"]


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
