"""The form in which micro-batches are computed: how many at once, chosen by measuring.

Sums round differently in another form, so a choice is remembered: by the process, and by `rng_state`, with which a
program resumes. It is plain data: `dataclasses.asdict` describes it, and `Form(**data)` makes it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import Any, Callable, Dict, List, Optional

import torch

from ipurun.emulator._capture.graph import Graph, values_in

# One by one has to be this much quicker to be chosen: less is noise, and the same program would choose now this, now
# that.
_MARGIN = 1.05
_ROUNDS = 3
_MOST_REMEMBERED = 1000


@dataclasses.dataclass(frozen=True)
class Form:
    """How the micro-batches of a weight update, or of a call in inference, are computed.

    Attributes:
        size: How many are computed at once, 1 for one by one.
        why: Why, for the log.
    """

    size: int
    why: str = ""

    def fits(self, micro_batches: int) -> bool:
        """Whether this many micro-batches can be computed in this form."""
        return 1 <= self.size <= micro_batches and micro_batches % self.size == 0

    def __str__(self) -> str:
        return f"{'one by one' if self.size == 1 else f'{self.size} at once'}: {self.why}"


_remembered: Dict[str, Form] = {}


def recall(key: str) -> Optional[Form]:
    """Return the form that this process chose for a program, None if it has not chosen yet."""
    return _remembered.get(key)


def remember(key: str, form: Form) -> Form:
    """Use a form whenever this process runs the program again, and return it."""
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.pop(next(iter(_remembered)))
    _remembered[key] = form
    return form


def program_key(graph: Graph, *settings: Any) -> str:
    """Return a name for a graph that is run with some settings, the same in every process."""
    digest = hashlib.sha256(repr((torch.get_num_threads(), settings)).encode())
    for node in graph.nodes:
        shapes = [(graph.specs[value].shape, graph.specs[value].dtype) for value in values_in(node.outputs)]
        digest.update(repr((node.name, list(map(int, node.reads())), shapes)).encode())
    return digest.hexdigest()


def choose(size: int, seconds: Dict[str, List[float]], alone: Callable[[], Any], together: Callable[[], Any]) -> Form:
    """Return the quicker of two forms; where that is not certain, the one with several at once.

    Args:
        size: How many micro-batches are computed at once.
        seconds: What a micro-batch has taken so far, under the names `alone` and `together`.
        alone: Computes a micro-batch and adds its seconds.
        together: Computes several at once and adds the seconds of one of them.
    """
    for _ in range(_ROUNDS):
        if min(seconds["together"]) <= min(seconds["alone"]):
            break
        together()
        alone()
    at_once, single = min(seconds["together"]), min(seconds["alone"])
    why = f"{at_once * 1e3:.3g} ms for each of {size} at once, {single * 1e3:.3g} ms for one"
    return Form(1 if at_once > _MARGIN * single else size, why)


def stopwatch() -> Callable[[], float]:
    """Return a function that returns the seconds since now: of this thread if torch computes in it alone."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    return lambda: clock() - begun
