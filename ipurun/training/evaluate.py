"""Evaluation and prediction: run a split through the inference model in full batches, and drop the padding."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from ipurun.build import Run
from ipurun.build.cached_executables import compile_and_report
from ipurun.distributed.team import Team
from ipurun.errors import ConfigError, listing
from ipurun.inspect.batch_items import as_call, map_tensors, pick, split_target, target_of
from ipurun.inspect.lightning.logged import LoggedValues
from ipurun.metrics import Matrix, MetricSet
from ipurun.training.events import CompileEnd, CompileStart, DeviceWait, EvalProgress, Note, Observer
from ipurun.training.failures import explained, when_free
from ipurun.training.interrupts import WaitStoppedError
from ipurun.training.phases import COMPILE, DATA, Phases

__all__ = [
    "Evaluation",
    "add_to_metrics",
    "computed_metrics",
    "evaluate",
    "gathered",
    "output_of",
    "predict",
    "report_skipped",
]

Explain = Callable[[str], ContextManager[None]]  # what is being done -> the context that explains its failures


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    split: str
    metrics: Dict[str, float]
    samples: int
    seconds: float
    compile_seconds: float
    left_out: Tuple[int, ...] = ()  # indices of the samples that could not be read
    matrices: Mapping[str, Matrix] = field(default_factory=dict)


def evaluate(
    run: Run,
    observer: Observer,
    split: Optional[str] = None,
    should_stop: Callable[[], bool] = lambda: False,
    explain: Optional[Explain] = None,
    waiting: Callable[[], ContextManager[None]] = contextlib.nullcontext,
    phases: Optional[Phases] = None,
) -> Optional[Evaluation]:
    """Compute the loss and all evaluation metrics over a split.

    Args:
        run: The run; its device is switched to inference.
        observer: Notified of compilation.
        split: Name of the split, by default the run's `eval_split`.
        should_stop: Called after every host call.
        explain: Returns the context that explains failures; by default `explained` without a checkpoint.
        waiting: Returns the context in which a process that may hang is waited for. `WaitStoppedError` stops the
            evaluation.
        phases: A profiler.

    Returns:
        The result, None if it was stopped.

    Raises:
        ConfigError: The data has no such split.
        RunError: Compiling or running failed.
    """
    name = split or run.eval_split
    begun = time.perf_counter()
    compiling, samples, team = 0.0, 0, run.team
    total_loss, total_weight = 0.0, 0.0
    run.use_step(str(name))
    run.eval_metrics.reset()
    explain = explain or _explainer(run)
    phases = phases or Phases()
    for call in _until_stopped(_inference_calls(run, observer, name, explain, phases, waiting)):
        if call is None or should_stop():
            return None
        compiling += call.compile_seconds
        if isinstance(run.eval_metrics, LoggedValues):
            with explain("computing metrics"):
                loss, weight = _add_logged(run, call, run.eval_metrics)
        else:
            loss, weight = _loss_of(run, call)
        for its_samples, its_loss, its_weight in team.exchanged((call.real, loss, weight)):
            samples += its_samples
            total_loss += its_loss
            total_weight += its_weight
        observer.on_eval_progress(EvalProgress(str(name), samples, run.eval_loaders[str(name)].most_samples))
        if run.eval_metrics and not isinstance(run.eval_metrics, LoggedValues):
            rows = run.plan.local_inference.samples_per_call
            outputs = _without_padding(output_of(run, call.result), call.real, rows)
            targets = _without_padding(target_of(call.batch, run.config.loss.target), call.real, rows)
            with explain("computing metrics"):
                add_to_metrics(run.eval_metrics, team, outputs, targets, call.real)
    with explain("computing metrics"):
        values, matrices = computed_metrics(run.eval_metrics, team)
    if total_weight or run.steps is None:
        values = {"loss": total_loss / total_weight if total_weight else float("nan"), **values}
    report_skipped(run, observer)
    left_out = run.eval_loaders[str(name)].left_out
    seconds = time.perf_counter() - begun - compiling
    return Evaluation(str(name), values, samples, seconds, compiling, left_out, matrices)


def add_to_metrics(metrics: MetricSet, team: Team, outputs: Any, targets: Any, rows: Optional[int] = None) -> None:
    """Add a host call of all processes to metrics.

    Metrics that can be merged see only what this process has. What a LightningModule logs is seen by all processes,
    which may use it in its hooks. Others see everything, in the first process.

    Args:
        metrics: The metrics.
        team: The processes.
        outputs: The outputs of this process.
        targets: Their targets.
        rows: Samples among them, 0 if all are padding; None: all are samples.
    """
    if isinstance(metrics, LoggedValues):
        metrics.update(outputs if team.is_alone else _join(team.exchanged(outputs)), targets)
        return
    if team.is_alone or metrics.can_merge:
        if rows != 0:
            metrics.update(outputs, targets)
        return
    parts = [part for part in team.exchanged((outputs, targets) if rows != 0 else None) if part is not None]
    if team.is_first:
        metrics.update(_join([part[0] for part in parts]), _join([part[1] for part in parts]))


def computed_metrics(metrics: MetricSet, team: Team) -> Tuple[Dict[str, float], Mapping[str, Matrix]]:
    """Return the values of metrics over all processes, and what is a table rather than a number."""
    if team.is_alone or not metrics or isinstance(metrics, LoggedValues):
        return metrics.compute(), metrics.matrices
    if metrics.can_merge:
        for rank, parts in enumerate(team.exchanged(metrics.parts)):
            if rank != team.rank:
                metrics.merge(parts)
    values = metrics.compute() if team.is_first else {}
    found: Tuple[Dict[str, float], Mapping[str, Matrix]] = team.from_first((values, metrics.matrices))
    return found


def report_skipped(run: Run, observer: Observer) -> None:
    """Report samples that could not be read in any process, each once."""
    if run.config.loader.on_error != "skip":
        return
    for split, indices in run.skipped.share(run.team).items():
        which = f"sample {indices[0]}" if len(indices) == 1 else f"samples {listing(map(str, indices))}"
        data, instead = "the training data", "using the next one that can"
        if split != "train":
            data, instead = f"the split `{split}`", "left out"
        observer.on_note(
            Note(
                f"{which} of {data} could not be read ({run.skipped.last_error}); {instead}, "
                f"{run.skipped.total} of at most {run.skipped.most}",
                level="warning",
            )
        )


def predict(run: Run, split: str, observer: Observer, columns: Sequence[str] = ("output",)) -> Iterator[Dict[str, Any]]:
    """Yield the model's outputs for a split, one host call at a time, in the order of the data, without padding.

    Samples that cannot be read are left out, if the run skips them: see `EvalLoader.left_out`.

    Args:
        run: The run, with its weights loaded.
        split: Name of the split.
        observer: Notified of compilation.
        columns: What to yield: ``output``, ``input``, ``target`` and ``index``, the number of the sample in the split.
            The target is left out where the data has none.

    Raises:
        ConfigError: The data has no such split.
        RunError: Compiling or running failed.
    """
    rows, first = run.plan.local_inference.samples_per_call, 0
    run.use_step(split, predicts=True)
    for call in _inference_calls(run, observer, split, _explainer(run), Phases()):
        inputs, target = _inputs_and_target(call.batch, run.config.loss.target)
        found = {
            "index": _numbers(first, call.real, run.eval_loaders[split].left_out),
            "input": _without_padding(inputs, call.real, rows),
            "target": _without_padding(target, call.real, rows),
            "output": _without_padding(_prediction(run, call.result), call.real, rows),
        }
        first = int(found["index"][-1]) + 1
        yield {
            name: map_tensors(torch.clone, found[name])
            for name in columns
            if name != "target" or found[name] is not None
        }
    report_skipped(run, observer)


def gathered(parts: Iterator[Any]) -> Any:
    """Join the outputs of all host calls: tensors along their first dimension, inside equal containers."""
    listed = list(parts)
    return _join(listed) if listed else None


def output_of(run: Run, result: Any) -> Any:
    """Return the part of an executor's result that metrics compare with the target; all of what steps log."""
    if run.steps is not None:
        return result
    return pick(result[0], run.config.loss.output) if run.loss is not None else pick(result, None)


