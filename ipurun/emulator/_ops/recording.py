"""Shared code of the ops: the active recorder, logs of calls, and argument checks."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ipurun.emulator._capture.recorder import Recorder, current
from ipurun.emulator._impl import createPoptorchError

_native_depth = 0
OpCall = Tuple[Callable[..., Any], Tuple[Any, ...], Dict[str, Any], Any]


def active_recorder() -> Optional[Recorder]:
    """Return the recorder of the running compile, None where ops must behave natively."""
    return None if _native_depth else current()


@contextlib.contextmanager
def natively() -> Iterator[None]:
    """Make the ops called inside behave as outside an executor, for bodies of host functions.

    The function modes of a running compile are also off: a host function may read values.
    """
    global _native_depth
    _native_depth += 1
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        _native_depth -= 1


def require_tensor(value: Any, subject: str) -> None:
    """Raise poptorch.Error unless `value` is a tensor; `subject` begins the message."""
    if not isinstance(value, torch.Tensor):
        raise createPoptorchError(f"{subject} must be a torch.tensor. {type(value)} is not supported.")


def require_int(value: Any, subject: str) -> None:
    """Raise poptorch.Error unless `value` is an int; `subject` begins the message."""
    if not isinstance(value, int):
        raise createPoptorchError(f"{subject} must be an integer. {type(value)} is not supported.")


def one_tensor(result: Union[torch.Tensor, Tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Return the result of a recorded call whose function returns one tensor."""
    assert isinstance(result, torch.Tensor)
    return result


def refuse_training(recorder: Recorder, op: str) -> None:
    """Raise poptorch.Error when a training graph is being compiled."""
    if recorder.training:
        raise createPoptorchError(f"poptorch.{op}() is only supported in inference models, not in training.")


_open_logs: List[OpLog] = []


class OpLog(TorchDispatchMode):
    """Logs the ops that run inside it, while the recorder also sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: List[OpCall] = []
        self._muted = False

    def __enter__(self) -> OpLog:
        _open_logs.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        _open_logs.remove(self)
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._muted:
            self.calls.append((func, args, kwargs, result))
        return result

    def issue_again(
        self, inputs: Sequence[torch.Tensor], new_inputs: Sequence[torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Run the logged ops again with `new_inputs` instead of `inputs`.

        Returns:
            A function that maps a tensor of the logged run to the new one.
        """
        replaced = {id(old): new for old, new in zip(inputs, new_inputs)}

        def substitute(value: Any) -> Any:
            return replaced.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, result in self.calls:
            new_result = func(*tree_map(substitute, args), **tree_map(substitute, kwargs))
            for old, new in zip(tree_flatten(result)[0], tree_flatten(new_result)[0]):
                if isinstance(old, torch.Tensor):
                    replaced[id(old)] = new
        return substitute


@contextlib.contextmanager
def logs_muted() -> Iterator[List[OpLog]]:
    """Pause the open logs, and yield them."""
    logs = [log for log in _open_logs if not log._muted]
    for log in logs:
        log._muted = True
    try:
        yield logs
    finally:
        for log in logs:
            log._muted = False


def call_recorded(
    recorder: Recorder,
    fn: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    backward: Optional[Callable[..., Any]] = None,
    name: str = "",
) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
    """Call `Recorder.call` and log it as one op, without the ops that `fn` uses."""

    def call(arguments: Sequence[torch.Tensor]) -> Any:
        return recorder.call(fn, arguments, backward=backward, name=name)

    with logs_muted() as logs:
        result = call(tensors)
    for log in logs:
        log.calls.append((call, (list(tensors),), {}, result))
    return result
