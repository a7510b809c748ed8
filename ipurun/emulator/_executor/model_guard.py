"""Put the device's tensors into the user's model for one capture, and restore it afterwards."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import torch

from ipurun.emulator._capture.capture import forget_history
from ipurun.emulator._executor import wrapping
from ipurun.emulator._impl import createPoptorchError

_MAY_REASSIGN = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def named_tensors(model: Any) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]:
    """Return parameters and buffers by name; a tensor with several names gets its first one."""
    if not isinstance(model, torch.nn.Module):
        return {}, {}
    parameters = dict(torch.nn.Module.named_parameters(model))
    buffers = dict(torch.nn.Module.named_buffers(model))
    return parameters, buffers


@contextlib.contextmanager
def on_device(model: Any, device_tensors: Dict[str, torch.Tensor]) -> Iterator[None]:
    """Make the parameters and buffers of a model plain tensors with the device's data.

    They are restored afterwards. The objects stay the same, so that every reference to them sees the
    device's data.

    Raises:
        Error: If the body replaced or removed a parameter or buffer.
    """
    if not isinstance(model, torch.nn.Module):
        yield
        return
    parameters, buffers = named_tensors(model)
    tensors = {**parameters, **buffers}
    classes = [(tensor, type(tensor), wrapping.executor_of(tensor)) for tensor in tensors.values()]
    tables = _tables(model)
    wrapping.unwrap_tensors(model)
    original_data = {name: tensor.data for name, tensor in tensors.items()}
    problems: List[str] = []
    try:
        for name, tensor in tensors.items():
            tensor.data = device_tensors[name]
        yield
        problems = _reassigned(tables)
    finally:
        for table in tables:
            table.entries.clear()
            table.entries.update(table.before)
        for name, tensor in tensors.items():
            forget_history(tensor)
            tensor.data = original_data[name]
        for tensor, kind, executor in classes:
            wrapping.restore_class(tensor, kind, executor)
    if problems:
        raise createPoptorchError(problems[0])


class _Table(NamedTuple):
    """The parameters or buffers of one module, now and before the capture."""

    kind: str
    path: str
    module: torch.nn.Module
    entries: Dict[str, Any]
    before: Dict[str, Any]


def _tables(model: torch.nn.Module) -> List[_Table]:
    tables = []
    for path, module in model.named_modules():
        tables.append(_Table("Parameter", path, module, module._parameters, dict(module._parameters)))
        tables.append(_Table("Buffer", path, module, module._buffers, dict(module._buffers)))
    return tables


def _reassigned(tables: List[_Table]) -> List[str]:
    problems = []
    for table in tables:
        if isinstance(table.module, _MAY_REASSIGN):
            continue
        for key, tensor in table.before.items():
            name = f"{table.path}.{key}" if table.path else key
            if key not in table.entries:
                problems.append(f"{table.kind} {name} is removed from the model when calling the forward method.")
            elif table.entries[key] is not tensor:
                problems.append(
                    f"{table.kind} {name} is reassigned within the model when calling the forward method. This is "
                    f"not supported. Consider using self.{name}.copy_(src) to copy data from a source tensor, "
                    "where src is the name of the source tensor."
                )
    return problems
