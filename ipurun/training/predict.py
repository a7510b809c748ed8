"""Prediction: what the model says about every sample of a split."""

from __future__ import annotations

from typing import Any, Iterator, List, Mapping

import torch

from ipurun.build import Run
from ipurun.inspect.batch_items import map_tensors
from ipurun.training.evaluate import inference_calls, trimmed
from ipurun.training.events import Observer

__all__ = ["gathered", "predict"]


def predict(run: Run, split: str, observer: Observer) -> Iterator[Any]:
    """The model's outputs for a split, one host call at a time, in the order of the data, without padding.

    Args:
        run: The run, with its weights loaded.
        split: Name of the split.
        observer: Hears of compilation.

    Raises:
        ConfigError: There is no such split.
        RunError: Compiling or running failed.
    """
    for call in inference_calls(run, observer, split):
        result = call.result[0] if run.loss is not None else _without_loss(run, call.result)
        yield map_tensors(torch.clone, trimmed(result, call.real, run.plan.inference.samples_per_call))


def gathered(parts: Iterator[Any]) -> Any:
    """All host calls' outputs in one: tensors joined along their first dimension, containers kept."""
    listed = list(parts)
    return _join(listed) if listed else None


def _without_loss(run: Run, result: Any) -> Any:
    """Outputs of a model that computes its own loss, that loss left out where it can be told apart."""
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
