"""Blocks and the operations that mark tensors; nothing happens outside a trace."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch

from . import poptorch_core


class Block(torch.nn.Module):
    # Set by the execution strategy while a model is traced.
    _stages_manager: Any = None

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        if Block._stages_manager is not None:
            Block._stages_manager.resetAutoId()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        if Block._stages_manager is not None:
            Block._stages_manager.beginStage(user_id, ipu_id)

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, *exc: Any) -> None:
        poptorch_core.end_ipu_block()


class _BlockHook:
    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if Block._stages_manager is not None:
            if self._user_id is None:
                self._user_id = Block._stages_manager.nextAutoId()
            Block._stages_manager.beginStage(self._user_id, self._ipu_id)


def BeginBlock(
    layer_to_call: torch.nn.Module, user_id: Optional[str] = None, ipu_id: Optional[int] = None
) -> torch.nn.Module:
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise poptorch_core.Error("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call


def BlockFunction(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside

    return decorate


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    return {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}[reduction](x)


def serializedMatMul(lhs: torch.Tensor, rhs: torch.Tensor, *marks: Any) -> torch.Tensor:
    return torch.matmul(lhs, rhs)


def _unchanged(tensor: torch.Tensor, *marks: Any) -> torch.Tensor:
    return tensor


recomputationCheckpoint = set_available_memory = set_overlap_for_input = set_overlap_for_output = _unchanged
