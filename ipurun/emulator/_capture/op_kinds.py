"""Kinds of aten operations that capture treats apart: random draws, and what depends on data."""

from __future__ import annotations

from typing import FrozenSet, Optional, Sequence

import torch

from ipurun.emulator._capture.sources import calling_line
from ipurun.emulator._impl import createNativeError

__all__ = ["DATA_DEPENDENT_OPS", "RANDOM_OPS", "explain_data_dependence", "names_in", "refuse_mask_index"]


def names_in(text: str) -> FrozenSet[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


DATA_DEPENDENT_OPS = {
    "_local_scalar_dense": "its value is read back to Python (.item(), float(), int(), bool(), `if tensor:`)",
    "equal": "torch.equal compares values in Python",
    "nonzero": "the shape of nonzero() depends on the values",
    "masked_select": "the shape of masked_select() depends on the values",
    "_unique2": "the shape of unique() depends on the values",
    "unique_dim": "the shape of unique() depends on the values",
    "unique_consecutive": "the shape of unique_consecutive() depends on the values",
}
RANDOM_OPS: FrozenSet[str] = names_in("""
    bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial native_dropout
    normal normal_ poisson rand rand_like randint randint_like randn randn_like random random_
    randperm rrelu_with_noise rrelu_with_noise_ uniform uniform_
""")


def explain_data_dependence(op: str) -> str:
    """Returns the message for an operation whose result the graph cannot hold."""
    line = calling_line()
    if "site-packages" in line:
        advice = (
            "The line is a library's: look for a setting or an argument that spares it the question. Models of "
            "transformers take an attention mask of four dimensions (batch, 1, queries, keys) as it is."
        )
    else:
        advice = (
            "Use torch.where or a mask multiplied in instead of a branch or a selection, poptorch.cond or "
            "poptorch.for_loop for control flow in inference, or return the tensor and decide on the host."
        )
    return (
        f"A tensor of the model is used in a way that depends on its data at {line or 'an unknown line'}: "
        f"{DATA_DEPENDENT_OPS[op]}. The model is captured once, as a graph of fixed shapes without Python. {advice}"
    )


def refuse_mask_index(indices: Sequence[Optional[torch.Tensor]]) -> None:
    """Raises if a selection depends on a mask, because the shape of its result would.

    Raises:
        Error: If one of the indices is of booleans or bytes.
    """
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise createNativeError(
            "Indexing using boolean or byte tensor masks is unsupported because it would produce dynamic output "
            "shapes based on the mask values. The IPU cannot support dynamic output shapes. "
            f"Use torch.where at {calling_line() or 'an unknown line'} instead."
        )
