"""Length of training and evaluation, in whole host calls."""

from __future__ import annotations

from typing import Optional

from ipurun.config.schema import RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts, Purpose
from ipurun.planning.plan import BatchSizes, EvalPass, Steps
from ipurun.planning.user_settings import UserSettings

__all__ = ["check_end_and_average", "count_evaluation", "count_steps", "enough_samples", "most_eval_samples"]


def count_steps(config: RunConfig, batch: BatchSizes, samples: Optional[int], found: Findings) -> Steps:
    """Return weight updates, host calls and dropped samples of training.

    Args:
        config: Epochs, step limits and intervals.
        batch: The batch arithmetic of training.
        samples: Length of the training set; None for a stream.
        found: Takes problems and notes on rounding.
    """
    whole = None if samples is None else _calls_per_epoch(config, batch, samples, found)
    dropped = None if samples is None or whole is None else samples - whole * batch.samples_per_call
    if dropped and whole:
        found.note(
            f"{dropped} of {samples} samples are dropped each epoch: they do not fill a host call of "
            f"{batch.samples_per_call} samples"
        )
    per_epoch = whole
    if config.limit.train_calls is not None and (whole is None or whole > config.limit.train_calls):
        per_epoch = config.limit.train_calls
        found.note(f"limit.train_calls={per_epoch}: an epoch ends after {per_epoch * batch.samples_per_call} samples")
    calls = _total_calls(config, batch, None if whole is None else per_epoch, found)
    if config.max_minutes is not None:
        found.note(
            f"max_minutes={config.max_minutes:g}: the run then saves and stops after the current host call, with exit "
            f"code {config.interrupt_exit_code}"
        )
    if config.loader.timeout_seconds is not None and not config.loader.workers and config.loader.mode == "sync":
        found.note("loader.timeout_seconds has no effect with loader.workers=0 and loader.mode=sync")
    updates = batch.device_iterations
    return Steps(
        total_updates=None if calls is None else calls * updates,
        total_calls=calls,
        calls_per_epoch=per_epoch,
        updates_per_epoch=None if per_epoch is None else per_epoch * updates,
        epochs=None if calls is None or not per_epoch else calls / per_epoch,
        dropped_samples=dropped,
        save_every_calls=_interval(config.checkpoint.every_steps, "checkpoint.every_steps", batch, found),
        eval_every_calls=_interval(config.eval.every_steps, "eval.every_steps", batch, found),
        log_every_calls=_log_interval(config, batch, found),
    )


