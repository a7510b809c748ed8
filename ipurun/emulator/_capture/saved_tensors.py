"""Tensors that autograd saves for the backward pass while a model is captured."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipurun.emulator._capture.dtypes import with_boxed_numbers
from ipurun.emulator._capture.op_kinds import written_arguments
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._impl import createPoptorchError


class _Saved:
    """One tensor that autograd saved; None if it was dropped."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Optional[torch.Tensor]) -> None:
        self.tensor = tensor


class SavedTensors(TorchDispatchMode):
    """Keeps what autograd saves as it was, whatever the model writes to it later.

    In a device's graph each value is its own, so a model may change in place what the backward pass needs.
    Memory is known by its storage: torch's own `allow_mutation_on_saved_tensors` goes by addresses, misses writes
    through views that start elsewhere, and may take a new tensor for one that was there before.

    Args:
        keep: Whether a backward pass will come. If not, nothing is kept until `keep` is set: a forward that
            computes gradients itself marks a tensor for them first.
    """

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self._saved_in: Dict[int, weakref.WeakSet[_Saved]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, _restore)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for the reason that the recorder has

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._hooks.__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(written_arguments(func._schema, args, kwargs)):
            self._copy_what_shares(tensor)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            boxed = with_boxed_numbers(func, args)
            if boxed is None:
                raise
            return func(*boxed, **kwargs)

    def _save(self, tensor: torch.Tensor) -> _Saved:
        if not self.keep:
            return _Saved(None)
        saved = _Saved(tensor)
        # The tensor that is kept here keeps its storage, so that no other storage takes its place.
        self._saved_in.setdefault(_storage(tensor), weakref.WeakSet()).add(saved)
        return saved

    def _copy_what_shares(self, tensor: torch.Tensor) -> None:
        copies: Dict[int, torch.Tensor] = {}
        for saved in self._saved_in.pop(_storage(tensor), ()):
            original = saved.tensor
            assert original is not None
            if id(original) not in copies:
                copies[id(original)] = original.clone()
            saved.tensor = copies[id(original)]


def _restore(saved: _Saved) -> torch.Tensor:
    if saved.tensor is None:
        raise createPoptorchError(
            "An inference model takes a gradient inside forward of a tensor that it did not mark with "
            "requires_grad_() there. Mark it, or use a training model."
        )
    return saved.tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
