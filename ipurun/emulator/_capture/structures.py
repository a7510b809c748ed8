"""Find and replace the tensors in nested arguments and results."""

from __future__ import annotations

import abc
import copy
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type

import torch

from ipurun.emulator._impl import createPoptorchError


class ICustomArgParser(abc.ABC):
    """Finds and replaces the tensors of a class that PopTorch does not know."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> None:
        """Yield every tensor of the structure."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return a copy of the structure with its tensors taken from the iterator, in the same order."""


_custom_parsers: Dict[Type[Any], ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: Type[Any], arg_parser: Optional[ICustomArgParser]) -> None:
    """Register how to handle a class among a model's arguments and results.

    Args:
        arg_data_type: The class of the arguments or results.
        arg_parser: The parser for its instances; None unregisters the class.

    Raises:
        Error: If the parser is not an `ICustomArgParser`.
    """
    if arg_parser is None:
        _custom_parsers.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, ICustomArgParser):
        raise createPoptorchError(
            f"Custom parser for {arg_data_type} must derive from poptorch.ICustomArgParser, got {type(arg_parser)}."
        )
    _custom_parsers[arg_data_type] = arg_parser


def custom_parser_of(item: Any) -> Optional[ICustomArgParser]:
    """Return the parser registered for the item's class or a base of it, or None."""
    exact = _custom_parsers.get(type(item))
    if exact is not None:
        return exact
    return next((parser for kind, parser in _custom_parsers.items() if isinstance(item, kind)), None)


def tensors_in(structure: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure in order."""
    parser = custom_parser_of(structure)
    if isinstance(structure, torch.Tensor):
        yield structure
    elif parser is not None:
        yield from parser.yieldTensors(structure)  # type: ignore[misc]  # declared as PopTorch does
    elif isinstance(structure, (tuple, list)):
        for item in structure:
            yield from tensors_in(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from tensors_in(item)


def rebuild(structure: Any, tensors: Iterator[Any]) -> Any:
    """Return a structure of the same types with each tensor replaced by the next of the iterator."""
    parser = custom_parser_of(structure)
    if isinstance(structure, torch.Tensor):
        return next(tensors)
    if parser is not None:
        return parser.reconstruct(structure, tensors)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*[rebuild(item, tensors) for item in structure])
    if isinstance(structure, (tuple, list)):
        items: List[Any] = [rebuild(item, tensors) for item in structure]
        return _like(structure, items)
    if isinstance(structure, dict):
        return _like_dict(structure, {key: rebuild(item, tensors) for key, item in structure.items()})
    return structure


def _like(original: Any, items: List[Any]) -> Any:
    return type(original)(items)


def _like_dict(original: Dict[Any, Any], entries: Dict[Any, Any]) -> Any:
    if type(original) is dict:
        return entries
    try:
        return type(original)(entries)
    except TypeError:  # a class with another constructor, such as defaultdict
        copied = original.copy()
        copied.update(entries)
        return copied


class _GeometricParser(ICustomArgParser):
    """Handles torch_geometric graphs: the tensors of all their stores, in a fixed order."""

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
