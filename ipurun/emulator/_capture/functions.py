"""Watch or replace torch functions before torch decomposes them."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Union

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ipurun.emulator._capture.losses import (
    LOSS_FUNCTIONS,
    check_loss_arguments,
    with_length_tensors,
    without_label_smoothing,
)
from ipurun.emulator._capture.mixed_types import in_one_type
from ipurun.emulator._capture.op_kinds import RECURRENT_LAYERS, check_recurrent_layers
from ipurun.emulator._capture.recorder import Recorder, current
from ipurun.emulator._capture.saved_tensors import SavedTensors
from ipurun.emulator._capture.sources import calling_line
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._impl import createNativeError, createPoptorchError

_HOOKS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("register_hook", "register_post_accumulate_grad_hook")
    if hasattr(torch.Tensor, name)
)
_MARKS_LEAF = frozenset([torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__])
_LEAVES_GRAPH = {torch.Tensor.numpy: "numpy()", torch.Tensor.tolist: "tolist()"}
_MOVES = frozenset([torch.Tensor.to, torch.Tensor.type_as])
_TO_DEVICE = frozenset([torch.Tensor.to, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor])


@contextlib.contextmanager
def attention_by_parts() -> Iterator[None]:
    """Make torch's own layers compute attention with `attention_of_torch_2_0` too, whichever torch runs the capture.

    They call it below the reach of a `TorchFunctionMode`. What calls attention from C++ gets matmuls and a softmax.
    """
    attention = getattr(torch.nn, "attention", None)
    if attention is None or not hasattr(attention, "sdpa_kernel"):
        yield  # torch before 2.3 has no fused kernel for the CPU
        return
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention_of_torch_2_0
    try:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            yield
    finally:
        functional.scaled_dot_product_attention = original


def attention_of_torch_2_0(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute scaled-dot-product attention with the operations of torch 2.0.1, which an IPU host executes.

    Later versions compute it in single precision and keep a copy of every operand. `scale` and `enable_gqa` are
    arguments of theirs.
    """
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or to match query dtype, but got attn_mask.dtype: "
            f"{attn_mask.dtype} and query.dtype: {query.dtype} instead."
        )
    if attn_mask is not None and is_causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    # Both operands are scaled by the root, for the range of half precision.
    divisor = math.sqrt(math.sqrt(query.shape[-1])) if scale is None else 1 / math.sqrt(abs(scale))
    query = query / (divisor if scale is None or scale > 0 else -divisor)
    if is_causal:
        lengths = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(lengths, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = attn_mask
        attn_mask = torch.zeros_like(allowed, dtype=query.dtype)
        attn_mask.masked_fill_(allowed.logical_not(), -math.inf)
    scores = torch.matmul(query, key.transpose(-2, -1) / divisor)
    if attn_mask is not None:
        scores.add_(attn_mask)
    scores = torch.softmax(scores, -1)
    if dropout_p > 0:
        scores = functional.dropout(scores, dropout_p, True)
    return torch.matmul(scores, value)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return one-hot rows without reading the values back, as torch does to check them and count classes."""
    if num_classes < 0:
        raise createNativeError("OneHot num classes must be specified and must be constant.")
    classes = torch.arange(num_classes, dtype=tensor.dtype, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _bincount(input: torch.Tensor, weights: Optional[torch.Tensor] = None, minlength: int = 0) -> torch.Tensor:
    """Count the values of a device's tensor that are below `minlength`, so that the result has this fixed size."""
    counts = torch.bincount(input, weights, minlength)
    recorder = current()
    return counts[:minlength] if recorder is not None and recorder.varies(input) else counts


def _rrelu(
    input: torch.Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """Draw the slopes in a separate operation: torch writes them to a tensor that backward has saved."""
    if training:
        slopes: Union[torch.Tensor, float] = torch.empty_like(input, requires_grad=False).uniform_(lower, upper)
    else:
        slopes = (lower + upper) / 2
    result = torch.where(input >= 0, input, input * slopes)
    return input.copy_(result) if inplace else result


def _batch_norm(
    input: torch.Tensor,
    running_mean: Optional[torch.Tensor],
    running_var: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Do not update running statistics in an inference model: the backend updates them with the weights."""
    recorder = current()
    if training and recorder is not None and not recorder.training:
        running_mean = running_var = None
    return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute group norm; with the backend's strided grouping, channel c belongs to group c % num_groups."""
    recorder = current()
    assert recorder is not None
    if recorder.options is None or not recorder.options._Popart.options.get("groupNormStridedChannelGrouping", False):
        return functional.group_norm(input, num_groups, weight, bias, eps)
    rows, channels, *rest = input.shape
    size = channels // num_groups
    gathered = input.reshape(rows, size, num_groups, *rest).transpose(1, 2).reshape(input.shape)
    norm = functional.group_norm(gathered, num_groups, None, None, eps)
    norm = norm.reshape(rows, num_groups, size, *rest).transpose(1, 2).reshape(input.shape)
    per_channel = (channels, *[1] * len(rest))
    if weight is not None:
        norm = norm * weight.reshape(per_channel)
    return norm if bias is None else norm + bias.reshape(per_channel)


REPLACED_FUNCTIONS: Dict[Callable[..., Any], Callable[..., Any]] = {
    torch.bincount: _bincount,
    torch.Tensor.bincount: _bincount,
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.one_hot: _one_hot,
    functional.rrelu: _rrelu,
    functional.scaled_dot_product_attention: attention_of_torch_2_0,
}


# The argument of each function that may be a mask: its position and its name.
_MASKS: Dict[Callable[..., Any], Tuple[int, str]] = {
    **dict.fromkeys((torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_), (1, "mask")),
    **dict.fromkeys((torch.masked_scatter, torch.Tensor.masked_scatter, torch.Tensor.masked_scatter_), (1, "mask")),
    **dict.fromkeys((torch.index_put, torch.Tensor.index_put, torch.Tensor.index_put_), (1, "indices")),
    torch.Tensor.__setitem__: (1, "key"),
    torch.where: (0, "condition"),
    torch.Tensor.where: (1, "condition"),
}


def _with_boolean_mask(
    func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Make uint8 masks boolean, as PopTorch does: torch accepted them up to 2.1, with a warning."""
    if func not in _MASKS:
        return args, kwargs
    position, name = _MASKS[func]
    if len(args) > position:
        args = (*args[:position], _boolean(args[position]), *args[position + 1 :])
    elif name in kwargs:
        kwargs = {**kwargs, name: _boolean(kwargs[name])}
    return args, kwargs


def _boolean(mask: Any) -> Any:
    if isinstance(mask, (tuple, list)):
        return type(mask)(_boolean(part) for part in mask)
    return mask.to(torch.bool) if isinstance(mask, torch.Tensor) and mask.dtype == torch.uint8 else mask


class FunctionWatcher(TorchFunctionMode):
    """Watches the torch functions that the model calls while a recorder is active.

    Args:
        recorder: The recorder of the compile.
        saved: The tensors that autograd saves meanwhile.
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
            # A dispatch mode calls it: the function that the model called is still the outer one, or none.
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
            with self._recorder.refusing():
                raise createPoptorchError(
                    f"{_LEAVES_GRAPH[func]} was called on a tensor of the model at {calling_line()}: the values are "
                    "on the device while the model runs. Return the tensor and use it on the host instead."
                )
            args = (args[0].detach(), *args[1:])  # noted, not raised
        if func is torch.Tensor.backward and not self._recorder.in_backward:
            refuse_backward()
        if func in _MARKS_LEAF or kwargs.get("requires_grad"):
            self._saved.keep = True
        if func in _HOOKS:
            self._recorder.graph.has_own_gradients = True
        if func in _TO_DEVICE:
            args = tuple(_without_ipu(a) for a in args)
        args, kwargs = in_one_type(func, args, kwargs)
        args, kwargs = _with_boolean_mask(func, args, kwargs)
        func = REPLACED_FUNCTIONS.get(func, func)
        if func in RECURRENT_LAYERS:
            with self._recorder.refusing():
                check_recurrent_layers(RECURRENT_LAYERS[func], args)
        if func not in LOSS_FUNCTIONS:
            result = func(*args, **kwargs)
            # Without values, torch.tensor() calls no operation that could be recorded.
            if func is torch.tensor or (func in _MOVES and self._names_device(args[1:], kwargs)):
                self._recorder.host.moved(self._recorder.graph.specs[self._recorder.value_of(result)])
            return result
        with self._recorder.refusing():
            check_loss_arguments(func, args, kwargs)
        args, kwargs = with_length_tensors(func, args, kwargs)
        args, kwargs = without_label_smoothing(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._recorder.training and not self._recorder.in_backward:
            self._recorder.mark_loss(result)
        return result

    def _names_device(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Whether the arguments of `Tensor.to` name a device, directly or through another tensor."""
        if "device" in kwargs or any(isinstance(argument, (str, torch.device)) for argument in args):
            return True
        recorder = self._recorder
        others = (recorder.graph.specs[recorder.value_of(tensor)] for tensor in tensors_in((args, kwargs)))
        return any(not recorder.host.holds(other) for other in others)


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


def refuse_backward(*args: Any, **kwargs: Any) -> None:
    """Raise in place of the backward method of returned tensors.

    Raises:
        Error: Always.
    """
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
        "trainingModel, the backwards pass is performed automatically when invoking the model. If you're "
        "using an inferenceModel, you should use a trainingModel instead."
    )
