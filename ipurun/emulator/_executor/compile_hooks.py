"""Functions that a program wants called before and after every compile."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable

from torch.utils.hooks import RemovableHandle

__all__ = ["registerPostCompileHook", "registerPreCompileHook", "run_post_compile", "run_pre_compile"]

_before: OrderedDict[int, Callable[[], None]] = OrderedDict()
_after: OrderedDict[int, Callable[[], None]] = OrderedDict()


def _register(table: Any, hook: Callable[[], None]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compile hook must be callable, got {hook!r}")
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], None]) -> RemovableHandle:
    """Registers a function to call before every compile.

    Returns:
        A handle whose `remove()` takes the hook away.

    Raises:
        RuntimeError: If the hook is not callable.
    """
    return _register(_before, hook)


def registerPostCompileHook(hook: Callable[[], None]) -> RemovableHandle:
    """Registers a function to call after every compile, also after one that failed.

    Returns:
        A handle whose `remove()` takes the hook away.

    Raises:
        RuntimeError: If the hook is not callable.
    """
    return _register(_after, hook)


def run_pre_compile() -> None:
    """Calls the functions registered to run before a compile, in order."""
    for hook in list(_before.values()):
        hook()


def run_post_compile() -> None:
    """Calls the functions registered to run after a compile, in order."""
    for hook in list(_after.values()):
        hook()
