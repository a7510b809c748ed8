"""An average of the weights over training, computed on the host between host calls."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Mapping, Optional

import torch

from ipurun.build import Run

__all__ = ["WeightAverage"]


class WeightAverage:
    """The exponential moving average of a run's weights, or the mean over the last part of the run.

    The host sees the weights only after the `device_iterations` updates of a host call, so the decay of that many
    updates is applied at once. The first reading is the first average. Buffers are averaged as well (those of batch
    norm belong to the weights), except for integers, which are copied. Half precision is averaged in float32: its steps
    are too coarse for small changes.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config = run.config.averaging
        self._start = start_of_average(run)
        self._values: Dict[str, torch.Tensor] = {}
        self._readings = 0
        self._step = 0  # at the last reading

    @property
    def exists(self) -> bool:
        """Whether the weights have been read."""
        return self._readings > 0

    def read_if_due(self, step: int, call: int) -> None:
        """Add the present weights to the average, every so many host calls.

        Args:
            step: Weight updates done.
            call: Host calls done.
        """
        if step <= self._start or call % self._config.every_calls:
            return
        self._run.training_model.copyWeightsToHostIfNeeded()
        with torch.no_grad():
            self._add(self._run.user_model.state_dict(), step - self._step)
        self._readings += 1
        self._step = step

    def _add(self, weights: Mapping[str, torch.Tensor], updates: int) -> None:
        if not self._readings:
            self._values = {name: _at_full_precision(value).clone() for name, value in weights.items()}
            return
        share = 1 - self._config.decay**updates if self._config.kind == "ema" else 1 / (self._readings + 1)
        for name, average in self._values.items():
            value = _at_full_precision(weights[name])
            if not average.is_floating_point():
                average.copy_(value)
            elif not torch.equal(average, value):  # a mask may be infinite, and infinity minus infinity is nan
                average.lerp_(value, share)

    def state(self) -> Dict[str, Any]:
        """Return what a checkpoint needs; empty without a reading."""
        if not self._readings:
            return {}
        values = {name: value.clone() for name, value in self._values.items()}
        return {"model": values, "readings": self._readings, "step": self._step, "kind": self._config.kind}

    def restore(self, state: Optional[Mapping[str, Any]]) -> None:
        """Take the state of a checkpoint; without one, or after another kind of average, begin again."""
        self._values, self._readings, self._step = {}, 0, 0
        if state and state["kind"] == self._config.kind:
            self._values = dict(state["model"])
            self._readings, self._step = int(state["readings"]), int(state["step"])

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Put the average in the place of the weights, for inference; the training model must not use the device."""
        model = self._run.user_model
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self._load(self._values)
        try:
            yield
        finally:
            self._load(weights)

    def _load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the model; inference attaches with them."""
        executor = self._run.inference_model
        if executor.isCompiled() and executor.isAttachedToDevice():
            executor.detachFromDevice()
        self._run.user_model.load_state_dict(values)


def start_of_average(run: Run) -> int:
    """Return the weight update after which the average begins."""
    config, total = run.config.averaging, run.plan.steps.total_updates
    if config.start_step is not None or config.kind == "ema":
        return config.start_step or 0
    assert total is not None  # planning refuses a tail of unknown length
    return total * 3 // 4


def _at_full_precision(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach().as_subclass(torch.Tensor)
    return plain.float() if plain.dtype in (torch.float16, torch.bfloat16) else plain