@dataclass(frozen=True)
class _InferenceCall:
    """One host call of inference, with padding."""

    batch: Any
    result: Any
    real: int  # number of leading rows that are samples, not padding
    compile_seconds: float


def _explainer(run: Run) -> Explain:
    return lambda doing: explained(run.engine.module, doing)


def _until_stopped(calls: Iterator[_InferenceCall]) -> Iterator[Optional[_InferenceCall]]:
    """Yield host calls, and None in place of the one whose data was no longer waited for."""
    try:
        yield from calls
    except WaitStoppedError:
        yield None


def _inference_calls(
    run: Run,
    observer: Observer,
    split: Optional[str],
    explain: Explain,
    phases: Phases,
    waiting: Callable[[], ContextManager[None]] = contextlib.nullcontext,
) -> Iterator[_InferenceCall]:
    """Run a split through the inference model, host call by host call."""
    if split not in run.eval_loaders:
        raise ConfigError(f"the data has no split `{split}`", known=", ".join(run.eval_loaders))
    with explain("switching the device to inference"):
        run.enter_inference()
    loader = run.eval_loaders[split]
    batches = iter(loader)
    while True:
        # Reading in this process may change the random state, and must come to its end.
        limited = waiting() if loader.uses_processes else contextlib.nullcontext()
        with phases.span(DATA), explain(f"reading the split `{split}`"), limited:
            item = next(batches, None)
        if item is None:
            return
        batch, real = item
        compiling = _compile_if_needed(run, observer, batch, explain, phases)
        args, kwargs = as_call(batch)
        with phases.span("inference call"), explain("running inference"):
            result = run.inference_model(*args, **kwargs)
        yield _InferenceCall(batch, result, real, compiling)


