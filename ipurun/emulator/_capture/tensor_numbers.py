"""Numbers for the tensors that a capture meets, without keeping the tensors alive.

A tensor is known by its Python object, which torch preserves for as long as anything refers to the tensor.
When it is gone its entry is dropped, so that an object that takes its place in memory is not taken for it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Dict, List, Optional

import torch

from ipurun.emulator._capture.graph import Value

__all__ = ["TensorNumbers"]


class TensorNumbers:
    """Gives every tensor, and every storage that tensors share, a number of its own."""

    def __init__(self) -> None:
        self._value_of: Dict[int, Value] = {}
        self._references: List[Any] = []
        self._storage_of: Dict[int, int] = {}
        self._storage_users: Dict[int, int] = {}
        self._num_storages = 0

    def find(self, tensor: torch.Tensor) -> Optional[Value]:
        """Returns the number of a tensor, None if it has none."""
        return self._value_of.get(id(tensor))

    def add(self, tensor: torch.Tensor) -> Value:
        """Gives a tensor the next number."""
        value = Value(len(self._references))
        address = tensor.untyped_storage()._cdata
        if address not in self._storage_of:
            self._storage_of[address] = self._num_storages
            self._num_storages += 1
        self._storage_users[address] = self._storage_users.get(address, 0) + 1
        self._value_of[id(tensor)] = value
        self._references.append(weakref.ref(tensor, functools.partial(self._forget, id(tensor), address)))
        return value

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether a numbered tensor uses the memory of this one."""
        return tensor.untyped_storage()._cdata in self._storage_of

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Returns the number of a numbered tensor's storage."""
        return self._storage_of[tensor.untyped_storage()._cdata]

    def tensor(self, value: Value) -> torch.Tensor:
        """Returns the tensor of a number; it must be alive."""
        found = self._references[value]()
        assert found is not None, f"the tensor number {int(value)} is gone"
        return found

    def clear(self) -> None:
        """Forgets all tensors."""
        self._value_of.clear()
        self._references.clear()
        self._storage_of.clear()
        self._storage_users.clear()

    def _forget(self, key: int, address: int, reference: Any) -> None:
        self._value_of.pop(key, None)
        users = self._storage_users.get(address, 0) - 1
        if users > 0:
            self._storage_users[address] = users
        else:
            self._storage_users.pop(address, None)
            self._storage_of.pop(address, None)
