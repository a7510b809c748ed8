"""Seeds of random operations: one stream for each run and replica, whatever the number of calls."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Iterator, List

import torch

__all__ = ["RandomStreams", "default_seed", "host_generator_kept"]


def default_seed() -> int:
    """Returns a seed for executors without one: it follows torch.manual_seed."""
    return torch.initial_seed()


class RandomStreams:
    """Numbers the runs of an executable and seeds torch's generator for each of them.

    Args:
        seed: The seed of the whole sequence.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    @property
    def state(self) -> List[int]:
        """Returns what is needed to continue the sequence."""
        return [self.seed, self.position]

    @state.setter
    def state(self, words: List[int]) -> None:
        self.seed = int(words[0])
        self.position = int(words[1]) if len(words) > 1 else 0

    def start(self, run: int, replica: int) -> None:
        """Begins the stream of one run, counted from the current position."""
        words = f"{self.seed} {self.position + run} {replica}".encode()
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:7], "little"))

    def advance(self, runs: int) -> None:
        """Moves past the runs of a call."""
        self.position += runs


@contextlib.contextmanager
def host_generator_kept() -> Iterator[None]:
    """Puts torch's own generator back as it was."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