def _without_padding(value: Any, real: int, rows: int) -> Any:
    """Drop the rows that were added to fill a host call from all tensors."""
    if real == rows:
        return value

    def trim(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] % rows:
            return tensor
        return tensor[: real * (tensor.shape[0] // rows)]

    return map_tensors(trim, value)


def _compile_if_needed(run: Run, observer: Observer, batch: Any, explain: Explain, phases: Phases) -> float:
    if run.inference_model.isCompiled():
        return 0.0
    args, kwargs = as_call(batch)
    observer.on_compile_start(CompileStart("inference"))
    with phases.span(COMPILE), explain("compiling the model for inference"):
        compiled = when_free(
            lambda: compile_and_report(run, "inference", args, kwargs),
            run.engine.module,
            run.config.poplar.wait_for_ipu_minutes,
            lambda seconds_left: observer.on_device_wait(DeviceWait(seconds_left)),
        )
    observer.on_compile_end(
        CompileEnd("inference", compiled.seconds, compiled.cache, compiled.saved_seconds, compiled.why)
    )
    return compiled.seconds


def _loss_of(run: Run, call: _InferenceCall) -> Tuple[float, float]:
    """Return the weighted sum of a host call's losses, and the sum of the weights.

    The device returns one loss per micro-batch. For a micro-batch with padding the host recomputes it from the real
    rows; if the model computes its own loss, it is weighted by its share of real rows instead.
    """
    rows = run.plan.local_inference.samples_per_call
    size = run.plan.inference.micro_batch_size
    config = run.config.loss
    if run.loss is not None:
        losses = call.result[1].double().reshape(-1)
    else:
        losses = pick(call.result, config.output, loss=True).double().reshape(-1)
    if losses.numel() == rows and size > 1:
        return float(losses[: call.real].sum()), float(call.real)
    whole, left = divmod(call.real, size)
    total, weight = float(losses[:whole].sum()) * size, float(whole * size)
    if not left:
        return total, weight
    partial = float(losses[whole])
    if run.loss is not None:
        part = slice(whole * size, call.real)
        output = map_tensors(
            lambda t: t[part].float() if t.is_floating_point() else t[part], output_of(run, call.result)
        )
        target = map_tensors(lambda t: t[part], target_of(call.batch, config.target))
        with torch.no_grad(), explained(run.engine.module, "computing the loss of the last samples"):
            partial = float(run.loss(output, target).float().mean())
        if "sum" in (config.args.get("reduction"), run.loss.reduction):
            return total + partial * size, weight + left
    return total + partial * left, weight + left


def _add_logged(run: Run, call: _InferenceCall, logged: LoggedValues) -> Tuple[float, float]:
    """Add what the step of a LightningModule logged in all processes; return this one's loss sum and its weight.

    The host computes the micro-batch that is partly padding again without it, if it can: as Lightning does. The host
    calls of the processes follow each other in the data, so that together they are one whose padding is at its end.
    """
    size = run.plan.inference.micro_batch_size
    partial: Mapping[str, Any] = {}
    whole, left = divmod(call.real, size)
    if left and run.plan.precision == "32.32":
        part = map_tensors(lambda t: t[whole * size : call.real] if t.dim() else t, call.batch)
        args, kwargs = as_call(part)
        try:
            with torch.no_grad():
                partial = run.inference_wrapper(*args, **kwargs)
        except Exception:  # custom operations exist only on the device: the share of real rows is the weight then
            partial = {}
    calls = run.team.exchanged((call.result, call.real, partial))
    total, rows = sum(real for _, real, _ in calls), run.plan.inference.samples_per_call
    logged.add_weighted(
        call.result if run.team.is_alone else _join([result for result, _, _ in calls]),
        _rows_by_micro_batch(total, rows, size),
        lambda value: _without_padding(value, total, rows),
        next((found for _, _, found in calls if found), {}),
    )
    if "loss" not in call.result:
        return 0.0, 0.0
    own = _rows_by_micro_batch(call.real, run.plan.local_inference.samples_per_call, size)
    losses = call.result["loss"].double().reshape(-1).clone()
    if losses.numel() != own.numel():
        return float(losses.mean()) * call.real, float(call.real)
    if "loss" in partial:
        losses[whole] = float(partial["loss"])
    return float((losses * own).sum()), float(own.sum())


def _rows_by_micro_batch(real: int, rows: int, size: int) -> torch.Tensor:
    """Return how many samples of each micro-batch of a host call are not padding."""
    return torch.tensor([min(max(real - first, 0), size) for first in range(0, rows, size)])


def _prediction(run: Run, result: Any) -> Any:
    """Return what a model predicts, without the loss."""
    if run.steps is not None:
        return result
    return result[0] if run.loss is not None else _without_loss(run, result)


def _numbers(first: int, count: int, left_out: Sequence[int]) -> torch.Tensor:
    """Return the numbers of samples from one on, without those that could not be read."""
    if not left_out:
        return torch.arange(first, first + count)
    missing = set(left_out)
    return torch.tensor(list(itertools.islice((n for n in itertools.count(first) if n not in missing), count)))


def _inputs_and_target(batch: Any, target: Optional[str]) -> Tuple[Any, Any]:
    """Return the items of a batch without the target, and the target; None where there is none."""
    args, kwargs = as_call(batch)
    try:
        args, kwargs, found = split_target(args, kwargs, target)
    except ConfigError:
        found = None
    inputs: Any = kwargs if kwargs and not args else args
    return inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs, found


def _without_loss(run: Run, result: Any) -> Any:
    """Return the outputs of a model that computes its own loss, without the loss if it can be identified."""
    output = run.config.loss.output
    if isinstance(result, Mapping):
        name = output or "loss"
        return {key: value for key, value in result.items() if key != name}
    if isinstance(result, (list, tuple)) and len(result) > 1:
        index = int(output) if output is not None else len(result) - 1
        rest = [value for number, value in enumerate(result) if number != index % len(result)]
        return rest[0] if len(rest) == 1 else tuple(rest)
    return result


def _join(parts: List[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.dim() else torch.stack(parts)
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_join([part[index] for part in parts]) for index in range(len(first))]
    return parts