def count_evaluation(config: RunConfig, batch: BatchSizes, facts: Facts) -> Optional[EvalPass]:
    """Return host calls, padding and dropped samples of one evaluation; None without a split to evaluate on.

    Args:
        config: Holds the limit on samples.
        batch: The batch arithmetic of inference.
        facts: Name and length of the split.
    """
    if facts.eval_split is None:
        return None
    length = facts.split_samples.get(facts.eval_split)
    if length is None:
        return EvalPass(facts.eval_split, None, None, None, None)
    most = most_eval_samples(config, batch)
    samples = length if most is None else min(length, most)
    calls = -(-samples // batch.samples_per_call)
    padded = calls * batch.samples_per_call - samples
    return EvalPass(facts.eval_split, samples, calls, padded, length - samples)


def enough_samples(batch: BatchSizes, facts: Facts, found: Findings) -> Optional[int]:
    """Return the length of the training set; in a plan, made-up data has the samples of a host call at least."""
    samples, needed = facts.train_samples, batch.samples_per_call
    if samples is None or samples >= needed or not facts.is_synthetic or facts.purpose is not Purpose.PLAN:
        return samples
    found.note(f"planned for {needed:,} samples of synthetic data; to run it, set data.train_samples={needed}")
    return needed


def check_end_and_average(
    config: RunConfig, settings: UserSettings, batch: BatchSizes, steps: Steps, found: Findings
) -> None:
    """Check the keys of early stopping and of the average of the weights, and note what they mean for this run.

    Args:
        config: The keys.
        settings: What the user set.
        batch: The batch arithmetic of training.
        steps: How long training lasts.
        found: Takes problems and notes.
    """
    evaluation, average = config.eval, config.averaging
    stops = config.early_stopping.patience is not None or config.early_stopping.threshold is not None
    if stops and not (evaluation.every_epochs or evaluation.every_steps or evaluation.every_minutes):
        found.note("early_stopping has no effect: nothing is evaluated before the end")
    if not stops and settings.has("early_stopping"):
        found.note("early_stopping has no effect without early_stopping.patience or early_stopping.threshold")
    if average.kind == "none":
        if settings.has("averaging.decay", "averaging.start_step") and not settings.has("averaging.kind"):
            found.note("averaging has no effect without averaging.kind=ema or averaging.kind=tail")
        return
    updates = average.every_calls * batch.device_iterations
    text = f"averaging.kind={average.kind}: the weights are copied from the device every {updates} weight updates"
    if average.kind == "ema" and updates > 1:
        text += f", where the decay is {average.decay:g} ** {updates} = {average.decay**updates:.6g}"
    found.note(text)
    if average.kind == "tail" and average.start_step is None and steps.total_updates is None:
        found.problem(
            "`averaging.kind=tail`: the length of the run is not known, and so is the beginning of its last part",
            seen="data without a length",
            fix="averaging.start_step=N, or max_steps=N",
            key="averaging.kind",
        )
    elif (
        average.start_step is not None and steps.total_updates is not None and average.start_step >= steps.total_updates
    ):
        found.note(f"averaging.start_step={average.start_step}: the run ends before, so there is no average")


def most_eval_samples(config: RunConfig, batch: BatchSizes) -> Optional[int]:
    """Return the largest number of samples of an evaluation or prediction; None: all."""
    by_calls = None if config.limit.eval_calls is None else config.limit.eval_calls * batch.samples_per_call
    limits = [limit for limit in (config.eval.max_samples, by_calls) if limit is not None]
    return min(limits, default=None)


def _calls_per_epoch(config: RunConfig, batch: BatchSizes, samples: int, found: Findings) -> int:
    calls, rest = divmod(samples, batch.samples_per_call)
    equation = (
        f"micro_batch_size {batch.micro_batch_size} x device_iterations {batch.device_iterations} x "
        f"gradient_accumulation {batch.gradient_accumulation} x {batch.distinct_replicas} replicas = "
        f"{batch.samples_per_call} samples per host call"
    )
    if samples == 0:
        found.problem("the training set is empty", seen="0 samples", fix="check `data`, or data=synthetic")
    elif calls == 0:
        found.problem(
            "one host call needs more samples than the training set has",
            seen=f"{equation}; the training set has {samples}",
            fix=_smaller(batch, samples),
        )
    elif rest and not config.loader.drop_last:
        found.problem(
            "`loader.drop_last=false` leaves an incomplete last host call, which the device cannot run",
            seen=f"{samples} samples, {equation}, {rest} left over",
            fix="loader.drop_last=true, or a host call size that divides the training set",
            key="loader.drop_last",
        )
    return calls


def _smaller(batch: BatchSizes, samples: int) -> str:
    """Return the largest value of one key that leaves at least one host call; else the keys to look at."""
    others = batch.samples_per_call // batch.device_iterations
    if samples >= others:
        return f"device_iterations={samples // others}"
    others = batch.samples_per_call // batch.gradient_accumulation
    if batch.gradient_accumulation > 1 and samples >= others:
        return f"gradient_accumulation={samples // others}"
    others = batch.samples_per_call // batch.micro_batch_size
    if samples >= others:
        return f"micro_batch_size={samples // others}"
    return "device_iterations=1 with a smaller micro_batch_size, gradient_accumulation or devices"


def _total_calls(config: RunConfig, batch: BatchSizes, per_epoch: Optional[int], found: Findings) -> Optional[int]:
    if config.limit.calls is not None:
        found.note(f"limit.calls={config.limit.calls}: training ends then, whatever epochs and max_steps say")
        return config.limit.calls
    by_epochs = None
    if per_epoch is not None and (config.epochs is not None or config.max_steps is None):
        by_epochs = per_epoch * (1 if config.epochs is None else config.epochs)
    if config.max_steps is None:
        return by_epochs
    calls = _whole_calls(config.max_steps, "max_steps", batch, found)
    return calls if by_epochs is None else min(calls, by_epochs)


def _interval(steps: Optional[int], key: str, batch: BatchSizes, found: Findings) -> Optional[int]:
    return None if steps is None else _whole_calls(steps, key, batch, found)


def _log_interval(config: RunConfig, batch: BatchSizes, found: Findings) -> Optional[int]:
    steps = config.log_every_steps
    if steps is None:
        return 1 if config.log_every_epochs is None and config.log_every_minutes is None else None
    # 1 means every host call, so that rounding it up is not worth a note.
    return 1 if steps == 1 else _whole_calls(steps, "log_every_steps", batch, found)


def _whole_calls(steps: int, key: str, batch: BatchSizes, found: Findings) -> int:
    calls = max(-(-steps // batch.device_iterations), 1)
    if calls * batch.device_iterations != steps:
        found.note(
            f"{key}={steps} is rounded up to {calls * batch.device_iterations}: a host call makes "
            f"{batch.device_iterations} weight updates"
        )
    return calls
