"""What capture must see before torch takes a function apart: losses, casts, and calls that leave the graph."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode

from ipurun.emulator._capture import half
from ipurun.emulator._capture.losses import LOSS_FUNCTIONS, check_loss_arguments
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.replaced_functions import REPLACED_FUNCTIONS
from ipurun.emulator._capture.saved_tensors import SavedTensors
from ipurun.emulator._capture.sources import calling_line
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._run.outputs import refuse_backward

__all__ = ["FunctionWatcher"]

_HOOKS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("register_hook", "register_post_accumulate_grad_hook")
    if hasattr(torch.Tensor, name)
)
_MARKS_LEAF = frozenset([torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__])
_LEAVES_GRAPH = {torch.Tensor.numpy: "numpy()", torch.Tensor.tolist: "tolist()"}


class FunctionWatcher(TorchFunctionMode):
    """Watches the torch functions that the model calls while a recorder is active.

    Args:
        recorder: The recorder of the compile.
        saved: What autograd saves meanwhile.
    """

    def __init__(self, recorder: Recorder, saved: SavedTensors) -> None:
        super().__init__()
        self._recorder = recorder
        self._saved = saved

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            # A dispatch mode hands it on: the function that the model calls is still the one above it, or none.
            return self._call(func, args, kwargs or {})
        host = self._recorder.host
        outer, host.function = host.function, func
        try:
            return self._call(func, args, kwargs or {})
        finally:
            host.function = outer

    def _call(self, func: Callable[..., Any], args: Tuple[Any, ...], given: Dict[str, Any]) -> Any:
        kwargs = _on_cpu(given)
        if func in _LEAVES_GRAPH and any(self._recorder.varies(t) for t in tensors_in(args)):
            raise createPoptorchError(
                f"{_LEAVES_GRAPH[func]} is called on a tensor of the model at {calling_line()}: the values are "
                "on the device while the model runs. Return the tensor and use it on the host instead."
            )
        if func is torch.Tensor.backward and not self._recorder.in_backward:
            refuse_backward()
        if func in _MARKS_LEAF or kwargs.get("requires_grad"):
            self._saved.keep = True
        if func in _HOOKS:
            self._recorder.graph.has_own_gradients = True
        if func in _TO_DEVICE:
            args = tuple(_without_ipu(a) for a in args)
        args, kwargs = half.cast_weights(func, args, kwargs)
        func = REPLACED_FUNCTIONS.get(func, func)
        if func not in LOSS_FUNCTIONS:
            result = func(*args, **kwargs)
            if func in _MOVES and self._names_device(args[1:], kwargs):
                self._recorder.host.moved(self._recorder.graph.specs[self._recorder.value_of(result)])
            return result
        check_loss_arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._recorder.training and not self._recorder.in_backward:
            self._recorder.mark_loss(result)
        return result

    def _names_device(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Whether the arguments of `Tensor.to` name a device, by itself or as that of another tensor."""
        if "device" in kwargs or any(isinstance(argument, (str, torch.device)) for argument in args):
            return True
        recorder = self._recorder
        others = (recorder.graph.specs[recorder.value_of(tensor)] for tensor in tensors_in((args, kwargs)))
        return any(not recorder.host.holds(other) for other in others)


_MOVES = frozenset([torch.Tensor.to, torch.Tensor.type_as])
_TO_DEVICE = frozenset([torch.Tensor.to, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor])


def _without_ipu(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return torch.device("cpu") if argument.type == "ipu" else argument
    if isinstance(argument, str) and argument.split(":")[0] == "ipu":
        return torch.device("cpu")
    return argument


def _on_cpu(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    if "device" not in kwargs:
        return kwargs
    return {**kwargs, "device": _without_ipu(kwargs["device"])}
