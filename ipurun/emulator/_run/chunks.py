"""Deciding whether micro-batches are computed at once, after comparing with one by one on real data."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.graph import Graph
from ipurun.emulator._errors import Error
from ipurun.emulator._logging import logger
from ipurun.emulator._run.comparison import alike, largest
from ipurun.emulator._run.replay import Replay
from ipurun.emulator._run.together import Together, batch_size_for, can_run_together

__all__ = ["ChunkRunner"]


class ChunkRunner:
    """Runs chunks of micro-batches at once, if that gives what one by one gives.

    Both ways are tried on the first chunk of the first call and compared. From then on, that call included, every
    chunk is run the same way, so that a run which is stopped and resumed rounds as one that was not.

    Args:
        graph: The graph of one micro-batch.
        replay: Computes one micro-batch: outputs, then gradients.
        enabled: False to run one by one always.
    """

    def __init__(self, graph: Graph, replay: Replay, enabled: bool) -> None:
        self._graph = graph
        self._replay = replay
        self._possible = enabled and can_run_together(graph)
        self._together: Optional[Together] = None

    def disable(self) -> None:
        """Runs one by one from now on."""
        self._possible = False
        self._together = None

    def size_for(
        self,
        micro_batches: int,
        inputs_of: Callable[[int], List[torch.Tensor]],
        arguments: Callable[..., List[Any]],
        seed: Optional[torch.Tensor],
    ) -> int:
        """Returns how many micro-batches to compute at once, 1 for one by one.

        Args:
            micro_batches: How many there are for one weight update.
            inputs_of: Gives the inputs of a micro-batch by its number.
            arguments: Gives the arguments of the graph: ``arguments(replica, inputs, seed)``.
            seed: Gradient of the loss of one micro-batch.
        """
        if self._possible and self._together is None:
            size = batch_size_for(self._graph, micro_batches)
            self._possible = size > 1
            if self._possible:
                self._try(size, [inputs_of(number) for number in range(size)], arguments, seed)
        return 1 if self._together is None else self._together.size

    def run(
        self, arguments: Sequence[Any], inputs: Sequence[torch.Tensor], seed: Optional[torch.Tensor]
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Computes a chunk at once; see `Together.run`."""
        assert self._together is not None
        return self._together.run(arguments, inputs, seed)

    def _try(
        self,
        size: int,
        inputs: List[List[torch.Tensor]],
        arguments: Callable[..., List[Any]],
        seed: Optional[torch.Tensor],
    ) -> None:
        first = arguments(0, inputs[0], seed)
        try:
            together = Together(self._graph, size, first)
            stacked = [torch.stack(list(column)) for column in zip(*inputs)]
            self._compare(
                [self._replay(arguments(0, each, seed)) for each in inputs], *together.run(first, stacked, seed)
            )
            self._together = together
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, Error) as error:
            logger.debug("Micro-batches are run one by one: %s", error)
            self._possible = False

    def _compare(
        self,
        alone: List[Sequence[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        grads: Dict[str, torch.Tensor],
    ) -> None:
        columns = list(zip(*alone))
        for index, output in enumerate(outputs):
            _require_equal(f"output {index}", torch.stack(list(columns[index])), output)
        summed = [torch.stack(list(column)).sum(0) for column in columns[len(outputs) :]]
        among = largest(summed)
        for expected, name in zip(summed, self._graph.grads):
            _require_equal(f"the gradient of {name}", expected, grads[name], among)


def _require_equal(what: str, expected: torch.Tensor, got: torch.Tensor, among: float = 0.0) -> None:
    if not alike(expected, got, among=among):
        raise RuntimeError(f"{what} differs when micro-batches are computed at once")
