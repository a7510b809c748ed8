"""The processes of a run, as one of them sees them: who it is, and what all of them agree on."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator.processes import LostProcessError, Processes, connected
from ipurun.errors import RunError

__all__ = ["ALONE", "LostInstanceError", "LostProcessError", "Team", "join", "lost_instance"]


class LostInstanceError(RunError):
    """Another process of the run has ended: this one cannot continue."""


class Team:
    """All processes of a run. Every method must be called by all of them, in the same order.

    Args:
        processes: How they are connected; None: this one is alone.
    """

    def __init__(self, processes: Optional[Processes] = None) -> None:
        self._processes = processes
        self.rank = 0 if processes is None else processes.rank
        self.count = 1 if processes is None else processes.count

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self._processes is None

    def after_call(self, loss: float, stops: bool) -> Tuple[float, bool]:
        """Return the mean of the losses of all processes, and whether one of them wants to stop."""
        if self._processes is None:
            return loss, stops
        numbers = torch.tensor([loss / self.count, float(stops)], dtype=torch.float64)
        with _explained():
            self._processes.reduce_(numbers)
        return float(numbers[0]), bool(numbers[1])

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in one of the processes."""
        return self.after_call(0.0, flag)[1]

    def from_first(self, value: Any) -> Any:
        """Return the value of the first process, which must be picklable."""
        return self.exchanged(value if self.is_first else None)[0]

    def exchanged(self, value: Any) -> List[Any]:
        """Return the values of all processes, which must be picklable."""
        if self._processes is None:
            return [value]
        with _explained():
            return self._processes.exchanged(value)

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        if self._processes is None:
            return
        with torch.no_grad(), _explained():
            for tensor in tensors:
                sent = tensor.detach().contiguous()
                self._processes.broadcast_(sent)
                tensor.copy_(sent)


ALONE = Team()


def join(count: int, rendezvous: Optional[str] = None) -> Team:
    """Connect with the other processes that a launcher started.

    Args:
        count: How many processes there are.
        rendezvous: ``HOST:PORT`` where they find each other, if the launcher says nothing.

    Raises:
        RunError: They cannot be reached.
    """
    if count == 1:
        return ALONE
    if rendezvous is not None and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = rendezvous.rpartition(":")
    try:
        processes = connected(count)
    except LostProcessError as error:
        raise LostInstanceError(
            "the instances of this run do not find each other",
            seen=str(error),
            fix="distributed.rendezvous=HOST:PORT, with an address of the first instance that the others can reach",
        ) from error
    return ALONE if processes is None else Team(processes)


def lost_instance(error: LostProcessError) -> LostInstanceError:
    """Return what it means for the run that another process is lost."""
    return LostInstanceError(
        "this instance lost the connection to another one",
        seen=str(error),
        fix="look for the instance that ended first: each has a log in the run folder",
    )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except LostProcessError as error:
        raise lost_instance(error) from error
