"""Tracepoints for Graphcore's PVTI profiler: no-ops unless PVTI is enabled and installed.

`record_operations` is the emulator's own: it measures the operations of calls.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from types import ModuleType
from typing import Any, Callable, ContextManager, List, Optional

__all__ = ["Channel", "record_operations"]


def _load_pvti() -> Optional[ModuleType]:
    if "PVTI_OPTIONS" not in os.environ:
        return None
    try:
        return importlib.import_module("libpvti")
    except ImportError:
        return None


_pvti = _load_pvti()


class Channel:
    """A named series of tracepoints.

    Args:
        name: The name shown by the profiler.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._channel = None if _pvti is None else _pvti.createTraceChannel(name)

    def instrument(self, obj: Any, *methods: str) -> Any:
        """Trace every call of the named methods of an object.

        Returns:
            The object.
        """
        if _pvti is not None:
            _pvti.instrument(obj, methods, self._channel)
        return obj

    def tracepoint(self, name: str) -> ContextManager[Any]:
        """Return a context manager that traces its body."""
        if _pvti is None:
            return contextlib.nullcontext()
        tracepoint: ContextManager[Any] = _pvti.Tracepoint(self._channel, f"{self._name}.{name}")
        return tracepoint


def record_operations(executor: Any, before_run: Optional[Callable[[], None]] = None) -> ContextManager[List[Any]]:
    """Return a context in which every operation of an executor's calls is measured; the results stay the same.

    Args:
        executor: A training or an inference model.
        before_run: Called in each call after the operations were measured, before the call computes its results.

    Returns:
        A context manager of a list, to which each call adds its times: `CallTimes` of the emulator.
    """
    from ipurun.emulator._executor.op_times import recorded  # imported here because executors import this module

    return recorded(executor, before_run)
