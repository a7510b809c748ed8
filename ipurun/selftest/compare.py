"""Compare the numbers of two sides, with a tolerance for each kind of number and precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

__all__ = [
    "Comparison",
    "Numbers",
    "Tolerances",
    "change_differences",
    "compare",
    "relative_difference",
    "tensor_sides",
    "tolerances",
]

# A parameter that hardly changes, such as a bias before a norm, is compared with this share of the mean change.
_SMALLEST_CHANGE = 0.01
_WORST_VALUES = 8


@dataclass
class Numbers:
    """Results of a run.

    Args:
        losses: Training loss of each host call.
        weights: Parameter name -> value at the end.
        buffers: Buffer name -> value at the end.
        eval_loss: Loss on the eval split.
        outputs: Outputs for the eval split.
    """

    losses: List[float]
    weights: Dict[str, torch.Tensor]
    buffers: Dict[str, torch.Tensor] = field(default_factory=dict)
    eval_loss: Optional[float] = None
    outputs: Optional[List[torch.Tensor]] = None


@dataclass(frozen=True)
class Tolerances:
    """The largest relative difference that counts as agreement.

    Args:
        loss: Of a loss, relative to it.
        weights: Of a parameter's change over a run, relative to its length.
        values: Of outputs and buffers, relative to the largest value of the tensor.
        gradients: Of a gradient, relative to its length.
    """

    loss: float
    weights: float
    values: float
    gradients: float


# Both sides in float32 on the same CPU; float32 on an IPU, with other kernels and orders of sums; float16 against
# float32, where each operation rounds to 11 bits, and ReLU and max pooling turn rounding into jumps of the gradient.
_SAME_MACHINE = Tolerances(loss=1e-5, weights=2e-4, values=2e-5, gradients=2e-4)
_OTHER_MACHINE = Tolerances(loss=1e-3, weights=1e-2, values=1e-3, gradients=1e-2)
_HALF = Tolerances(loss=5e-3, weights=0.1, values=3e-2, gradients=0.4)


def tolerances(precision: str, engine: str) -> Tolerances:
    """Return the tolerances of a comparison.

    Args:
        precision: The precision of the run, such as ``16.32``.
        engine: The kind of engine: ``cpu``, ``ipu`` or ``ipu_model``.
    """
    if precision.startswith("16"):
        return _HALF
    return _SAME_MACHINE if engine == "cpu" else _OTHER_MACHINE


@dataclass(frozen=True)
class Comparison:
    """One comparison of a case.

    Args:
        what: What was compared, with the name of the worst tensor: ``change of fc2.weight``.
        difference: The largest relative difference.
        tolerance: The largest one that counts as agreement.
        sides: Makes the numbers of both sides, for the report.
    """

    what: str
    difference: float
    tolerance: float
    sides: Callable[[], Mapping[str, Any]]

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def compare(
    found: Numbers, expected: Numbers, initial: Mapping[str, torch.Tensor], allowed: Tolerances
) -> List[Comparison]:
    """Compare two runs.

    Args:
        found: The run on the engine.
        expected: The same run elsewhere.
        initial: The parameters before it.
        allowed: The tolerances.
    """
    comparisons = [_losses("training loss", found.losses, expected.losses, allowed.loss)]
    if expected.eval_loss is not None:
        evaluated = [math.nan if found.eval_loss is None else found.eval_loss]
        comparisons.append(_losses("evaluation loss", evaluated, [expected.eval_loss], allowed.loss))
    comparisons.append(
        _worst("change of", change_differences(found.weights, expected.weights, initial), allowed.weights)
    )
    floating = {name: value for name, value in expected.buffers.items() if value.is_floating_point()}
    if floating:
        pairs = {name: (found.buffers.get(name), value) for name, value in floating.items()}
        comparisons.append(_worst("buffer", _values(pairs), allowed.values))
    if expected.outputs is not None:
        outputs = found.outputs or []
        pairs = {str(i): (outputs[i] if i < len(outputs) else None, v) for i, v in enumerate(expected.outputs)}
        comparisons.append(_worst("prediction", _values(pairs), allowed.values))
    return comparisons


def relative_difference(found: Optional[torch.Tensor], expected: torch.Tensor, scale: float) -> float:
    """Return the largest difference of two tensors by a scale; infinite where their shapes differ or one is NaN."""
    if found is None or found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    return _ratio(float((found.double() - expected.double()).abs().max()), scale)


def tensor_sides(found: Optional[torch.Tensor], expected: torch.Tensor) -> Dict[str, Any]:
    """Return what a report says about two tensors: their sizes, and the values that differ most."""
    sides: Dict[str, Any] = {"found": _summary(found), "expected": _summary(expected)}
    if found is None or found.shape != expected.shape or not expected.numel():
        return sides
    here, there = found.double().flatten(), expected.double().flatten()
    order = torch.nan_to_num((here - there).abs(), nan=math.inf).argsort(descending=True)[:_WORST_VALUES].tolist()
    sides["values_that_differ_most"] = [
        {"index": place, "found": float(here[place]), "expected": float(there[place])} for place in order
    ]
    return sides


def _ratio(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return math.inf if math.isnan(difference) or scale == 0 else difference / scale


def _summary(value: Optional[torch.Tensor]) -> Any:
    if value is None:
        return None
    double = value.double()
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "norm": float(double.norm()),
        "mean": float(double.mean()) if value.numel() else None,
        "not_finite": int((~torch.isfinite(double)).sum()),
    }


def _losses(what: str, found: Sequence[float], expected: Sequence[float], tolerance: float) -> Comparison:
    worst = math.inf
    if len(found) == len(expected):
        worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected))
    if math.isnan(worst):
        worst = math.inf
    return Comparison(what, worst, tolerance, lambda: {"found": list(found), "expected": list(expected)})


_Pairs = Mapping[str, Tuple[Optional[torch.Tensor], torch.Tensor]]
_Differences = Dict[str, Tuple[float, Optional[torch.Tensor], torch.Tensor]]


def change_differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]
) -> _Differences:
    """Return how far the change of each parameter is off, by the length of the change."""
    changes = {name: (value.double() - initial[name].double()).detach() for name, value in expected.items()}
    numbers = sum(change.numel() for change in changes.values())
    mean = math.sqrt(sum(float(change.pow(2).sum()) for change in changes.values()) / max(numbers, 1))
    differences: _Differences = {}
    for name, change in changes.items():
        here = found.get(name)
        if here is None or here.shape != change.shape:
            differences[name] = (math.inf, here, change)
            continue
        here = (here.double() - initial[name].double()).detach()
        length = max(float(change.norm()), _SMALLEST_CHANGE * mean * math.sqrt(change.numel()))
        differences[name] = (_ratio(float((here - change).norm()), length), here, change)
    return differences


def _values(pairs: _Pairs) -> _Differences:
    return {
        name: (relative_difference(found, expected, float(expected.double().abs().max())), found, expected)
        for name, (found, expected) in pairs.items()
    }


def _worst(what: str, differences: _Differences, tolerance: float) -> Comparison:
    name = max(differences, key=lambda name: differences[name][0])
    difference = differences[name][0]

    def sides() -> Mapping[str, Any]:
        wrong = {name: item for name, item in differences.items() if item[0] > tolerance}
        return {
            name: {"difference": off, **tensor_sides(found, expected)} for name, (off, found, expected) in wrong.items()
        }

    return Comparison(f"{what} {name}", difference, tolerance, sides)
