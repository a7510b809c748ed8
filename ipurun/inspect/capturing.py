"""What a model hears when it asks whether it is being captured, in the words that libraries of models ask with."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, TypeVar

import torch

__all__ = ["CaptureAnswer"]

_Result = TypeVar("_Result")


class CaptureAnswer:
    """The answer of `torch.jit.is_tracing` while forward runs once, to be recorded.

    PopTorch leaves it at False, though its capture is bound by the same rule as torch.jit's: no value may be read
    back. Models of transformers and timm ask before they look into an attention mask for a short cut, or keep a tensor
    for the next call; told True they leave both out, and compute the same. A few take it for a promise of torch.jit's
    own, that sizes are tensors, and fail: they hear PopTorch's answer when they are tried again.
    """

    def __init__(self) -> None:
        self._answer = True
        self._matters = False

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Answer while the model runs."""
        before, was_asked = torch.jit.is_tracing, []

        def reply() -> bool:
            was_asked.append(True)
            return self._answer

        torch.jit.is_tracing = reply
        try:
            yield
        except Exception:
            self._matters = bool(was_asked)
            raise
        finally:
            torch.jit.is_tracing = before

    def attempt(self, capture: Callable[[], _Result]) -> _Result:
        """Run what captures the model, and once more with the other answer if the model asked and then failed.

        Raises:
            Exception: That of the first time, where the model fails both times.
        """
        self._matters = False
        try:
            return capture()
        except Exception:
            if not self._matters:
                raise
            self._answer = not self._answer
            with contextlib.suppress(Exception):
                return capture()
            self._answer = not self._answer
            raise
