"""Telling a model's code that it is being captured, in the words that libraries of models ask for."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch

__all__ = ["told_captured"]


@contextlib.contextmanager
def told_captured() -> Iterator[None]:
    """Let `torch.jit.is_tracing` answer True: forward runs once, to be recorded, and its tensors have no values.

    PopTorch leaves the answer at False, though its capture is bound by the same rule as torch.jit's: nothing may
    be read back. Models of transformers and timm ask before they look into an attention mask for a short cut, or keep
    a tensor for the next call; with the answer they leave both out, and compute the same.
    """
    before = torch.jit.is_tracing
    torch.jit.is_tracing = lambda: True
    try:
        yield
    finally:
        torch.jit.is_tracing = before
