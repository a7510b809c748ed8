"""torch.utils.checkpoint inside a compiled model: a plain call.

What a device keeps for the backward pass is the backend's choice (`autoRecomputation`,
`poptorch.recomputationCheckpoint`), and a captured graph knows all its values anyway. Torch's own ways of running a
part of the model again would not survive the capture: one refuses to work with `torch.autograd.grad`, the other
draws random numbers anew.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator

import torch.utils.checkpoint

__all__ = ["plain_checkpoints"]


class _PlainFunction:
    """Stands in for the autograd function of `use_reentrant=True`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _plain_generator(*_: Any, **__: Any) -> Iterator[None]:
    """Does nothing before and after the call that torch makes between two steps of its generator."""
    yield


def _plain_call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# `checkpoint` itself cannot be replaced: models import it by name. It looks these up when it is called.
_STAND_INS: Dict[str, Any] = {
    "CheckpointFunction": _PlainFunction,
    "_checkpoint_without_reentrant_generator": _plain_generator,
    "_checkpoint_without_reentrant": _plain_call,  # torch before 2.1
}


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Makes `torch.utils.checkpoint.checkpoint` call its function and nothing else."""
    module = torch.utils.checkpoint
    originals = {name: getattr(module, name) for name in _STAND_INS if hasattr(module, name)}
    for name in originals:
        setattr(module, name, _STAND_INS[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
