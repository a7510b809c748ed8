"""The form in which micro-batches are computed: how many at once, chosen by measuring.

Sums round differently in another form, so a choice is remembered: by the process, by the executable cache for the next
one, and by `rng_state`, with which a program resumes. Without a cache nothing is measured: the next process could
choose otherwise, and compute other numbers. A form is plain data: `dataclasses.asdict` describes it, and
`Form(**data)` makes it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, values_in
from ipurun.emulator._executor.cache_files import PARTIAL, cache_versions, sealed, unsealed

# One by one has to be this much quicker to be chosen: a smaller difference is noise, and the choice of one program
# would vary between runs.
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


_remembered: Dict[Tuple[Optional[str], str], Form] = {}


def recall(key: str, folder: Optional[str]) -> Optional[Form]:
    """Return the form that this process, or another one that uses a folder, chose for a program; None if none did."""
    if (folder, key) not in _remembered and folder is not None:
        form = _read(key, folder)
        return None if form is None else remember(key, form, folder)
    return _remembered.get((folder, key))


def remember(key: str, form: Form, folder: Optional[str]) -> Form:
    """Use a form whenever this process runs the program again with the same folder, and return it."""
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.pop(next(iter(_remembered)))
    _remembered[folder, key] = form
    return form


def share(key: str, form: Form, folder: str) -> Optional[Form]:
    """Write a form to a folder for other processes.

    Returns:
        The form that all of them use: another one if a process was quicker, None if the folder cannot be written.
    """
    temporary = f"{_file(folder, key)}.{os.getpid()}{PARTIAL}"
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(sealed(dataclasses.asdict(form)))
        try:
            os.link(temporary, _file(folder, key))  # only one process succeeds
        except OSError:
            other = _read(key, folder)
            if other is not None:
                return other
            os.replace(temporary, _file(folder, key))
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return form


def _read(key: str, folder: str) -> Optional[Form]:
    with contextlib.suppress(OSError, ValueError, TypeError):
        with open(_file(folder, key), "rb") as file:
            form = Form(**unsealed(file.read()))
        if type(form.size) is int and form.size >= 1 and form.program == key:
            return form
    return None


def _file(folder: str, key: str) -> str:
    return os.path.join(folder, key + FORM_ENDING)


def program_key(graph: Graph, *settings: Any) -> str:
    """Return a name for a graph that is run with some settings, the same in every process with the same versions."""
    digest = hashlib.sha256(repr((torch.get_num_threads(), sorted(cache_versions().items()), settings)).encode())
    for node in graph.nodes:
        shapes = [(graph.specs[value].shape, graph.specs[value].dtype) for value in values_in(node.outputs)]
        digest.update(repr((node.name, node.args, node.kwargs, shapes)).encode())
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
