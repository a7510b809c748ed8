"""Lending the device's tensors to the user's model for one capture, and giving it back as it was."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Tuple

import torch

from ipurun.emulator import _wrapping
from ipurun.emulator._impl import createPoptorchError

__all__ = ["named_tensors", "on_device"]

_MAY_REASSIGN = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def named_tensors(model: Any) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]:
    """Returns parameters and buffers by name, a tensor with several names under its first one."""
    if not isinstance(model, torch.nn.Module):
        return {}, {}
    parameters = dict(torch.nn.Module.named_parameters(model))
    buffers = dict(torch.nn.Module.named_buffers(model))
    return parameters, buffers


@contextlib.contextmanager
def on_device(model: Any, device_tensors: Dict[str, torch.Tensor]) -> Iterator[None]:
    """Makes the parameters and buffers of a model plain tensors with the device's data.

    Afterwards they are what they were. The objects stay the same all the time, so that references to them
    from anywhere see the device's data.

    Raises:
        Error: If a parameter or buffer was replaced or removed inside.
    """
    if not isinstance(model, torch.nn.Module):
        yield
        return
    parameters, buffers = named_tensors(model)
    tensors = {**parameters, **buffers}
    classes = [(tensor, type(tensor), _wrapping.executor_of(tensor)) for tensor in tensors.values()]
    tables = _tables(model)
    _wrapping.unwrap_tensors(model)
    original_data = {name: tensor.data for name, tensor in tensors.items()}
    problems: List[str] = []
    try:
        for name, tensor in tensors.items():
            tensor.data = device_tensors[name]
        yield
        problems = _reassigned(tables)
    finally:
        for _, _, table, before in tables:
            table.clear()
            table.update(before)
        for name, tensor in tensors.items():
            tensor.data = original_data[name]
        for tensor, kind, executor in classes:
            _wrapping.restore_class(tensor, kind, executor)
    if problems:
        raise createPoptorchError(problems[0])


def _tables(model: torch.nn.Module) -> List[Tuple[str, torch.nn.Module, Dict[str, Any], Dict[str, Any]]]:
    tables = []
    for name, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            tables.append((name, module, table, dict(table)))
    return tables


def _reassigned(tables: List[Tuple[str, torch.nn.Module, Dict[str, Any], Dict[str, Any]]]) -> List[str]:
    problems = []
    for path, module, table, before in tables:
        if isinstance(module, _MAY_REASSIGN):
            continue
        for key, tensor in before.items():
            name = f"{path}.{key}" if path else key
            if key not in table:
                problems.append(f"{name} was removed from the model when it ran: this is not supported.")
            elif table[key] is not tensor:
                problems.append(
                    f"{name} is reassigned within the model when running on the IPU, which is not supported. "
                    f"Change it in place instead, for example with self.{name}.copy_(...)."
                )
    return problems
