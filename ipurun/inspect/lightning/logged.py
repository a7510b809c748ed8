"""Values logged by the steps of a LightningModule, reduced over micro-batches, replicas, iterations and epochs."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch

from ipurun.inspect.facts import LoggedValue
from ipurun.inspect.lightning.steps import (
    KEPT,
    LOG,
    MARKS,
    METRIC,
    RETURNED,
    Steps,
    epoch_end_of_outputs,
    metric_modules,
)
from ipurun.inspect.lightning.trainer import overrides
from ipurun.metrics import MetricSet

__all__ = ["LoggedValues", "logged_monitor"]

_LOWER_IS_BETTER = re.compile(r"loss|err|mse|mae|perplexity|ppl|nll|wer|cer|fid|distance", re.IGNORECASE)


def logged_monitor(logged: Mapping[str, Any]) -> str:
    """Return the value that selects the best checkpoint if none is chosen: a loss, else the first one logged."""
    names = [name for name in logged if name not in MARKS]
    return next((name for name in names if "loss" in name.lower()), names[0] if names else "loss")


@dataclass
class _Reduced:
    """A value reduced over what was added so far."""

    total: float = 0.0
    weight: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    updates: int = 0

    def add(self, values: torch.Tensor, weights: torch.Tensor, scale: float, updates: int) -> None:
        """Add values with their weights; each is the sum of `scale` micro-batches."""
        self.total += float((values * weights).sum()) * scale
        self.weight += float(weights.sum()) * scale
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self.updates += updates

    def value(self, reduction: str, by_update: bool = False) -> float:
        """Return the reduced value; a sum of one weight update, or of all."""
        if not self.weight:
            return math.nan
        if reduction == "sum":
            return self.total / self.updates if by_update else self.total
        return {"mean": self.total / self.weight, "min": self.low, "max": self.high}[reduction]


class LoggedValues(MetricSet):
    """The values that one kind of step logs, as a set of metrics.

    Args:
        steps: The steps of the model.
        kind: training, validation or test.
        known: What the step logs, as found before the run; the step itself tells when it is traced.
        micro_batches: Micro-batches of a host call.
        updates: Weight updates of a host call.
        sums: Whether the device returns sums over the micro-batches of a host call.
    """

    def __init__(
        self,
        steps: Steps,
        kind: str,
        known: Mapping[str, LoggedValue],
        micro_batches: int = 1,
        updates: int = 1,
        sums: bool = False,
    ) -> None:
        super().__init__({})
        self._steps = steps
        self.kind = kind
        self._known = known
        self._micro_batches = micro_batches
        self._updates = updates
        self._sums = sums
        self._window: Dict[str, _Reduced] = {}
        self._epoch: Dict[str, _Reduced] = {}
        self._objects = metric_modules(steps.model)
        self._window_objects: Dict[str, Any] = {}
        self._returned: List[Any] = []  # by the steps of this epoch, if the model asks for it

    def __bool__(self) -> bool:
        return bool(self._specs or self._known or self._epoch_ends()) or self.kind != "training"

    @property
    def _specs(self) -> Mapping[str, LoggedValue]:
        return self._steps.logged.get(self.kind) or {k: v for k, v in self._known.items() if k not in MARKS}

    @property
    def has_epoch_values(self) -> bool:
        """Whether the end of an epoch has values."""
        return any(spec.on_epoch for spec in self._specs.values()) or bool(self._epoch_ends())

    def reset(self) -> None:
        """Start over; for training, with the values between two log lines."""
        self._window = {}
        self._window_objects = {}
        if self.kind != "training":
            self._start_epoch()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add the outputs of a host call of training."""
        for name, value in outputs.items():
            if name.startswith(LOG):
                found = value.detach().double().reshape(-1)
                scale = 1.0 if self._sums else self._micro_batches / max(found.numel(), 1)
                weights = torch.ones_like(found)
                self._add(name[len(LOG) :], found, weights, scale)
        self._update_objects(outputs, [1] * self._micro_batches)
        self._keep(outputs, self._micro_batches, self._micro_batches)

    def add_weighted(
        self, outputs: Mapping[str, Any], rows: torch.Tensor, keep: Any, partial: Mapping[str, Any]
    ) -> None:
        """Add the outputs of a host call of evaluation.

        Args:
            outputs: What the device returned.
            rows: Samples of each micro-batch that are not padding.
            keep: Drops the rows of padding from an output.
            partial: Values of the micro-batch that is partly padding, computed without it, by output.
        """
        for name, value in outputs.items():
            if not name.startswith(LOG):
                continue
            found = value.detach().double().reshape(-1)
            if name in partial:
                found = found.clone()
                found[int((rows > 0).sum()) - 1] = float(partial[name])
            fits = found.numel() == rows.numel()
            used = rows > 0 if fits else torch.ones_like(found, dtype=torch.bool)
            weights = rows.double()[used] if fits else torch.ones_like(found)
            if self._reduction(name[len(LOG) :]) == "sum":
                weights = torch.ones_like(weights)
            self._add(name[len(LOG) :], found[used], weights, 1.0)
        kept = {name: keep(value) for name, value in outputs.items() if name.startswith(METRIC)}
        self._update_objects(kept, [int(row) for row in rows if row])
        self._keep(outputs, rows.numel(), int((rows > 0).sum()), keep, partial)

    def compute(self) -> Dict[str, float]:
        """Return the values since the last log line, or of an evaluation."""
        values: Dict[str, float] = {}
        self.matrices = {}
        if self.kind == "training":
            for name, spec in self._specs.items():
                if spec.on_step:
                    values[f"{name}_step" if spec.on_epoch else name] = self._value(spec, self._window, by_update=True)
            return {name: value for name, value in values.items() if not math.isnan(value)}
        for name, spec in self._specs.items():
            found = self._value(spec, self._epoch)
            values[name] = found
            if spec.on_step and spec.on_epoch:
                values[f"{name}_epoch"] = found
        values.update(self._call_epoch_ends(values))
        return values

    def moved_to(self, epoch: int, step: int) -> None:
        """Let the model know where the run is."""
        self._steps.trainer.moved_to(epoch, step)

    def end_epoch(self) -> Dict[str, float]:
        """Return the values of a training epoch, and begin the next one."""
        values = {
            f"{name}_epoch" if spec.on_step else name: self._value(spec, self._epoch)
            for name, spec in self._specs.items()
            if spec.on_epoch
        }
        values.update(self._call_epoch_ends(values))
        self._start_epoch()
        return values

    def state(self) -> Dict[str, Any]:
        """Return the values of the epoch so far, for a checkpoint."""
        return {name: list(vars(reduced).values()) for name, reduced in self._epoch.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the values of a checkpoint."""
        self._epoch = {name: _Reduced(*values) for name, values in state.items()}

    def monitor_among(self, values: Mapping[str, float]) -> Optional[str]:
        """Return the value to monitor where none was chosen: hooks for the end of an epoch may log all there are."""
        return logged_monitor(values) if values else None

    def higher_is_better(self, name: str) -> bool:
        """Return the direction of a value: of a loss or an error lower is better."""
        return super().higher_is_better(name) and not _LOWER_IS_BETTER.search(name)

    def _start_epoch(self) -> None:
        self._epoch = {}
        self._returned = []
        for path in {spec.metric for spec in self._specs.values() if spec.metric} or self._objects:
            self._objects[path].reset()

    def _reduction(self, name: str) -> str:
        spec = self._specs.get(name)
        return "mean" if spec is None else spec.reduction

    def _add(self, name: str, values: torch.Tensor, weights: torch.Tensor, scale: float) -> None:
        if not values.numel():
            return
        if self._sums:  # of the micro-batches of each replica
            share = self._micro_batches / values.numel()
            values, weights, scale = values / share, weights * share, 1.0
        for kept in (self._window, self._epoch):
            kept.setdefault(name, _Reduced()).add(values, weights, scale, self._updates)

    def _update_objects(self, outputs: Mapping[str, Any], weights: List[int]) -> None:
        """Pass what the metric objects received to them; `weights` are those of the micro-batches."""
        calls: Dict[Tuple[str, str], Dict[str, Any]] = {}
        for name, value in outputs.items():
            if name.startswith(METRIC):
                path, number, key = name[len(METRIC) :].rsplit(":", 2)
                calls.setdefault((path, number), {})[key] = value.long() if _is_int(value) else value.float()
        by_step = {spec.metric for spec in self._specs.values() if spec.metric and spec.on_step}
        for (path, _), arguments in calls.items():
            positional = [arguments[key] for key in sorted(filter(str.isdigit, arguments), key=int)]
            named = {key: value for key, value in arguments.items() if not key.isdigit()}
            metrics: List[Any] = [self._objects[path]]
            if self.kind == "training" and path in by_step:
                if path not in self._window_objects:
                    self._window_objects[path] = copy.deepcopy(self._objects[path])
                    self._window_objects[path].reset()
                metrics.append(self._window_objects[path])
            for metric in metrics:
                metric.update(*positional, **named)
            self._add_batch_values(path, positional, named, weights)

    def _add_batch_values(self, path: str, positional: List[Any], named: Dict[str, Any], weights: List[int]) -> None:
        """Add what a metric object computes for each micro-batch alone, where that was logged."""
        specs = [spec for spec in self._specs.values() if spec.metric == path and spec.by_batch]
        if not specs:
            return
        rows = [*positional, *named.values()][0].shape[0] // sum(weights)
        sizes = [rows * weight for weight in weights]
        by_position = [value.split(sizes) for value in positional]
        by_name = {key: value.split(sizes) for key, value in named.items()}
        for number, weight in enumerate(weights):
            metric = copy.deepcopy(self._objects[path])
            metric.reset()
            metric.update(
                *(parts[number] for parts in by_position), **{key: parts[number] for key, parts in by_name.items()}
            )
            found = metric.compute()
            for spec in specs:
                value = torch.as_tensor(_logged(spec, found)).double()
                self._add(spec.name, value.reshape(1), torch.tensor([float(weight)], dtype=torch.float64), 1.0)

    def _keep(
        self,
        outputs: Mapping[str, Any],
        micro_batches: int,
        real: int,
        keep: Any = lambda value: value,
        partial: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Append to the model's own lists what its step appended to them, for each micro-batch."""
        items: Dict[Tuple[str, str], Dict[str, Any]] = {}
        for name, value in outputs.items():
            if name.startswith(KEPT):
                attribute, number, rest = name[len(KEPT) :].split(":", 2)
                key, dims = rest.rsplit(":", 1)
                if dims == "0":
                    parts = [part.reshape(()) for part in value.reshape(-1)[:real]]
                else:
                    size = max(value.shape[0] // micro_batches, 1)
                    parts = list(keep(value).split(size))
                if name in partial and len(parts) == real:
                    parts[-1] = partial[name].detach()
                items.setdefault((attribute, number), {})[key] = parts
        for (attribute, _), by_key in items.items():
            kept = self._returned if attribute == RETURNED else getattr(self._steps.model, attribute)
            for place in range(real):
                item = {key: parts[place] for key, parts in by_key.items() if place < len(parts)}
                kept.append(item[""] if set(item) == {""} else item)

    def _value(self, spec: LoggedValue, kept: Mapping[str, _Reduced], by_update: bool = False) -> float:
        if spec.metric is None or spec.by_batch:
            reduced = kept.get(spec.name)
            return math.nan if reduced is None else reduced.value(spec.reduction, by_update)
        metric: Optional[Any] = (self._window_objects if by_update else self._objects).get(spec.metric)
        if metric is None:
            return math.nan
        return float(_logged(spec, metric.compute()))

    def _epoch_ends(self) -> List[Callable[[], Any]]:
        """Return the model's own hooks for the end of an epoch."""
        model = self._steps.model
        hook = "on_train_epoch_end" if self.kind == "training" else f"on_{self.kind}_epoch_end"
        of_outputs = epoch_end_of_outputs(model, self.kind)
        found: List[Callable[[], Any]] = [] if of_outputs is None else [lambda: of_outputs(self._returned)]
        return [*found, getattr(model, hook)] if overrides(model, hook) else found

    def _call_epoch_ends(self, known: Mapping[str, float]) -> Dict[str, float]:
        """Call the model's own hooks on the host, which may read the known values; what they log joins them."""
        hooks = self._epoch_ends()
        values: Dict[str, float] = {}
        if not hooks:
            return values
        for shown in (self._steps.trainer.callback_metrics, self._steps.trainer.logged_metrics):
            shown.update({name: torch.tensor(value) for name, value in known.items()})

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            values[name] = float(value.compute() if hasattr(value, "compute") else value)

        def log_dict(dictionary: Any, *_: Any, **__: Any) -> None:
            for name, value in dictionary.items():
                log(name, value)

        own = vars(self._steps.model)
        own["log"], own["log_dict"] = log, log_dict
        try:
            for hook in hooks:
                hook()
        finally:
            del own["log"], own["log_dict"]
        return values


def _logged(spec: LoggedValue, computed: Any) -> Any:
    """Return what is logged of what a metric object computed."""
    value = computed[spec.metric_key] if spec.metric_key is not None else computed
    return value if spec.then is None else spec.then(value)


def _is_int(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and value.dtype != torch.bool
