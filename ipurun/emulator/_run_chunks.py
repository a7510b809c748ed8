"""Deciding whether micro-batches are computed at once, after comparing with one by one on real data."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator._errors import Error
from ipurun.emulator._graph import Graph
from ipurun.emulator._logging import logger
from ipurun.emulator._run_together import Together, batch_size_for, can_run_together

__all__ = ["ChunkRunner"]

_TOLERANCE = 1e-4


class ChunkRunner:
    """Runs chunks of micro-batches at once, if that gave what one by one gave.

    The first chunk of the first call is run one by one and collected; the chunk is then computed at once and
    the results are compared.

    Args:
        graph: The graph of one micro-batch.
        enabled: False to run one by one always.
    """

    def __init__(self, graph: Graph, enabled: bool) -> None:
        self._graph = graph
        self._possible = enabled and can_run_together(graph)
        self._together: Optional[Together] = None
        self._wanted = 0
        self._inputs: List[List[torch.Tensor]] = []
        self._outputs: List[Sequence[torch.Tensor]] = []
        self._grads: Dict[str, torch.Tensor] = {}

    @property
    def is_collecting(self) -> bool:
        """Whether the results of the next run are wanted for the comparison."""
        return self._possible and self._together is None and self._wanted > 1

    def size_for(self, micro_batches: int) -> int:
        """Returns how many of this number of micro-batches to compute at once, 1 for one by one."""
        if not self._possible:
            return 1
        if self._together is not None:
            return self._together.size
        if self._wanted == 0:
            self._wanted = batch_size_for(self._graph, micro_batches)
            self._possible = self._wanted > 1
        return 1

    def run(
        self, arguments: Sequence[Any], inputs: Sequence[torch.Tensor], seed: Optional[torch.Tensor]
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Computes a chunk at once; see `Together.run`."""
        assert self._together is not None
        return self._together.run(arguments, inputs, seed)

    def collect(
        self,
        arguments: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        grads: Dict[str, torch.Tensor],
        seed: Optional[torch.Tensor],
    ) -> None:
        """Takes one micro-batch that was run alone; compares when the chunk is whole."""
        self._inputs.append([tensor.clone() for tensor in inputs])
        self._outputs.append([tensor.clone() for tensor in outputs])
        for name, grad in grads.items():
            self._grads[name] = self._grads[name] + grad if name in self._grads else grad.clone()
        if len(self._inputs) < self._wanted:
            return
        try:
            together = Together(self._graph, self._wanted, arguments)
            stacked = [torch.stack(list(column)) for column in zip(*self._inputs)]
            self._compare(*together.run(arguments, stacked, seed))
            self._together = together
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, Error) as error:
            logger.debug("Micro-batches are run one by one: %s", error)
            self._possible = False
        self._inputs, self._outputs, self._grads = [], [], {}

    def _compare(self, outputs: Sequence[torch.Tensor], grads: Dict[str, torch.Tensor]) -> None:
        for index, column in enumerate(zip(*self._outputs)):
            _require_equal(f"output {index}", torch.stack(list(column)), outputs[index])
        for name, expected in self._grads.items():
            _require_equal(f"the gradient of {name}", expected, grads[name])


def _require_equal(what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise RuntimeError(f"{what} differs in shape or type when micro-batches are computed at once")
    if expected.is_floating_point():
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        same = torch.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE * max(scale, 1e-8))
    else:
        same = torch.equal(got, expected)
    if not same:
        raise RuntimeError(f"{what} differs when micro-batches are computed at once")
