"""Registering how tensors are found in classes that PopTorch does not know."""

from __future__ import annotations

import copy
from typing import Any, Iterator, Optional, Tuple, Type

import torch

from ipurun.emulator._capture import structures
from ipurun.emulator._capture.structures import ICustomArgParser

__all__ = ["ICustomArgParser", "registerCustomArgParser", "registerGeometricCustomArgParsers"]


def registerCustomArgParser(arg_data_type: Type[Any], arg_parser: Optional[ICustomArgParser]) -> None:
    """Say how the tensors of a class are found and replaced; None forgets the class.

    Args:
        arg_data_type: The class of the arguments or results.
        arg_parser: Takes its instances apart and puts them together.

    Raises:
        Error: The parser does not derive from ``ICustomArgParser``.
    """
    structures.registerCustomArgParser(arg_data_type, arg_parser)


class _GeometricParser(ICustomArgParser):
    """Graphs of torch_geometric: the tensors of all their stores, in a fixed order."""

    @staticmethod
    def _entries(struct: Any) -> Iterator[Tuple[Any, str]]:
        for store in struct.stores:
            for key in sorted(store.keys()):
                if isinstance(store[key], torch.Tensor):
                    yield store, key

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:  # type: ignore[override]  # declared as PopTorch does
        for store, key in self._entries(struct):
            yield store[key]

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        copied = copy.copy(original_structure)
        for store, key in self._entries(copied):
            store[key] = next(tensor_iterator)
        return copied


def registerGeometricCustomArgParsers() -> None:
    """Register the graph classes of torch_geometric.

    Raises:
        ImportError: torch_geometric is not installed.
    """
    from torch_geometric.data import Data, HeteroData

    for graph_type in (Data, HeteroData):
        registerCustomArgParser(graph_type, _GeometricParser())
