"""Track tensors that stay on the host during a capture; no operation may mix them with device tensors.

PopTorch moves parameters, buffers and inputs to the IPU, and tensors made by `torch.tensor` and similar functions are
on the IPU too. Any other tensor (from a closure, a global, `torch.LongTensor`, `torch.from_numpy`) stays on the host.
Operations on such tensors alone run on the host, once, and their result is a constant; mixed with device tensors they
fail.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.graph import TensorSpec
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._logging import logger

# Torch moves indices and assigned values of these to the other tensor's device.
_MIX_DEVICES = frozenset(["copy_", "fill_", "index", "index_put", "index_put_", "_index_put_impl_"])
# PopTorch creates the results of these on the device, wherever their arguments are.
_MADE_ON_DEVICE = frozenset(["full_like", "zeros_like"])
# Functions that wrap host data without moving it.
_WRAP_HOST_DATA = frozenset(getattr(torch, name) for name in ("as_tensor", "asarray", "frombuffer"))
_MAX_ATTRIBUTE_DEPTH = 3
_SCALAR_TYPES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint8: "Byte",
}


def scalar_type_name(dtype: torch.dtype) -> str:
    """Return the name of a type in torch's native layer: Float, Long, Bool."""
    return _SCALAR_TYPES.get(dtype, str(dtype).split(".")[-1].capitalize())


class HostTensors:
    """Knows which tensors of a capture are on the host, by their storage.

    Attributes:
        function: The torch function that the model is calling, None between two calls.
    """

    def __init__(self) -> None:
        self.function: Optional[Callable[..., Any]] = None
        self._storages: Set[int] = set()
        self._attributes: Dict[int, str] = {}

    def declare_attributes(self, attributes: Mapping[str, torch.Tensor]) -> None:
        """Accept plain tensors held by modules as constants of the graph."""
        self._attributes = {id(tensor): name for name, tensor in attributes.items()}

    def found(self, tensor: torch.Tensor, storage: int) -> None:
        """Note a tensor that was created before or outside the capture."""
        name = self._attributes.get(id(tensor))
        if name is None:
            self._storages.add(storage)
            return
        logger.warning(
            "The tensor %s is neither a parameter nor a buffer: it is a constant of the compiled model, and its "
            "later changes are not seen. Call register_buffer() to have it moved to the IPU.",
            name,
        )

    def lifted(self, spec: TensorSpec) -> None:
        """Note a tensor that torch created from Python data: on the device, unless a legacy constructor did it."""
        # Legacy constructors and from_numpy are not torch functions, and torch creates scalars in several places.
        by_legacy_constructor = self.function is None and spec.shape != ()
        if not by_legacy_constructor and self.function not in _WRAP_HOST_DATA:
            self.moved(spec)

    def moved(self, spec: TensorSpec) -> None:
        """Note that a tensor was moved to the device."""
        self._storages.discard(spec.storage)

    def made(self, specs: Sequence[TensorSpec]) -> None:
        """Note the results of an operation that ran on the host."""
        self._storages.update(spec.storage for spec in specs)

    def holds(self, spec: TensorSpec) -> bool:
        """Whether a tensor is on the host."""
        return spec.storage in self._storages

    def runs_here(self, op: str, arguments: Sequence[TensorSpec], source: str) -> bool:
        """Whether an operation runs on the host.

        Args:
            op: Name of the operation.
            arguments: Its tensors.
            source: The calling line, for the message.

        Raises:
            Error: If it mixes tensors of the host and of the device.
        """
        ours = [spec for spec in arguments if self.holds(spec)]
        if not ours or op in _MADE_ON_DEVICE:
            return False
        if len(ours) == len(arguments):
            return True
        if op in _MIX_DEVICES:
            return self.holds(arguments[0])
        raise createNativeError(_explain(op, ours[0], source))


def _explain(op: str, spec: TensorSpec, source: str) -> str:
    return (
        f"Expected an IPU tensor but got tensor(device=cpu, shape={list(spec.shape)}, "
        f"dtype={scalar_type_name(spec.dtype)}).\nConstant tensors should be moved explicitly to the IPU, via "
        f'cpu_tensor.to("ipu"). In {op} at {source or "an unknown line"}: only inputs, parameters, buffers and '
        "tensors created inside forward by functions such as torch.tensor() and torch.zeros() are on the IPU. Keep "
        "constants of the model with register_buffer() instead of a closure or a global, and write torch.tensor() "
        "instead of torch.LongTensor(), torch.Tensor() or torch.from_numpy()."
    )


def attribute_tensors(modules: Mapping[str, torch.nn.Module]) -> Dict[str, torch.Tensor]:
    """Return the tensors that modules hold outside their parameters and buffers, by name.

    Args:
        modules: The modules by name.
    """
    found: Dict[str, torch.Tensor] = {}
    for path, module in modules.items():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                found.update(_tensors_below(f"{path}.{key}" if path else key, value, 0))
    return found


def _tensors_below(name: str, value: Any, depth: int) -> Iterator[Tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _MAX_ATTRIBUTE_DEPTH:
        for part, item in _parts_of(value):
            yield from _tensors_below(f"{name}{part}", item, depth + 1)


def _parts_of(value: Any) -> Iterator[Tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        yield from ((f".{key}", item) for key, item in vars(value).items())
