"""The engine objects of a run, made from a plan, and the device handed from training to inference and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn

from ipurun.api.calls import apply_calls
from ipurun.build.annotate import Annotations, overlap_io
from ipurun.build.loader import EvalLoader, TrainLoader
from ipurun.build.optimizer import make_optimizer
from ipurun.config.schema import RunConfig
from ipurun.engine import Engine
from ipurun.errors import ConfigError
from ipurun.inspect.data import split_for_eval
from ipurun.inspect.loss import Loss, ModelWithLoss, make_loss
from ipurun.inspect.metrics import make_metrics, monitored
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.optimizer import make_schedule
from ipurun.inspect.precision import CastingCollate, cast_weights
from ipurun.inspect.sampling import make_collate
from ipurun.metrics import MetricSet
from ipurun.planning.plan import Plan
from ipurun.schedules import Schedule

__all__ = ["Run", "build_run", "collate_of"]


@dataclass
class Run:
    """Everything that training, evaluation and prediction work with.

    Args:
        config: The run's config.
        plan: Its plan.
        engine: Its engine.
        user_model: The user's model; its names are those of checkpoints.
        step: The model with its loss, as training runs it.
        loss: The loss behind the model; None for a model with its own.
        training_model: The engine's executor for training.
        inference_model: The engine's executor for evaluation and prediction.
        train_loader: Training batches.
        eval_loaders: Split name -> batches for inference.
        optimizer: The optimizer.
        schedule: The learning-rate schedule.
        train_metrics: Metrics of training batches.
        eval_metrics: Metrics of evaluation.
        monitor: Name of the metric that tells the best checkpoint.
        eval_split: Split to evaluate on; None where the data has none.
        annotations: The hooks on the model.
        training_options: The engine's options for training.
        inference_options: The engine's options for evaluation and prediction.
    """

    config: RunConfig
    plan: Plan
    engine: Engine
    user_model: nn.Module
    step: ModelWithLoss
    loss: Optional[Loss]
    training_model: Any
    inference_model: Any
    train_loader: TrainLoader
    eval_loaders: Dict[str, EvalLoader]
    optimizer: Any
    schedule: Schedule
    train_metrics: MetricSet
    eval_metrics: MetricSet
    monitor: str
    eval_split: Optional[str]
    annotations: Annotations
    training_options: Any
    inference_options: Any

    def enter_training(self) -> None:
        """Give the device to training."""
        _release(self.inference_model)
        if not self.training_model.isCompiled():
            self.annotations.install(self.plan.placements)
        self.user_model.train()

    def enter_inference(self) -> None:
        """Give the device to inference; the weights pass through the host."""
        _release(self.training_model)
        if not self.inference_model.isCompiled():
            self.annotations.install(self.plan.inference_placements)
        self.user_model.eval()

    def close(self) -> None:
        """Let go of the device and of background processes."""
        self.train_loader.close()
        _release(self.training_model)
        _release(self.inference_model)


def build_run(config: RunConfig, plan: Plan, subject: ModelAndData, engine: Engine) -> Run:
    """Perform a plan: options, annotated model, optimizer, loaders and executors.

    Raises:
        ConfigError: Something that only building shows.
    """
    if engine.kind == "cpu" and config.threads is not None:
        torch.set_num_threads(config.threads)
    module = engine.module
    model = subject.model
    cast_weights(model, plan.precision, plan.module_precision)
    annotations = Annotations(
        model,
        module,
        plan.precision,
        plan.module_precision,
        plan.recompute,
        plan.serialized,
        plan.module_proportions,
        plan.ended_blocks,
    )
    loss = make_loss(config.loss, module)
    train_metrics = make_metrics(config.metrics, "train", module)
    step = ModelWithLoss(
        model, loss, config.loss, returns_output=bool(train_metrics), identity_loss=module.identity_loss
    )
    inference_step = ModelWithLoss(model, loss, config.loss, returns_output=True, answer=step.answer)
    for executed in (step, inference_step):
        overlap_io(executed, module, plan.overlap_io)
    training_options = apply_calls(module.Options(), plan.training_options, module)
    inference_options = apply_calls(module.Options(), plan.inference_options, module)
    optimizer = make_optimizer(plan.optimizer, plan.parameter_groups, step, module)
    schedule = make_schedule(config.schedule, optimizer, plan.steps.total_updates, module)
    collate = collate_of(config, plan)
    train_loader = TrainLoader(
        module, training_options, subject.splits["train"], config.loader, plan.training, config.seed, collate
    )
    eval_loaders = {
        name: EvalLoader(
            module, inference_options, data, config.loader.workers, plan.inference, collate, config.eval.max_samples
        )
        for name, data in subject.splits.items()
    }
    try:
        training_model = module.trainingModel(step, training_options, optimizer)
        inference_model = module.inferenceModel(inference_step, inference_options)
    except (AssertionError, ValueError, module.Error) as error:
        raise ConfigError("PopTorch refuses these options", seen=str(error)) from error
    return Run(
        config=config,
        plan=plan,
        engine=engine,
        user_model=model,
        step=step,
        loss=loss,
        training_model=training_model,
        inference_model=inference_model,
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        optimizer=optimizer,
        schedule=schedule,
        train_metrics=train_metrics,
        eval_metrics=make_metrics(config.metrics, "eval", module),
        monitor=config.checkpoint.best or monitored(config.monitor, config.metrics),
        eval_split=split_for_eval(subject.splits, config.eval.split),
        annotations=annotations,
        training_options=training_options,
        inference_options=inference_options,
    )


def collate_of(config: RunConfig, plan: Plan) -> Callable[[List[Any]], Any]:
    """What makes a micro-batch of samples, as the device takes it."""
    collate = make_collate(config.loader)
    if not plan.precision.startswith("16"):
        return collate
    return CastingCollate(collate, has_target=config.loss.name is not None, target=config.loss.target)


def _release(executor: Any) -> None:
    if executor.isCompiled() and executor.isAttachedToDevice():
        executor.detachFromDevice()
