"""Whether an op is called inside a compile, and the checks that ops share."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional, Tuple, Union

import torch

from ipurun.emulator._capture.recorder import Recorder, current
from ipurun.emulator._impl import createPoptorchError

_native_depth = 0


def active_recorder() -> Optional[Recorder]:
    """Returns the recorder of the running compile, None where ops must behave natively."""
    return None if _native_depth else current()


@contextlib.contextmanager
def natively() -> Iterator[None]:
    """Makes the ops called inside behave as outside an executor (bodies of host functions).

    The function modes of a running compile are off too: a host function may read values back.
    """
    global _native_depth
    _native_depth += 1
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        _native_depth -= 1


def require_tensor(value: Any, subject: str) -> None:
    """Raises poptorch.Error unless `value` is a tensor; `subject` begins the message."""
    if not isinstance(value, torch.Tensor):
        raise createPoptorchError(f"{subject} must be a torch.tensor. {type(value)} is not supported.")


def require_int(value: Any, subject: str) -> None:
    """Raises poptorch.Error unless `value` is an int; `subject` begins the message."""
    if not isinstance(value, int):
        raise createPoptorchError(f"{subject} must be an integer. {type(value)} is not supported.")


def one_tensor(result: Union[torch.Tensor, Tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Returns the result of a recorded call whose function returns one tensor."""
    assert isinstance(result, torch.Tensor)
    return result


def refuse_training(recorder: Recorder, op: str) -> None:
    """Raises poptorch.Error when a training graph is being compiled."""
    if recorder.training:
        raise createPoptorchError(f"poptorch.{op}() is only supported in inference models, not in training.")
