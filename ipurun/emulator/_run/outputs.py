"""Collecting the results of micro-batches into what one call returns."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._run.batches import BatchLayout
from ipurun.emulator.enums import OutputMode

__all__ = ["OutputCollector", "host_dtype", "refuse_backward"]


def host_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which the host receives values of a type."""
    return {torch.int64: torch.int32, torch.float64: torch.float32}.get(dtype, dtype)


class OutputCollector:
    """Gathers the outputs of one call according to the output mode.

    Args:
        layout: How the call is cut into micro-batches.
        varying: For each output whether it depends on anything; the others come back once, as they are.
    """

    def __init__(self, layout: BatchLayout, varying: Sequence[bool]) -> None:
        self._layout = layout
        self._varying = list(varying)
        self._kept: List[List[torch.Tensor]] = [[] for _ in varying]
        self._sums: List[Dict[int, torch.Tensor]] = [{} for _ in varying]

    def wants(self, iteration: int, step: int) -> bool:
        """Whether outputs of this step are needed."""
        return self._layout.keeps(iteration, step)

    def add(self, replica: int, outputs: Sequence[torch.Tensor]) -> None:
        """Takes the outputs of one run; runs come in the order of the layout."""
        sums = self._layout.output_mode == OutputMode.Sum
        for index, tensor in enumerate(outputs):
            if not self._varying[index]:
                if not self._kept[index]:
                    self._kept[index].append(tensor.clone())
            elif not sums:
                self._kept[index].append(tensor.clone())
            elif replica in self._sums[index]:
                self._sums[index][replica] = self._sums[index][replica] + tensor
            else:
                self._sums[index][replica] = tensor.clone()

    def results(self) -> List[torch.Tensor]:
        """Returns one tensor for each output."""
        results = []
        for index, kept in enumerate(self._kept):
            parts = kept or [self._sums[index][r] for r in sorted(self._sums[index])]
            results.append(_joined(parts))
        return results


def _joined(parts: List[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        joined = parts[0]
    elif parts[0].dim() == 0:
        joined = torch.stack(parts)
    else:
        joined = torch.cat(parts)
    joined = joined.to(host_dtype(joined.dtype))
    joined.backward = refuse_backward  # type: ignore[method-assign]  # PopTorch's error instead of torch's
    return joined


def refuse_backward(*args: Any, **kwargs: Any) -> None:
    """Stands in for the backward method of returned tensors.

    Raises:
        Error: Always.
    """
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. If you're "
        "using an inferenceModel, you should use a trainingModel instead."
    )
