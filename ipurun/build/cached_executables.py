"""Whether the executables of a run are in its cache folder: told without compiling, and without writing anything."""

from __future__ import annotations

import os
from typing import Any, List

from ipurun.build.run import build_run, collate_of
from ipurun.config.schema import RunConfig
from ipurun.emulator.graph import executable_file_name
from ipurun.engine import Engine
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.sampling import seeded
from ipurun.inspect.structure import first_item
from ipurun.inspect.targets import make
from ipurun.planning.artifacts import CacheState
from ipurun.planning.plan import BatchSizes, Plan

__all__ = ["look_into_cache"]

_ENDING = ".popef"


def look_into_cache(config: RunConfig, plan: Plan, subject: ModelAndData, engine: Engine) -> CacheState:
    """What a run would find of its executables.

    On the CPU engine both programs are captured as the run itself captures them, and looked for by their keys. On an
    IPU only PopART knows its keys: there the executables are counted.
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
        return CacheState("unknown", len(names), why="only PopART can tell whether one is of this very program")
    if any(parameter.is_meta for parameter in subject.model.parameters()):
        return CacheState("unknown", len(names), why="the model is too large to be captured with its weights here")
    try:
        found = _files(config, plan, subject, engine)
    except Exception as error:  # user code of any kind: the run itself will tell what is wrong with it
        return CacheState("unknown", len(names), why=f"the model could not be captured ({type(error).__name__})")
    training, inference = ("hit" if file in names else "miss" for file in found)
    return CacheState(training, len(names), inference)


def _files(config: RunConfig, plan: Plan, subject: ModelAndData, engine: Engine) -> List[str]:
    """Files of the executables of training and of inference."""
    with seeded(config.seed):
        model = make(config.model, "model", engine_module=engine.module)
        run = build_run(config, plan, ModelAndData(model, subject.splits, subject.facts), engine)
        try:
            collate = collate_of(config, plan)
            run.enter_training()
            training = _file(run.training_model, collate(_samples(subject, "train", plan.training)), True)
            run.enter_inference()
            split = run.eval_split or "train"
            inference = _file(run.inference_model, collate(_samples(subject, split, plan.inference)), False)
        finally:
            run.close()
    return [training, inference]


def _samples(subject: ModelAndData, split: str, batch: BatchSizes) -> List[Any]:
    """One micro-batch of samples: only their shapes matter."""
    return [first_item(subject.splits[split])] * batch.micro_batch_size


def _file(executor: Any, batch: Any, training: bool) -> str:
    args, kwargs = as_call(batch)
    return executable_file_name(executor.model, args, kwargs, executor.options, training)
