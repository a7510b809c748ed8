"""The form in which micro-batches are computed: how many at once, chosen by measuring.

Sums round differently in another form, so a choice is remembered: by the process, by the executable cache for the next
one, and by `rng_state`, with which a program resumes. It is plain data: `dataclasses.asdict` describes it, and
`Form(**data)` makes it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from ipurun.emulator._capture.graph import Graph, values_in

# One by one has to be this much quicker to be chosen: less is noise, and the same program would choose now this, now
# that.
_MARGIN = 1.05
_ROUNDS = 3
_MOST_REMEMBERED = 1000
_KEY_DIGITS = 15  # in 64 bits
FORM_ENDING = ".form"


@dataclasses.dataclass(frozen=True)
class Form:
    """How the micro-batches of a weight update, or of a call in inference, are computed.

    Attributes:
        size: How many are computed at once, 1 for one by one.
        why: Why, for the log.
        program: Key of the program whose results were compared in this form and in the other, "" if none were.
    """

    size: int
    why: str = ""
    program: str = ""

    def fits(self, micro_batches: int) -> bool:
        """Whether this many micro-batches can be computed in this form."""
        return 1 <= self.size <= micro_batches and micro_batches % self.size == 0

    def __str__(self) -> str:
        return f"{'one by one' if self.size == 1 else f'{self.size} at once'}: {self.why}"


_remembered: Dict[str, Form] = {}


def recall(key: str, folder: Optional[str] = None) -> Optional[Form]:
    """Return the form that this process, or another one that uses a folder, chose for a program; None if none did."""
    if key not in _remembered and folder is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            with open(_file(folder, key), encoding="utf-8") as file:
                form = Form(**json.load(file))
            if type(form.size) is int and form.size >= 1 and form.program == key:
                _keep(key, form)
    return _remembered.get(key)


def remember(key: str, form: Form, folder: Optional[str] = None) -> Form:
    """Use a form whenever this process, or another one that uses a folder, runs the program again, and return it."""
    _keep(key, form)
    if folder is not None:
        with contextlib.suppress(OSError):  # the next process chooses itself
            os.makedirs(folder, mode=0o700, exist_ok=True)
            temporary = f"{_file(folder, key)}.{os.getpid()}"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(form), file)
            os.replace(temporary, _file(folder, key))
    return form


def _keep(key: str, form: Form) -> None:
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.pop(next(iter(_remembered)))
    _remembered[key] = form


def _file(folder: str, key: str) -> str:
    return os.path.join(folder, key + FORM_ENDING)


def program_key(graph: Graph, *settings: Any) -> str:
    """Return a name for a graph that is run with some settings, the same in every process."""
    digest = hashlib.sha256(repr((torch.get_num_threads(), settings)).encode())
    for node in graph.nodes:
        shapes = [(graph.specs[value].shape, graph.specs[value].dtype) for value in values_in(node.outputs)]
        digest.update(repr((node.name, list(map(int, node.reads())), shapes)).encode())
    return digest.hexdigest()[:_KEY_DIGITS]


def to_words(form: Form) -> List[int]:
    """Return a form as the numbers of `rng_state`."""
    return [form.size, int(form.program or "0", 16)]


def from_words(words: Sequence[int]) -> Form:
    """Return the form that `to_words` described; older states have its size alone."""
    program = f"{words[1]:0{_KEY_DIGITS}x}" if len(words) > 1 and words[1] else ""
    return Form(int(words[0]), "as before the resume", program)


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
