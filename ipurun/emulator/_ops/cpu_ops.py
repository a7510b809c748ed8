"""CPU: a Python function that runs on the host in the middle of an inference graph."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.op_log import call_recorded
from ipurun.emulator._ops.recording import active_recorder, natively, refuse_training

# One name is one function within a compile: the first that was registered under it.
_functions: weakref.WeakKeyDictionary[Recorder, Dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


class CPU:
    """Wraps a function or module so that an inference model calls it on the host, with run-time values.

    Args:
        layer_to_call: What is called; a module's parameters are frozen.
        ID: Name of the op. A second op of the same name in one model calls the function of the first.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        self._ID = ID
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self.in_shapes: Optional[List[torch.Size]] = None
        self.out_shapes: Optional[List[torch.Size]] = None
        self.inputs: Optional[List[torch.Tensor]] = None
        self.outputs: Optional[List[torch.Tensor]] = None

    def execute(self) -> None:
        """Calls the function on the persistent inputs and copies what it returns to the outputs."""
        for kept, value in zip(self.outputs or [], _as_tuple(self._layer_to_call(*(self.inputs or [])))):
            kept.copy_(value)

    def registerPersistentData(self) -> None:
        """Makes tensors for the inputs and outputs of the shapes seen by the last call."""
        self.inputs = [torch.zeros(shape) for shape in self.in_shapes or []]
        self.outputs = [torch.zeros(shape) for shape in self.out_shapes or []]

    def __call__(self, *input: torch.Tensor, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None:
            result = self._layer_to_call(*input)
        else:
            refuse_training(recorder, "CPU")
            function = _functions.setdefault(recorder, {}).setdefault(self._ID, self._layer_to_call)
            result = call_recorded(recorder, _on_host(function), input, backward=_no_gradient, name=self._ID)
        self.in_shapes = [tensor.shape for tensor in input]
        self.out_shapes = [tensor.shape for tensor in _as_tuple(result)]
        return result


def _as_tuple(result: Any) -> Tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        with natively():
            result = function(*tensors)
        return tuple(result) if isinstance(result, list) else result

    return call


def _no_gradient(*_: Any) -> Any:
    raise createPoptorchError("poptorch.CPU() is only supported in inference models: it has no gradient.")
