"""Build the engine objects of a run from its plan, and switch the device between training and inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils.data import IterDataPipe

from ipurun.api.calls import apply_calls, construct, resolve
from ipurun.build.annotate import Annotations, overlap_io
from ipurun.build.loader import EvalLoader, TrainLoader
from ipurun.build.reading_times import ReadingTimes
from ipurun.build.skipped import SkippedSamples
from ipurun.config.patterns import match_parameters
from ipurun.config.schema import RunConfig
from ipurun.distributed.team import ALONE, Team
from ipurun.engine import Engine
from ipurun.errors import ConfigError
from ipurun.inspect.data import split_for_eval
from ipurun.inspect.lightning.checks import evaluating_step, planned_trainer, takes_tensor
from ipurun.inspect.lightning.data import Splits
from ipurun.inspect.lightning.logged import LoggedValues, logged_monitor
from ipurun.inspect.lightning.optimizers import ConfiguredOptimizer, configured_optimizer
from ipurun.inspect.lightning.steps import RETURNED, Steps, steps_of
from ipurun.inspect.loss import Loss, ModelWithLoss, make_loss
from ipurun.inspect.metrics import make_metrics, monitored
from ipurun.inspect.model import stop_caching
from ipurun.inspect.model_and_data import ModelAndData, make_model_alone, own_collate
from ipurun.inspect.optimizer import make_schedule
from ipurun.inspect.precision import CastingCollate, cast_weights
from ipurun.inspect.sampling import make_collate
from ipurun.metrics import MetricSet
from ipurun.planning.plan import Plan
from ipurun.planning.steps import most_eval_samples
from ipurun.schedules import Schedule
from ipurun.weights import load_initial_weights

__all__ = ["Run", "build_run", "collate_of"]


@dataclass
class Run:
    """Everything that training, evaluation and prediction use.

    Args:
        config: The run's config.
        plan: Its plan.
        engine: Its engine.
        user_model: The user's model; its names are those of checkpoints.
        model_with_loss: The model with its loss, as training runs it.
        loss: The loss applied to the model's output; None for a model that returns its own.
        training_model: The engine's executor for training.
        inference_model: The engine's executor for evaluation and prediction.
        train_loader: Training batches.
        eval_loaders: Split name -> batches for inference.
        optimizer: The optimizer.
        schedule: The learning-rate schedule.
        train_metrics: Metrics of training batches.
        eval_metrics: Metrics of evaluation.
        monitor: Name of the metric that selects the best checkpoint.
        eval_split: Split to evaluate on; None if the data has none.
        annotations: The hooks on the model.
        training_options: The engine's options for training.
        inference_options: The engine's options for evaluation and prediction.
        splits: The data by split.
        skipped: Samples that could not be read.
        built_for_step: Weight updates done when it was built: which frozen parameters are trained depends on it.
        reading_times: When training samples are read, with ``profile=trace``.
        inference_wrapper: The model with its loss, as inference runs it.
        steps: The steps of a LightningModule; None for other models.
        team: The processes that train together.
    """

    config: RunConfig
    plan: Plan
    engine: Engine
    user_model: nn.Module
    model_with_loss: ModelWithLoss
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
    splits: Dict[str, Any]
    skipped: SkippedSamples
    inference_wrapper: ModelWithLoss
    built_for_step: int = 0
    reading_times: Optional[ReadingTimes] = None
    steps: Optional[Steps] = None
    team: Team = ALONE

    def enter_training(self) -> None:
        """Switch the device to training."""
        _release(self.inference_model)
        if not self.training_model.isCompiled():
            self.annotations.install(self.plan.placements)
        self.user_model.train()

    def enter_inference(self) -> None:
        """Switch the device to inference; the weights pass through the host."""
        _release(self.training_model)
        # The statistics of each process come from its part of the data: all use those that are saved.
        self.team.copy_from_first([buffer for buffer in self.user_model.buffers() if buffer.is_floating_point()])
        if not self.inference_model.isCompiled():
            self.annotations.install(self.plan.inference_placements)
        self.user_model.eval()

    def use_step(self, split: str, predicts: bool = False) -> None:
        """Choose the step of a LightningModule that inference runs; a program for another one is given up."""
        if self.steps is None:
            return
        step = "predict" if predicts else evaluating_step(self.user_model, split) or "validation"
        if step == self.inference_wrapper.step:
            return
        _abandon(self.inference_model)
        self.inference_wrapper.step = step
        self.inference_model = self.engine.module.inferenceModel(self.inference_wrapper, self.inference_options)
        if step != "predict":
            self.eval_metrics = LoggedValues(self.steps, step, self.plan.logged.get(step, {}))

    def close_loaders(self) -> None:
        """End the processes that read the data."""
        self.train_loader.close()
        for loader in self.eval_loaders.values():
            loader.close()

    def unfreezes_at(self, step: int) -> bool:
        """Return whether other parameters are trained after a number of weight updates than in this program."""
        return any(
            part.until_step is not None and (self.built_for_step < part.until_step) != (step < part.until_step)
            for part in self.plan.frozen
        )

    def rebuild(self, step: int = 0) -> None:
        """Make the model and all engine objects again, as a new process does; the data sets are kept.

        Args:
            step: Weight updates done: which frozen parameters are trained, and whether `init_from` is read again.

        Raises:
            ConfigError: Something about the config changed meanwhile, such as a file that it reads.
        """
        self.close_loaders()
        for executor in (self.training_model, self.inference_model):
            _abandon(executor)
        model = make_model_alone(self.config, self.engine)
        stop_caching(model)
        if step == 0 and self.plan.initial_weights is not None:
            # The same file: by now, another run may be the newest of a folder.
            load_initial_weights(replace(self.config, init_from=self.plan.initial_weights.path), model)
        kept = (self.skipped, step, self.reading_times, self.team)
        made = _build(self.config, self.plan, model, self.splits, self.engine, *kept)
        vars(self).update(vars(made))  # in place, so that nothing keeps the old executors and their device

    def close(self) -> None:
        """Release the device and end background processes."""
        self.close_loaders()
        _release(self.training_model)
        _release(self.inference_model)


def build_run(config: RunConfig, plan: Plan, inspected: ModelAndData, engine: Engine, team: Team = ALONE) -> Run:
    """Build options, annotated model, optimizer, loaders and executors from a plan.

    Raises:
        ConfigError: A problem that only building can find.
    """
    if engine.kind == "cpu" and config.threads is not None:
        torch.set_num_threads(config.threads)
    skips = config.loader.on_error == "skip"
    can_skip = {name: data for name, data in inspected.splits.items() if skips and not isinstance(data, IterDataPipe)}
    skipped = SkippedSamples(can_skip, config.loader.max_errors, config.loader.workers)
    times = ReadingTimes() if config.profile.kind == "trace" else None
    return _build(config, plan, inspected.model, inspected.splits, engine, skipped, times=times, team=team)


def _build(
    config: RunConfig,
    plan: Plan,
    model: nn.Module,
    splits: Dict[str, Any],
    engine: Engine,
    skipped: SkippedSamples,
    done: int = 0,
    times: Optional[ReadingTimes] = None,
    team: Team = ALONE,
) -> Run:
    module = engine.module
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
    eval_metrics = make_metrics(config.metrics, "eval", module)
    eval_split = split_for_eval(splits, config.eval.split)
    monitor = monitored(config.monitor, config.metrics)
    collate = collate_of(config, plan, splits)
    trainer = planned_trainer(config, plan.steps.total_updates, splits)
    steps = steps_of(model, trainer)
    step = evaluating_step(model, eval_split) or "validation"
    if steps is not None:
        sizes = plan.training
        steps.takes_tensor = takes_tensor(splits["train"], collate)
        steps.other_numbers = {kind for kind, logged in plan.logged.items() if RETURNED in logged}
        eval_split = eval_split if evaluating_step(model, eval_split) else None
        train_metrics = LoggedValues(
            steps,
            "training",
            plan.logged.get("training", {}),
            sizes.device_iterations * sizes.gradient_accumulation * sizes.replicas,
            sizes.device_iterations,
            sums=plan.output_mode == "sum",
        )
        eval_metrics = LoggedValues(steps, step, plan.logged.get(step, {}))
        monitor = config.monitor or logged_monitor(plan.logged.get(step, {}))
    half_weights = plan.precision == "16.32"
    for_training = ModelWithLoss(
        model,
        loss,
        config.loss,
        returns_output=bool(train_metrics),
        identity_loss=module.identity_loss,
        half_weights=half_weights,
        steps=steps,
    )
    for_inference = ModelWithLoss(
        model,
        loss,
        config.loss,
        returns_output=True,
        tracing_flag=for_training.tracing_flag,
        half_weights=half_weights,
        steps=steps,
        step=step,
    )
    for executed in (for_training, for_inference):
        overlap_io(executed, module, plan.overlap_io)
    popdist_ipus = plan.devices.per_replica if plan.instances.uses_popdist else None
    training_options = apply_calls(engine.options(popdist_ipus), plan.training_options, module)
    inference_options = apply_calls(engine.options(popdist_ipus), plan.inference_options, module)
    own = configured_optimizer(model, trainer) if steps is not None and plan.own_optimizer else None
    if own is not None:
        _freeze_left_out(model, own)
    _set_trained(model, plan, done)
    optimizer, schedule = _make_optimizer_and_schedule(config, plan, for_training, module, own)
    train_loader = TrainLoader(
        module,
        training_options,
        splits["train"],
        config.loader,
        plan.local_training,
        config.seed,
        collate_of(config, plan, splits),
        skipped if skipped.covers("train") else None,
        times,
        splits.traits["train"].sampler if isinstance(splits, Splits) and "train" in splits.traits else None,
    )
    eval_loaders = {
        name: EvalLoader(
            module,
            inference_options,
            name,
            data,
            config.loader,
            plan.local_inference,
            collate_of(config, plan, splits, name),
            most_eval_samples(config, plan.inference),
            skipped if skipped.covers(name) else None,
            team,
        )
        for name, data in splits.items()
    }
    try:
        training_model = module.trainingModel(for_training, training_options, optimizer)
        inference_model = module.inferenceModel(for_inference, inference_options)
    except (AssertionError, ValueError, module.Error) as error:
        raise ConfigError("PopTorch refused these options", seen=str(error)) from error
    return Run(
        config=config,
        plan=plan,
        engine=engine,
        user_model=model,
        model_with_loss=for_training,
        loss=loss,
        training_model=training_model,
        inference_model=inference_model,
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        optimizer=optimizer,
        schedule=schedule,
        train_metrics=train_metrics,
        eval_metrics=eval_metrics,
        monitor=config.checkpoint.best or monitor,
        eval_split=eval_split,
        annotations=annotations,
        training_options=training_options,
        inference_options=inference_options,
        splits=splits,
        skipped=skipped,
        inference_wrapper=for_inference,
        built_for_step=done,
        reading_times=times,
        steps=steps,
        team=team,
    )


def collate_of(
    config: RunConfig, plan: Plan, splits: Mapping[str, Any], split: str = "train"
) -> Callable[[List[Any]], Any]:
    """Return the function that makes a micro-batch from samples of a split, in the precision of the run."""
    collate = make_collate(config.loader, own_collate(splits, split))
    if not plan.precision.startswith("16"):
        return collate
    return CastingCollate(collate, has_target=config.loss.name is not None, target=config.loss.target)


def _freeze_left_out(model: nn.Module, own: ConfiguredOptimizer) -> None:
    """Freeze the parameters that the model's own optimizer does not have."""
    trained = {id(parameter) for group in own.optimizer.param_groups for parameter in group["params"]}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def _set_trained(model: nn.Module, plan: Plan, step: int) -> None:
    """Freeze or unfreeze the parameters that are trained only after some step."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for part in plan.frozen:
        if part.until_step is not None:
            for name in part.names:
                named[name].requires_grad_(step >= part.until_step)


def _make_optimizer_and_schedule(
    config: RunConfig,
    plan: Plan,
    wrapped: nn.Module,
    engine_module: ModuleType,
    own: Optional[ConfiguredOptimizer] = None,
) -> Tuple[Any, Schedule]:
    """Make the optimizer of what is trained now, and the schedule of everything that is trained at some time."""
    groups = _optimizer_groups(plan, wrapped, engine_module)
    trained = [
        {**group, "params": [parameter for parameter in group["params"] if parameter.requires_grad]} for group in groups
    ]
    places = [place for place, group in enumerate(trained) if group["params"]]
    if not places:
        raise ConfigError("`freeze` leaves no parameter to train", fix="a shorter list", key="freeze")
    optimizer = _make_optimizer(plan, [trained[place] for place in places], engine_module)
    if own is not None and not config.schedule:
        return optimizer, Schedule(optimizer, own=own.optimizer, schedulers=own.schedulers)
    whole = None if len(places) == len(groups) else _make_optimizer(plan, groups, engine_module)
    schedule = make_schedule(config.schedule, optimizer, plan.steps.total_updates, engine_module, whole, places)
    return optimizer, schedule


def _make_optimizer(plan: Plan, groups: List[Dict[str, Any]], engine_module: ModuleType) -> Any:
    """Construct the optimizer with its parameter groups and its variable and constant values.

    Raises:
        ConfigError: The optimizer refuses its arguments.
    """
    call = plan.optimizer
    try:
        return construct(call, engine_module, groups)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"`optimizer`: {call.path} refused its arguments", seen=f"{type(error).__name__}: {error}", key="optimizer"
        ) from error


def _optimizer_groups(plan: Plan, wrapped: nn.Module, engine_module: ModuleType) -> List[Dict[str, Any]]:
    """Return the optimizer's groups of what is ever trained: a parameter belongs to the first one that it matches."""
    later = {name for part in plan.frozen if part.until_step is not None for name in part.names}
    left = {
        name: parameter
        for name, parameter in ((_own_name(name), parameter) for name, parameter in wrapped.named_parameters())
        if parameter.requires_grad or name in later
    }
    if not left:
        has_parameters = next(wrapped.parameters(), None) is not None
        seen = "requires_grad is False for all parameters" if has_parameters else "it has no parameters at all"
        fix = "`model._target_`: a module with trainable parameters"
        raise ConfigError("the model has no parameter to train", seen=seen, fix=fix)
    special: List[Dict[str, Any]] = []
    for group in plan.parameter_groups:
        names = [name for pattern in group.match for name in match_parameters(pattern, list(left))]
        parameters = {name: left.pop(name) for name in dict.fromkeys(names)}
        values = {name: resolve(value, engine_module) for name, value in group.values.items()}
        special += _split_by_decay(parameters, values, plan.no_decay)
    return _split_by_decay(left, {}, plan.no_decay) + special


def _own_name(name: str) -> str:
    return name[len("model.") :] if name.startswith("model.") else name


def _split_by_decay(
    parameters: Mapping[str, nn.Parameter], values: Mapping[str, Any], no_decay: Sequence[str]
) -> List[Dict[str, Any]]:
    """Return a group, divided in two if some of its parameters have no decay and the group does not set one."""
    exempt = set() if "weight_decay" in values else set(no_decay)
    decaying = [parameter for name, parameter in parameters.items() if name not in exempt]
    others = [parameter for name, parameter in parameters.items() if name in exempt]
    groups = [{"params": decaying, **values}, {"params": others, **values, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _abandon(executor: Any) -> None:
    """Free the device of an executor that may have failed, without its weights."""
    # The first call may fail while it reads the weights from the device; PopTorch then no longer wants them.
    for _ in range(2):
        try:
            executor.destroy()
            return
        except Exception:  # of a broken device, which is abandoned anyway
            continue


def _release(executor: Any) -> None:
    if executor.isCompiled() and executor.isAttachedToDevice():
        executor.detachFromDevice()
