"""Classify aten operations: random, data-dependent, in-place, and not supported by PopTorch.

Operations that PopTorch cannot lower are refused, so that a model that runs here also compiles on an IPU.
`POPTORCH_EMULATOR_STRICT=0` turns the refusal into a warning.
"""

from __future__ import annotations

import functools
import json
import math
import os
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence

import torch

from ipurun.emulator._capture.graph import Node
from ipurun.emulator._capture.sources import calling_line
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._logging import logger

_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supported_ops.json")
# Names that PopTorch knows but rejects.
_REFUSED = {
    "upsample_linear1d": "Unsupported upsample mode 'linear': in one dimension only 'nearest' is supported.",
    "upsample_trilinear3d": "Unsupported upsample mode 'trilinear': in three dimensions only 'nearest' is supported.",
}


def names_in(text: str) -> FrozenSet[str]:
    """Return the set of words in a text."""
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
# torch 2.0 reads the wrong numbers where the two tensors lie in memory differently: on a CPU, gradients are garbage.
NEEDS_ONE_LAYOUT = (torch.ops.aten.gelu_backward.default,) if torch.__version__.startswith("2.0.") else ()


def _views_in_place() -> Dict[Any, Any]:
    aten = torch.ops.aten
    found = {aten.transpose_.default: aten.transpose.int}
    for name in ("squeeze", "t", "unsqueeze"):
        view, in_place = getattr(aten, name), getattr(aten, f"{name}_")
        found.update(
            {getattr(in_place, each): getattr(view, each) for each in in_place.overloads() if each != "dimname"}
        )
    return found


# What the recurrent layers of torch.nn call. Torch takes it to pieces before an operation is recorded.
RECURRENT_LAYERS = {torch.lstm: "LSTM", torch.gru: "GRU", torch.rnn_tanh: "RNN", torch.rnn_relu: "RNN"}
# Operations that change only the shape and the strides of a tensor, and those that return such a view.
VIEWS_IN_PLACE = _views_in_place()


def written_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> List[Any]:
    """Return the arguments that an operation changes in place according to its schema."""
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def explain_data_dependence(op: str) -> str:
    """Return the error message for an operation whose result depends on data."""
    line = calling_line()
    if "site-packages" in line:
        advice = (
            "The line belongs to a library: look for a setting or an argument that avoids the check. Models of "
            "transformers take an attention mask of four dimensions (batch, 1, queries, keys) as it is."
        )
    else:
        advice = (
            "Use torch.where or multiply by a mask instead of branching or selecting, poptorch.cond or "
            "poptorch.for_loop for control flow in inference, or return the tensor and decide on the host."
        )
    return (
        f"A tensor of the model is used in a way that depends on its data at {line or 'an unknown line'}: "
        f"{DATA_DEPENDENT_OPS[op]}. The model is captured once, as a graph of fixed shapes without Python. {advice}"
    )


def refuse_mask_index(indices: Sequence[Optional[torch.Tensor]]) -> None:
    """Raise if an index is a mask, because the shape of the result would depend on its values.

    Raises:
        Error: If an index is a boolean or byte tensor.
    """
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise createNativeError(
            "Indexing using boolean or byte tensor masks is unsupported because it would produce dynamic output "
            "shapes based on the mask values. The IPU cannot support dynamic output shapes. "
            f"Use torch.where at {calling_line() or 'an unknown line'} instead."
        )


def supposed_result(func: Callable[..., Any], name: str, args: Sequence[Any]) -> Any:
    """Return what an operation whose shape depends on values gives for tensors without any; None for all others.

    Every value counts as 1: masks are true everywhere, and all sequences of a CTC loss have their full length.
    """
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_meta:
        return None
    if name == "masked_select":
        return first.new_empty(math.prod(torch.broadcast_shapes(first.shape, args[1].shape)))
    if name == "nonzero":
        return first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
    if name == "equal":
        return first.shape == args[1].shape
    if name == "index" and any(index is not None and index.dtype is torch.bool for index in args[1]):
        places: List[Optional[torch.Tensor]] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype is torch.bool
            places += [index.new_empty(index.numel(), dtype=torch.int64)] * index.dim() if is_mask else [index]
        return func(first, places)
    if name == "_ctc_loss":
        frames, batch = (first.shape[0], first.shape[1]) if first.dim() == 3 else (first.shape[0], 1)
        longest = args[1].shape[1] if args[1].dim() == 2 else args[1].numel() // max(batch, 1)
        return first.new_empty(batch), first.new_empty((batch, frames, 2 * longest + 1))
    return None


