"""Named spans of the host's work during training, for profilers."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Sequence

__all__ = ["CHECKPOINT", "CHECKPOINT_WRITE", "COMPILE", "DATA", "EVALUATION", "HOST_CALL", "Phases", "SeveralPhases"]

DATA = "data"
HOST_CALL = "host call"
COMPILE = "compile"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
CHECKPOINT_WRITE = "checkpoint write"
_NOTHING = contextlib.nullcontext()


class Phases:
    """Notified of the phases of a run; this one ignores them."""

    def span(self, phase: str) -> ContextManager[Any]:
        """Return a context around a phase, such as `DATA`; phases may be nested."""
        return _NOTHING

    def host_call(self, executor: Any, first_step: int, last_step: int) -> ContextManager[Any]:
        """Return a context around a host call of training.

        Args:
            executor: The engine's training model.
            first_step: Number of its first weight update, from 1.
            last_step: Number of its last one.
        """
        return self.span(HOST_CALL)

    def in_background(self, phase: str, begin: float, end: float) -> None:
        """Handle a phase of another thread that has ended; times are those of `time.perf_counter`."""


class SeveralPhases(Phases):
    """Several profilers as one."""

    def __init__(self, profilers: Sequence[Phases]) -> None:
        self._all = tuple(profilers)

    def span(self, phase: str) -> ContextManager[Any]:
        return self._nested([profiler.span(phase) for profiler in self._all])

    def host_call(self, executor: Any, first_step: int, last_step: int) -> ContextManager[Any]:
        return self._nested([profiler.host_call(executor, first_step, last_step) for profiler in self._all])

    def in_background(self, phase: str, begin: float, end: float) -> None:
        for profiler in self._all:
            profiler.in_background(phase, begin, end)

    @staticmethod
    def _nested(contexts: Sequence[ContextManager[Any]]) -> ContextManager[Any]:
        if len(contexts) == 1:
            return contexts[0]
        stack = contextlib.ExitStack()
        for context in contexts:
            stack.enter_context(context)
        return stack
