"""Find out whether the executables of a run are cached, without compiling or writing anything."""

from __future__ import annotations

import os
from typing import Any, List

from ipurun.build.run import build_run, collate_of
from ipurun.config.schema import RunConfig
from ipurun.emulator.graph import executable_file_name
from ipurun.engine import Engine
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.data import first_sample
from ipurun.inspect.model import make_model
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.sampling import seeded
from ipurun.planning.artifacts import CacheState
from ipurun.planning.plan import BatchSizes, Plan

__all__ = ["look_into_cache"]

_ENDING = ".popef"


def look_into_cache(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine) -> CacheState:
    """Return which of a run's executables are cached.

    On the CPU engine both programs are captured as in the run, and looked up by their keys. On an IPU only PopART
    knows the keys, so the executables are merely counted.
    """
    if plan.cache_dir is None:
        return CacheState("off")
    try:
        names = [name for name in os.listdir(plan.cache_dir) if name.endswith(_ENDING)]
    except OSError:
        names = []
    if not names:
        return CacheState("miss")
    if engine.kind != "cpu":
        return CacheState("unknown", len(names), why="only PopART knows whether one of them is this program")
    if any(parameter.is_meta for parameter in inspected.model.parameters()):
        return CacheState("unknown", len(names), why="the model is too large to capture with its weights here")
    try:
        found = _files(config, plan, inspected, engine)
    except Exception as error:  # any error of the user's code: the run will report it
        return CacheState("unknown", len(names), why=f"the model could not be captured ({type(error).__name__})")
    training, inference = ("hit" if file in names else "miss" for file in found)
    return CacheState(training, len(names), inference)


def _files(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine) -> List[str]:
    """Return the file names of the executables of training and of inference."""
    with seeded(config.seed):
        model = make_model(config, engine.module)
        run = build_run(config, plan, ModelAndData(model, inspected.splits, inspected.facts), engine)
        try:
            collate = collate_of(config, plan)
            run.enter_training()
            training = _file(run.training_model, collate(_samples(inspected, "train", plan.training)), True)
            run.enter_inference()
            split = run.eval_split or "train"
            inference = _file(run.inference_model, collate(_samples(inspected, split, plan.inference)), False)
        finally:
            run.close()
    return [training, inference]


def _samples(inspected: ModelAndData, split: str, sizes: BatchSizes) -> List[Any]:
    """Return one micro-batch of equal samples, as only their shapes matter."""
    return [first_sample(inspected.splits[split])] * sizes.micro_batch_size


def _file(executor: Any, batch: Any, training: bool) -> str:
    args, kwargs = as_call(batch)
    return executable_file_name(executor.model, args, kwargs, executor.options, training)
