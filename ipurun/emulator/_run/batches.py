"""Split the host's tensors into micro-batches, and collect the results of a call."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Sequence, Tuple

import torch

from ipurun.emulator._capture.dtypes import narrowed
from ipurun.emulator._capture.functions import refuse_backward
from ipurun.emulator.enums import CommGroupType, OutputMode


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How one call is split into micro-batches.

    Attributes:
        device_iterations: Weight updates (or inference steps) per call.
        accumulation: Micro-batches per replica and weight update.
        replicas: Copies of the model in this process.
        group_size: Replicas that read the same data.
        grouping: How those replicas are grouped.
        output_mode: Which results are returned.
        output_period: Iterations between results, for `OutputMode.EveryN`.
    """

    device_iterations: int
    accumulation: int
    replicas: int
    group_size: int
    grouping: CommGroupType
    output_mode: OutputMode
    output_period: int

    @classmethod
    def of(cls, options: Any) -> BatchLayout:
        """Return the layout for the options of an executor."""
        return cls(
            device_iterations=options.device_iterations,
            accumulation=options.Training.gradient_accumulation,
            replicas=options.replication_factor,
            group_size=options.input_group_size,
            grouping=CommGroupType(options.input_cgt),
            output_mode=OutputMode(options.output_mode),
            output_period=options.output_return_period,
        )

    @property
    def input_groups(self) -> int:
        """Return the number of replica groups with different data."""
        return self.replicas // self.group_size

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches in the tensors of a call."""
        return self.device_iterations * self.accumulation * self.input_groups

    def micro_batch_size(self, tensor: torch.Tensor) -> int:
        """Return the number of rows in a micro-batch of an input.

        Raises:
            AssertionError: If the tensor cannot be split evenly.
        """
        rows = tensor.shape[0] if tensor.dim() else 1
        pieces = self.micro_batches
        assert rows % pieces == 0, (
            f"Invalid batch dimension: in the input {tuple(tensor.shape)}, the batch dimension ({rows}) must be a "
            f"multiple of Options.deviceIterations({self.device_iterations}) * "
            f"Options.replicationFactor({self.replicas}) * Options.Training.gradientAccumulation"
            f"({self.accumulation}) / input group size ({self.group_size}) = {pieces}, because it is used to "
            "calculate the batch size which will be executed on the device in any given iteration."
        )
        return rows // pieces

    def piece_of(self, iteration: int, step: int, replica: int) -> int:
        """Return the index of the micro-batch that a replica reads."""
        groups = self.input_groups
        if self.grouping == CommGroupType.Orthogonal:
            group = replica % groups
        else:
            group = replica // self.group_size
        return (iteration * self.accumulation + step) * groups + group

    def cut(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return the micro-batches of an input in order; a scalar is not split."""
        size = self.micro_batch_size(tensor)
        if tensor.dim() == 0:
            return [tensor]
        return [tensor.narrow(0, index * size, size) for index in range(self.micro_batches)]

    def keeps(self, iteration: int, step: int) -> bool:
        """Whether the results of this step are returned to the host unchanged."""
        if self.output_mode == OutputMode.Final:
            return iteration == self.device_iterations - 1 and step == self.accumulation - 1
        if self.output_mode == OutputMode.EveryN:
            return (iteration + 1) % self.output_period == 0
        return True

    def hands_over(self, iteration: int, step: int) -> bool:
        """Whether a result is sent to the host at this step; sums are sent once, at the end."""
        if self.output_mode == OutputMode.Sum:
            return iteration == self.device_iterations - 1 and step == self.accumulation - 1
        return self.keeps(iteration, step)

    def runs(self) -> List[Tuple[int, int, int]]:
        """Return (iteration, step, replica) of every forward run in a call, in order."""
        return [
            (iteration, step, replica)
            for iteration in range(self.device_iterations)
            for step in range(self.accumulation)
            for replica in range(self.replicas)
        ]


class OutputCollector:
    """Gathers the outputs of one call according to the output mode.

    Args:
        layout: How the call is split into micro-batches.
        varying: Whether each output varies between runs; the others are returned once.
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
        """Add the outputs of one run; runs must be added in the order of the layout."""
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
        """Return one tensor for each output."""
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
    joined = joined.to(narrowed(joined.dtype))
    joined.backward = refuse_backward  # type: ignore[method-assign]  # PopTorch's error instead of torch's
    return joined