def refuse_open_bincount(weights: Optional[torch.Tensor] = None, minlength: int = 0) -> None:
    """Raise if the size of a count is not given, because it would depend on the values.

    Raises:
        Error: If `minlength` is missing.
    """
    if minlength < 1:
        raise createNativeError(
            "torch.bincount without minlength is unsupported because the output shape is determined by the tensor "
            "values. The IPU cannot support dynamic output shapes. Pass minlength, the number of bins, at "
            f"{calling_line() or 'an unknown line'}."
        )


# Operations that torch's CPU dispatcher derives from supported ones, or that move no data on a device.
_PARTS_OF_SUPPORTED: FrozenSet[str] = names_in("""
    _adaptive_avg_pool2d _adaptive_avg_pool3d _copy_from _ctc_loss _embedding_bag_forward_only
    _fused_dropout _index_put_impl _local_scalar_dense _native_batch_norm_legit
    _native_multi_head_attention _pdist_forward _reshape_copy _safe_softmax
    _scaled_dot_product_attention_math _thnn_fused_gru_cell _thnn_fused_lstm_cell _to_copy
    _transform_bias_rescale_qkv _trilinear _unsafe_index _unsafe_masked_index adaptive_max_pool2d
    addbmm addr aminmax clone_ copy diag_embed diagonal empty_like expand_copy fill hardtanh_
    index_add index_copy is_same_size lift lift_fresh lift_fresh_copy linalg_matrix_norm
    masked_scatter mkldnn_rnn_layer native_dropout native_norm new_empty new_empty_strided nll_loss
    nll_loss2d norm_except_dim normal_functional permute_copy rand_like randint_like randn_like
    resolve_conj resolve_neg scalar_tensor slice_scatter softplus special_erf special_xlog1py
    split_copy sym_size threshold_ type_as uniform unsafe_split unsafe_split_with_sizes
    upsample_bilinear2d_aa view_as xlogy zero
""")


@functools.lru_cache(maxsize=None)
def _supported_names() -> FrozenSet[str]:
    with open(_TABLE, encoding="utf-8") as file:
        table = json.load(file)
    return frozenset(table["aten"]) | frozenset(table["decomposed"]) | _PARTS_OF_SUPPORTED


def is_supported(name: str) -> bool:
    """Whether PopTorch can lower an aten operation, given by its base name."""
    names = _supported_names()
    if name in _REFUSED:
        return False
    return name in names or (name.endswith("_") and name[:-1] in names)


def op_checker() -> Callable[[Node], None]:
    """Return a function that raises, or warns, for a node that PopTorch cannot lower."""
    warned = set()

    def check(node: Node) -> None:
        schema = getattr(node.op, "_schema", None)
        if schema is None or not schema.name.startswith("aten::") or is_supported(node.name):
            return
        text = (
            f"Unsupported ops found in compiled model: [{schema.name}], called at "
            f"{node.source or 'an unknown line'}. "
            f"{_REFUSED.get(node.name, 'PopTorch 3.4 cannot lower this unsupported operation to the IPU.')}"
        )
        if node.name not in warned:
            _refuse(text)
            warned.add(node.name)

    return check


def check_recurrent_layers(name: str, args: Sequence[Any]) -> None:
    """Raise, or warn, for recurrent layers that PopTorch cannot lower.

    Args:
        name: A value of `RECURRENT_LAYERS`.
        args: The arguments of its function, as the modules of `torch.nn` pass them.
    """
    if len(args) < 8 or not isinstance(args[3], bool):  # packed sequences, whose operations are refused themselves
        return
    weights, bias, num_layers, dropout, _, bidirectional = args[2:8]
    found = ""
    if not bias and name != "GRU":
        found = f"{name} without biases not supported"
    elif num_layers != 1:
        found = f"Only {name} with 1 layer supported"
    elif dropout != 0:
        found = f"{name} only supports dropout = 0.0"
    elif bidirectional:
        found = f"bidirectional {name} not supported"
    elif len(weights) % 2:
        found = f"{name} with projections not supported"
    if found:
        _refuse(
            f"{found}, called at {calling_line() or 'an unknown line'}. Write a module for each layer and direction, "
            "with bias=True: torch.flip before and after the one for the other direction, torch.nn.Dropout in between."
        )


def _refuse(text: str) -> None:
    if os.environ.get("POPTORCH_EMULATOR_STRICT", "1") != "0":
        raise createNativeError(f"{text} Set POPTORCH_EMULATOR_STRICT=0 to run it on the CPU anyway.")
    logger.warning(text)
