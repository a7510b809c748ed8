"""Protect the tensors that autograd saves during a capture from later writes."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipurun.emulator._capture.dtypes import with_boxed_numbers
from ipurun.emulator._capture.op_kinds import written_arguments
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._impl import createPoptorchError


class _Saved:
    """A tensor that autograd saved, or None if it was dropped."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Optional[torch.Tensor]) -> None:
        self.tensor = tensor


class SavedTensors(TorchDispatchMode):
    """Preserves the tensors that autograd saves when the model overwrites them later.

    In a device's graph every value is separate, so a model may overwrite what the backward pass needs.
    Tensors are matched by storage: torch's `allow_mutation_on_saved_tensors` compares addresses, so it misses writes
    through views with an offset, and may mistake a new tensor for an old one.

    Args:
        keep: Whether a backward pass follows. If not, nothing is kept until `keep` is set, which happens when
            forward calls `requires_grad_` to compute gradients itself.
        noted: Called with every tensor that autograd saves.
    """

    def __init__(self, keep: bool, noted: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.keep = keep
        self._noted = noted
        # By storage, in the order in which they were saved: a set would copy them in another order in each process.
        self._saved_in: Dict[int, List[weakref.ref[_Saved]]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, _restore)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for the same reason as in Recorder

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
        self._noted(tensor)
        if not self.keep:
            return _Saved(None)
        saved = _Saved(tensor)
        # The saved tensor keeps its storage alive, so its address is not reused.
        self._saved_in.setdefault(_storage(tensor), []).append(weakref.ref(saved))
        return saved

    def _copy_what_shares(self, tensor: torch.Tensor) -> None:
        copies: Dict[int, torch.Tensor] = {}
        for reference in self._saved_in.pop(_storage(tensor), ()):
            saved = reference()
            if saved is None:
                continue
            original = saved.tensor
            assert original is not None
            if id(original) not in copies:
                copies[id(original)] = original.clone()
            saved.tensor = copies[id(original)]


def _restore(saved: _Saved) -> torch.Tensor:
    if saved.tensor is None:
        raise createPoptorchError(
            "forward of an inference model computes the gradient of a tensor without calling requires_grad_() on "
            "it first. Call it inside forward, or use a training model."
        )
    return saved.tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
