"""Loops and branches on the device: for_loop and cond.

A body's Python runs once, at compile. What a loop's did is kept as a list of the ops it called, and the list is
issued again for every further trip, so the compiled graph holds the loop unrolled. A branch is one op of the graph,
which computes the body that the condition chooses.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.branches import Branches, trace_body
from ipurun.emulator._ops.op_log import OpLog, call_recorded
from ipurun.emulator._ops.recording import active_recorder, refuse_training

Body = Callable[..., Any]


def _as_list(outputs: Any) -> List[torch.Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _check_inputs(op: str, name: str, inputs: Any) -> None:
    expected = f"poptorch.{op} expects input tensors ({name}) to be a list of tensors."
    if not isinstance(inputs, list):
        raise ValueError(f"{expected} (Object is not list)")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{expected} (Object contained in list at index {index} is not torch.tensor)")


def for_loop(count: int, body: Body, inputs: List[torch.Tensor]) -> List[torch.Tensor]:
    """Runs `body` `count` times on the device, each time on what the last run returned.

    Args:
        count: Number of trips.
        body: Function of as many tensors as it returns. Outside an executor it runs once only.
        inputs: Values of the first trip; passed by value, so never changed.

    Raises:
        ValueError: `inputs` is not a list of tensors.
        poptorch.Error: In training, or when the body does not return what it takes.
    """
    _check_inputs("for_loop", "inputs", inputs)
    recorder = active_recorder()
    if recorder is None:
        return _as_list(body(*[value.clone() for value in inputs]))
    refuse_training(recorder, "for_loop")

    first = [value.clone() for value in inputs]
    with OpLog() as log:
        outputs = _as_list(body(*first))
    _check_carried(first, outputs)
    if count < 1:
        return [value.clone() for value in inputs]
    carried = outputs
    for _ in range(count - 1):
        new_tensor = log.issue_again(first, [value.clone() for value in carried])
        carried = [new_tensor(value) for value in outputs]
    return carried


def _check_carried(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    before = [(tuple(value.shape), value.dtype) for value in inputs]
    after = [(tuple(value.shape), value.dtype) for value in outputs]
    if before != after:
        raise createPoptorchError(
            "poptorch.for_loop: the body must return as many tensors as it takes, of the same shapes and "
            f"types. It takes {before} and returns {after}."
        )


def cond(
    condition: torch.Tensor,
    then_body: Body,
    then_inps: List[torch.Tensor],
    else_body: Body,
    else_inps: List[torch.Tensor],
) -> List[torch.Tensor]:
    """Runs one of two bodies, chosen by a value known at run time only.

    Args:
        condition: One element; true chooses `then_body`.
        then_body: Function of `then_inps`.
        then_inps: Its inputs, passed by value.
        else_body: Function of `else_inps`, returning tensors like those of `then_body`.
        else_inps: Its inputs, passed by value.

    Raises:
        ValueError: The inputs are not lists of tensors.
        poptorch.Error: In training, or when the two bodies return different shapes or counts.
    """
    _check_inputs("cond", "then_inps", then_inps)
    _check_inputs("cond", "else_inps", else_inps)
    recorder = active_recorder()
    if recorder is None:
        body, inputs = (then_body, then_inps) if bool(condition) else (else_body, else_inps)
        return _as_list(body(*[value.clone() for value in inputs]))
    refuse_training(recorder, "cond")

    chosen, tensors = trace_body(recorder, then_body, then_inps)
    other, more_tensors = trace_body(recorder, else_body, else_inps)
    tensors.update(more_tensors)
    branches = Branches(chosen, other)
    flag = condition.reshape(()).to(torch.bool)
    results = call_recorded(recorder, branches, [flag, *[tensors[value] for value in branches.outer]], name="cond")
    num_outputs = len(results) - len(branches.written)
    with torch.no_grad():
        for value, result in zip(branches.written, results[num_outputs:]):
            tensors[value].copy_(result)
    return list(results[:num_outputs])
