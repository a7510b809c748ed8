"""Find the loss of a captured training model, and give losses their shapes on a device."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import torch
from torch.nn import functional

from ipurun.emulator._capture.graph import Graph, Node, Value, values_in
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._impl import createNativeError, createPoptorchError
from ipurun.emulator._logging import logger

LOSS_FUNCTIONS = frozenset(
    [
        functional.l1_loss,
        functional.mse_loss,
        functional.cross_entropy,
        functional.nll_loss,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.kl_div,
        functional.poisson_nll_loss,
        functional.hinge_embedding_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
        functional.multilabel_soft_margin_loss,
        functional.cosine_embedding_loss,
        functional.margin_ranking_loss,
        functional.triplet_margin_loss,
        functional.ctc_loss,
        torch.nll_loss if hasattr(torch, "nll_loss") else functional.nll_loss,
        torch.binary_cross_entropy_with_logits,
        torch.kl_div,
        torch.poisson_nll_loss,
        torch.hinge_embedding_loss,
        torch.cosine_embedding_loss,
        torch.margin_ranking_loss,
        torch.triplet_margin_loss,
        torch.ctc_loss,
    ]
)
_CTC_ARGUMENTS = (
    "log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity"
)  # fmt: skip
_SMOOTHING = "label_smoothing"
_SMOOTHING_POSITION = 7
_KEEPS_SHAPE = frozenset(["_to_copy", "alias", "clone", "detach"])


def check_loss_arguments(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    """Raise for a loss that PopTorch cannot lower: class weights, unreduced or concatenated CTC."""
    if function in (functional.cross_entropy, functional.nll_loss):
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        if weight is not None:
            raise createNativeError(f"{function.__name__}: the class weights argument is not supported")
    elif function in (functional.ctc_loss, torch.ctc_loss):
        given = {**dict(zip(_CTC_ARGUMENTS, args)), **kwargs}
        targets = given.get("targets")
        if given.get("reduction", "mean") in ("none", 0):  # torch.ctc_loss takes a number
            raise createNativeError("Unsupported reduction type for ctc_loss: none")
        if isinstance(targets, torch.Tensor) and targets.dim() != 2:
            raise createNativeError("ctc_loss: targets must be 2-dimensional and padded")


def with_length_tensors(
    function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Return the arguments of a CTC loss with Python lengths as tensors.

    To divide by lengths that are Python numbers, torch makes a tensor in C++, where no recorder sees its values.
    """
    if function not in (functional.ctc_loss, torch.ctc_loss):
        return args, kwargs
    given = {**dict(zip(_CTC_ARGUMENTS, args)), **kwargs}
    for name in ("input_lengths", "target_lengths"):
        if isinstance(given.get(name), (list, tuple)):
            given[name] = torch.tensor(given[name], dtype=torch.int64)
    return (), given


def without_label_smoothing(
    function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Return the arguments of a cross-entropy without label smoothing, which PopTorch does not read."""
    if function is not functional.cross_entropy:
        return args, kwargs
    smoothing = args[_SMOOTHING_POSITION] if len(args) > _SMOOTHING_POSITION else kwargs.get(_SMOOTHING)
    if smoothing:
        logger.warning(
            "cross_entropy: PopTorch ignores label_smoothing=%s. Write the smoothed loss with log_softmax and "
            "nll_loss, and wrap it in poptorch.identity_loss.",
            smoothing,
        )
    return args[:_SMOOTHING_POSITION], {name: value for name, value in kwargs.items() if name != _SMOOTHING}


def find_loss(recorder: Recorder, returned: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the one loss that the returned tensors depend on.

    Raises:
        Error: If there is no loss, if there are several, or if it has more than one element.
    """
    losses = recorder.independent_losses(returned)
    if not losses:
        raise createNativeError(
            "Couldn't find a loss in graph. A training model must return a value that depends on a loss: "
            "use one of torch's loss functions, or wrap your own with poptorch.identity_loss."
        )
    if len(losses) > 1:
        raise createNativeError(
            "Multiple independent losses found in graph. Graph must have one final loss. "
            "Wrap final graph loss in poptorch.identity_loss."
        )
    loss = recorder.tensor_of(losses[0])
    if loss.numel() != 1:
        raise createNativeError(
            f"The loss must be a scalar tensor, this one has shape {tuple(loss.shape)}. "
            "Reduce it with the reduction 'mean' or 'sum'.",
            "popart_exception",
        )
    if not loss.is_floating_point():
        raise createPoptorchError(f"The loss must be a floating point tensor, this one is {loss.dtype}.")
    return loss


def give_device_shapes(graph: Graph) -> List[int]:
    """Reshape outputs that are one-element vectors on a device, in place, and return their indices.

    PopTorch lowers an `identity_loss` with a reduction inside another loss to a reduction of the flattened tensor along
    its one long dimension, which leaves a one-element vector where torch has a scalar. Elementwise ops preserve it.
    """
    if graph.loss is None:
        return []  # in inference, losses are plain reductions
    vectors = _one_element_vectors(graph)
    num_forward = sum(not node.is_backward for node in graph.nodes)
    changed = [index for index, value in enumerate(graph.outputs) if value in vectors]
    for index in changed:
        value = graph.outputs[index]
        producer = next(node for node in graph.nodes if value in values_in(node.outputs))
        vector = Value(max(graph.specs) + 1)
        graph.specs[vector] = graph.specs[value]._replace(shape=(1,))
        if value in graph.varying:
            graph.varying.add(vector)
        view = Node(torch.ops.aten.view.default, (value, [1]), {}, vector, producer.placement, producer.module_path)
        view.name, view.source, view.position = "view", producer.source, producer.position
        graph.nodes.insert(num_forward, view)
        num_forward += 1
        graph.outputs[index] = vector
    return changed


def _one_element_vectors(graph: Graph) -> Set[Value]:
    """Return the scalar values that have one dimension on a device."""
    found = {
        event.value
        for event in graph.events
        if event.kind == "identity_loss" and event.info["reduction"] != "none" and event.value != graph.loss
    }
    for node in graph.nodes:
        if node.is_backward or not _is_elementwise(node) or not found.intersection(node.reads()):
            continue
        found.update(value for value in values_in(node.outputs) if graph.specs[value].shape == ())
    return {value for value in found if value is not None}


def _is_elementwise(node: Node) -> bool:
    return node.name in _KEEPS_SHAPE or torch.Tag.pointwise in getattr(node.op, "tags", ())
