"""Evaluation and prediction: run a split through the inference model in full batches, and drop the padding."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Tuple

import torch

from ipurun.build import Run
from ipurun.errors import ConfigError, listing
from ipurun.inspect.batch_items import as_call, map_tensors, pick, target_of
from ipurun.training.events import CompileEnd, CompileStart, InferenceProgress, Note, Observer
from ipurun.training.failures import explained
from ipurun.training.interrupts import WaitStoppedError

__all__ = ["Evaluation", "evaluate", "gathered", "output_of", "predict", "report_skipped"]

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


def evaluate(
    run: Run,
    observer: Observer,
    split: Optional[str] = None,
    should_stop: Callable[[], bool] = lambda: False,
    explain: Optional[Explain] = None,
    waiting: Callable[[], ContextManager[None]] = contextlib.nullcontext,
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

    Returns:
        The result, None if it was stopped.

    Raises:
        ConfigError: The data has no such split.
        RunError: Compiling or running failed.
    """
    name = split or run.eval_split
    begun = time.perf_counter()
    compiling, samples = 0.0, 0
    total_loss, total_weight = 0.0, 0.0
    run.eval_metrics.reset()
    explain = explain or _explainer(run)
    for call in _until_stopped(_inference_calls(run, observer, name, explain, waiting)):
        if call is None or should_stop():
            return None
        compiling += call.compile_seconds
        samples += call.real
        loss, weight = _loss_of(run, call)
        total_loss += loss
        total_weight += weight
        if run.eval_metrics:
            rows = run.plan.inference.samples_per_call
            outputs = _without_padding(output_of(run, call.result), call.real, rows)
            targets = _without_padding(target_of(call.batch, run.config.loss.target), call.real, rows)
            with explain("computing metrics"):
                run.eval_metrics.update(outputs, targets)
    values = {"loss": total_loss / total_weight if total_weight else float("nan"), **run.eval_metrics.compute()}
    report_skipped(run, observer)
    left_out = run.eval_loaders[str(name)].left_out
    return Evaluation(str(name), values, samples, time.perf_counter() - begun - compiling, compiling, left_out)


def report_skipped(run: Run, observer: Observer) -> None:
    """Report samples that could not be read, each once."""
    for split, indices in run.skipped.unreported().items():
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


def predict(run: Run, split: str, observer: Observer) -> Iterator[Any]:
    """Yield the model's outputs for a split, one host call at a time, in the order of the data, without padding.

    Samples that cannot be read are left out, if the run skips them: see `EvalLoader.left_out`.

    Args:
        run: The run, with its weights loaded.
        split: Name of the split.
        observer: Notified of compilation.

    Raises:
        ConfigError: The data has no such split.
        RunError: Compiling or running failed.
    """
    for call in _inference_calls(run, observer, split, _explainer(run)):
        result = call.result[0] if run.loss is not None else _without_loss(run, call.result)
        yield map_tensors(torch.clone, _without_padding(result, call.real, run.plan.inference.samples_per_call))
    report_skipped(run, observer)


def gathered(parts: Iterator[Any]) -> Any:
    """Join the outputs of all host calls: tensors along their first dimension, inside equal containers."""
    listed = list(parts)
    return _join(listed) if listed else None


def output_of(run: Run, result: Any) -> Any:
    """Return the part of an executor's result that metrics compare with the target."""
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
    waiting: Callable[[], ContextManager[None]] = contextlib.nullcontext,
) -> Iterator[_InferenceCall]:
    """Run a split through the inference model, host call by host call."""
    if split not in run.eval_loaders:
        raise ConfigError(f"the data has no split `{split}`", known=", ".join(run.eval_loaders))
    with explain("switching the device to inference"):
        run.enter_inference()
    loader = run.eval_loaders[split]
    batches = iter(loader)
    done = 0
    while True:
        # Reading in this process may change the random state, and must come to its end.
        with explain(f"reading the split `{split}`"), waiting() if loader.uses_processes else contextlib.nullcontext():
            item = next(batches, None)
        if item is None:
            return
        batch, real = item
        compiling = _compile_if_needed(run, observer, batch, explain)
        args, kwargs = as_call(batch)
        with explain("running inference"):
            result = run.inference_model(*args, **kwargs)
        done += real
        observer.on_inference(InferenceProgress(str(split), done, loader.most_samples))
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


def _compile_if_needed(run: Run, observer: Observer, batch: Any, explain: Explain) -> float:
    if run.inference_model.isCompiled():
        return 0.0
    args, kwargs = as_call(batch)
    observer.on_compile_start(CompileStart("inference"))
    begun = time.perf_counter()
    with explain("compiling the model for inference"):
        run.model_with_loss.tracing_flag.retry(lambda: run.inference_model.compile(*args, **kwargs))
    seconds = time.perf_counter() - begun
    observer.on_compile_end(CompileEnd("inference", seconds))
    return seconds


def _loss_of(run: Run, call: _InferenceCall) -> tuple[float, float]:
    """Return the weighted sum of a host call's losses, and the sum of the weights.

    The device returns one loss per micro-batch. For a micro-batch with padding the host recomputes it from the real
    rows; if the model computes its own loss, it is weighted by its share of real rows instead.
    """
    rows = run.plan.inference.samples_per_call
    size = run.plan.inference.micro_batch_size
    config = run.config.loss
    if run.loss is not None:
        losses = call.result[1].float().reshape(-1)
    else:
        losses = pick(call.result, config.output, loss=True).float().reshape(-1)
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
