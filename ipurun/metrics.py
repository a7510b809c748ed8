"""Metrics, computed on the host from the outputs of the device."""

from __future__ import annotations

import math
from collections.abc import Mapping  # quicker to ask for than typing's, which every step would pay
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

__all__ = [
    "BUILT_IN",
    "F1",
    "Accuracy",
    "BinaryAccuracy",
    "ConfusionMatrix",
    "Matrix",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "MetricSet",
    "Perplexity",
    "RootMeanSquaredError",
    "TopKAccuracy",
]

_AVERAGES = ("ema_", "tail_")  # begin the names of metrics of averaged weights


Matrix = List[List[float]]


class Metric:
    """A metric that is a sum over items divided by their number.

    Subclasses define `measure`. One with further state overrides `reset`, `update` and `compute`.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def reset(self) -> None:
        """Start over."""
        self.total, self.count = 0.0, 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add one batch."""
        total, count = self.measure(outputs, targets)
        self.total += float(total)
        self.count += int(count)

    def merge(self, other: Any) -> None:
        """Add what another process has seen."""
        self.total += other.total
        self.count += other.count

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        """Return the sum over a batch, and its number of items."""
        raise NotImplementedError

    def compute(self) -> float:
        """Return the value over all batches."""
        return self.total / self.count if self.count else math.nan


class Accuracy(Metric):
    """Share of targets whose class has the largest score.

    Scores are ``[N, C, ...]`` for targets ``[N, ...]``, or ``[N, ..., C]`` where only that fits (language models).

    Args:
        ignore_index: Targets with this value are ignored.
    """

    def __init__(self, ignore_index: Optional[int] = None) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        scores, classes = _flat_scores(outputs, targets, self.ignore_index)
        return scores.argmax(dim=1).eq_(classes).count_nonzero().item(), classes.numel()


class TopKAccuracy(Accuracy):
    """Share of targets whose class is among the ``k`` largest scores."""

    def __init__(self, k: int = 5, ignore_index: Optional[int] = None) -> None:
        super().__init__(ignore_index)
        self.k = k

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        scores, classes = _flat_scores(outputs, targets, self.ignore_index)
        best = scores.topk(min(self.k, scores.shape[1]), dim=1).indices
        return (best == classes.unsqueeze(1)).any(dim=1).sum().item(), classes.numel()


class BinaryAccuracy(Metric):
    """Share of targets (0 or 1) that agree with whether the score reaches the threshold.

    Args:
        threshold: 0 for logits, 0.5 for probabilities.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        predicted = outputs.float().reshape(-1) >= self.threshold
        return (predicted == (targets.reshape(-1) > 0.5)).sum().item(), targets.numel()


class MeanSquaredError(Metric):
    """Mean of squared differences over all elements."""

    higher_is_better = False

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        difference = _difference(outputs, targets)
        return difference.square().sum().item(), difference.numel()


class RootMeanSquaredError(MeanSquaredError):
    """Square root of the mean of squared differences."""

    def compute(self) -> float:
        return math.sqrt(super().compute())


class MeanAbsoluteError(Metric):
    """Mean of absolute differences over all elements."""

    higher_is_better = False

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        difference = _difference(outputs, targets)
        return difference.abs().sum().item(), difference.numel()


class Perplexity(Metric):
    """Exponential of the mean cross-entropy per target."""

    higher_is_better = False

    def __init__(self, ignore_index: Optional[int] = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        scores, classes = _flat_scores(outputs, targets, self.ignore_index)
        if not classes.numel():
            return 0.0, 0
        return torch.nn.functional.cross_entropy(scores, classes, reduction="sum").item(), classes.numel()

    def compute(self) -> float:
        mean = super().compute()
        return math.exp(mean) if mean < 700 else math.inf


class F1(Metric):
    """F1 score averaged over the classes that occur (macro average), or of each class.

    Args:
        ignore_index: Targets with this value are ignored.
        average: ``macro``, or ``none`` for the score of each class as well.
    """

    def __init__(self, ignore_index: Optional[int] = None, average: str = "macro") -> None:
        super().__init__()
        if average not in ("macro", "none"):
            raise ValueError(f"average is macro or none, not {average}")
        self.ignore_index = ignore_index
        self.average = average
        self._counts: Dict[int, List[int]] = {}

    def reset(self) -> None:
        """Start over."""
        self._counts = {}

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add one batch."""
        scores, classes = _flat_scores(outputs, targets, self.ignore_index)
        predicted = scores.argmax(dim=1)
        for number in torch.cat([predicted, classes]).unique().tolist():
            hits = int(((predicted == number) & (classes == number)).sum())
            seen = self._counts.setdefault(number, [0, 0, 0])
            seen[0] += hits
            seen[1] += int((predicted == number).sum())
            seen[2] += int((classes == number).sum())

    def merge(self, other: Any) -> None:
        """Add what another process has seen."""
        for number, counts in other._counts.items():
            seen = self._counts.setdefault(number, [0, 0, 0])
            seen[:] = [own + added for own, added in zip(seen, counts)]

    def compute(self) -> Any:
        """Return the value over all batches; for each class a vector, with NaN for classes that do not occur."""
        scores = {number: 2 * hits / (predicted + actual) for number, (hits, predicted, actual) in self._counts.items()}
        if self.average == "macro":
            return sum(scores.values()) / len(scores) if scores else math.nan
        return torch.tensor([scores.get(number, math.nan) for number in range(max(scores, default=-1) + 1)])


class ConfusionMatrix(Metric):
    """Confusion matrix: how often each class (row) was predicted as each class (column).

    Args:
        ignore_index: Targets with this value are ignored.
    """

    def __init__(self, ignore_index: Optional[int] = None) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self._counts = torch.zeros(0, 0, dtype=torch.int64)

    def reset(self) -> None:
        """Start over."""
        self._counts = torch.zeros(0, 0, dtype=torch.int64)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add one batch."""
        scores, classes = _flat_scores(outputs, targets, self.ignore_index)
        size = max(scores.shape[1], len(self._counts))
        found = torch.bincount(classes * size + scores.argmax(dim=1), minlength=size * size).reshape(size, size)
        self._add(found)

    def merge(self, other: Any) -> None:
        """Add what another process has seen."""
        self._add(other._counts)

    def _add(self, counts: torch.Tensor) -> None:
        size = max(len(counts), len(self._counts))
        total = torch.zeros(size, size, dtype=torch.int64)
        for part in (counts, self._counts):
            total[: len(part), : len(part)] += part
        self._counts = total

    def compute(self) -> Any:
        """Return the counts over all batches."""
        return self._counts


BUILT_IN: Mapping[str, type] = {
    "accuracy": Accuracy,
    "top_k_accuracy": TopKAccuracy,
    "top5": TopKAccuracy,
    "binary_accuracy": BinaryAccuracy,
    "f1": F1,
    "confusion_matrix": ConfusionMatrix,
    "mse": MeanSquaredError,
    "rmse": RootMeanSquaredError,
    "mae": MeanAbsoluteError,
    "perplexity": Perplexity,
}


class MeanOf(Metric):
    """A plain function of (outputs, targets), averaged over batches weighted by their rows."""

    def __init__(self, function: Callable[[Any, Any], Any], higher_is_better: bool = True) -> None:
        super().__init__()
        self.function = function
        self.higher_is_better = higher_is_better

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, int]:
        rows = len(outputs) if isinstance(outputs, torch.Tensor) and outputs.dim() else 1
        return float(self.function(outputs, targets)) * rows, rows


class MetricSet:
    """Named metrics that are reset, updated and computed together.

    Args:
        metrics: Name -> an object with ``reset``, ``update(outputs, targets)`` and ``compute``, as in torchmetrics.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = dict(metrics)
        self.matrices: Dict[str, Matrix] = {}  # what `compute` found that is a table rather than a number
        self.directions: Dict[str, bool] = {}  # of metrics that callbacks add: whether higher is better

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def reset(self) -> None:
        """Start over."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch; half precision is converted to float32, which CPUs compute faster."""
        if isinstance(outputs, torch.Tensor) and outputs.dtype != torch.float32 and outputs.is_floating_point():
            outputs = outputs.float()
        for metric in self._metrics.values():
            metric.update(outputs, targets)

    @property
    def can_merge(self) -> bool:
        """Whether all metrics can add what other processes have seen: a class that adds batches its own way must."""
        return all(_defines(metric, "merge") <= _defines(metric, "update") for metric in self._metrics.values())

    @property
    def parts(self) -> Dict[str, Any]:
        """State of each metric, to be merged in another process; functions are left out."""
        return {
            name: SimpleNamespace(**{key: value for key, value in vars(metric).items() if not callable(value)})
            for name, metric in self._metrics.items()
        }

    def merge(self, parts: Mapping[str, Any]) -> None:
        """Add the `parts` of another process."""
        for name, metric in self._metrics.items():
            metric.merge(parts[name])

    def compute(self) -> Dict[str, float]:
        """Return the value of each metric.

        One that returns a mapping becomes ``name/key`` values. One with a value for each class becomes ``name/number``
        values and ``name``, their mean without NaN. A table is kept in `matrices`.

        Raises:
            ValueError: A metric has a value of another kind, such as a curve.
        """
        values: Dict[str, float] = {}
        self.matrices = {}
        for name, metric in self._metrics.items():
            value = metric.compute()
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                self.matrices[name] = value.tolist()
            elif isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() != 1:
                values[name] = float(value.float().nanmean())
                values.update({f"{name}/{number}": float(item) for number, item in enumerate(value)})
            elif isinstance(value, Mapping):
                values.update({f"{name}/{key}": float(item) for key, item in value.items()})
            else:
                try:
                    values[name] = float(value)
                except (TypeError, ValueError, RuntimeError) as error:
                    kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                    kinds = "a number, one for each class, a matrix or a mapping of numbers"
                    raise ValueError(f"the value of `metrics.{name}` is not {kinds} ({kind})") from error
        return values

    @property
    def has_epoch_values(self) -> bool:
        """Whether the end of a training epoch has values."""
        return False

    def moved_to(self, epoch: int, step: int) -> None:
        """Note where the run is: the epoch, counted from 0, and the weight updates that were made."""

    def end_epoch(self) -> Dict[str, float]:
        """Return the values of a training epoch, and begin the next one."""
        return {}

    def state(self) -> Dict[str, Any]:
        """Return what a checkpoint keeps of the epoch so far."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""

    def monitor_among(self, values: Mapping[str, float]) -> Optional[str]:
        """Return the value to monitor where none was chosen and only an evaluation shows which there are."""
        return None

    def higher_is_better(self, name: str) -> bool:
        """Return the direction of a metric: as it declares, else higher is better, except for the loss."""
        if name in self.directions:
            return self.directions[name]
        for prefix in _AVERAGES:
            if name not in self._metrics and name.startswith(prefix):
                name = name[len(prefix) :]
        metric = self._metrics.get(name)
        declared = getattr(metric, "higher_is_better", None)
        return bool(declared) if declared is not None else name != "loss"


def _defines(metric: Any, method: str) -> float:
    """Return how far up the classes of a metric the first one is that defines a method; infinity if none does."""
    classes = type(metric).__mro__
    return next((place for place, kind in enumerate(classes) if method in vars(kind)), math.inf)


def _flat_scores(
    outputs: torch.Tensor, targets: torch.Tensor, ignore_index: Optional[int]
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return scores as [items, classes] and targets as [items], without ignored targets."""
    if targets.dim() == outputs.dim() and targets.shape == outputs.shape and targets.is_floating_point():
        targets = targets.argmax(dim=1)  # class probabilities, one-hot or smoothed
    if (
        ignore_index is None
        and targets.dtype == torch.int64
        and outputs.shape[:-1] == targets.shape == outputs.shape[:1]
    ):
        return outputs, targets  # the usual case, at the least cost for each step
    one_per_row = outputs.dim() == 2 and targets.numel() == outputs.shape[0]
    if outputs.dim() == targets.dim() + 1 and outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        outputs = outputs.movedim(1, -1)
    elif not one_per_row and (not outputs.dim() or outputs.shape[:-1] != targets.shape):
        raise ValueError(f"scores of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}")
    scores = outputs.reshape(-1, outputs.shape[-1])
    classes = targets.reshape(-1).long()
    if ignore_index is None:
        return scores, classes
    counted = classes != ignore_index
    return scores[counted], classes[counted]


def _difference(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.numel() != targets.numel():
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}")
    return outputs.double() - targets.double().reshape(outputs.shape)
