"""Bind the arguments of a wrapped model to the signature of forward, and compare each call with the first."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.dtypes import wrapped
from ipurun.emulator._capture.structures import custom_parser_of, rebuild, tensors_in
from ipurun.emulator._executor.weights import device_dtype
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logging import logger

_ADVICE = (
    "\nThis error occurred because the inputs passed at runtime don't match the inputs used to compile the "
    "model.\nTo recompile the model for the new inputs create a new inferenceModel / trainingModel wrapper or "
    "call destroy() on the current one and try again."
)
_warned_types: Set[torch.dtype] = set()


@dataclasses.dataclass
class Arguments:
    """The arguments of one call, with defaults filled in.

    Attributes:
        positional: The positional arguments, including arguments passed by name that have a position.
        named: Arguments that can only be passed by name.
        names: Names of the first positional arguments.
    """

    positional: List[Any]
    named: Dict[str, Any]
    names: Sequence[str] = ()

    def tensors(self) -> List[torch.Tensor]:
        """Return every tensor of the arguments in order."""
        return list(tensors_in((self.positional, self.named)))

    def tensor_names(self) -> List[str]:
        """Return, for every tensor in order, the name of its parameter."""
        parameters = [self.name_of(index) for index in range(len(self.positional))]
        entries = [*zip(parameters, self.positional), *self.named.items()]
        return [name for name, item in entries for _ in tensors_in(item)]

    def name_of(self, index: int) -> str:
        """Return the parameter name of a positional argument."""
        return self.names[index] if index < len(self.names) else f"args[{index}]"

    def with_tensors(self, tensors: List[torch.Tensor]) -> Arguments:
        """Return the arguments with their tensors replaced."""
        positional, named = rebuild((self.positional, self.named), iter(tensors))
        return Arguments(positional, named, self.names)


class ArgumentParser:
    """Binds calls to the signature of a model.

    Args:
        model: A module, whose forward is read, or any other callable.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        function = model.forward if isinstance(model, torch.nn.Module) else model
        self._names: List[str] = []
        self._defaults: Dict[str, Any] = {}
        self._keyword_only: Dict[str, Any] = {}
        self._takes_any_positional = self._takes_any_named = False
        self._warned_non_contiguous = False
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # builtins have no signature
            self._takes_any_positional = self._takes_any_named = True
            return
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._takes_any_positional = True
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._takes_any_named = True
            elif parameter.kind is parameter.KEYWORD_ONLY:
                self._keyword_only[parameter.name] = parameter.default
            else:
                self._names.append(parameter.name)
                if parameter.default is not parameter.empty:
                    self._defaults[parameter.name] = parameter.default

    def bind(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Arguments:
        """Return the arguments in the order of the signature.

        Raises:
            AssertionError: If there are too many arguments, an unknown keyword, or a parameter given twice.
            Error: If a required parameter is missing.
        """
        named = dict(kwargs)
        positional = list(args)
        assert self._takes_any_positional or len(args) <= len(self._names), (
            f"Too many arguments provided: expected {self._names} ({len(self._names)}) but got {len(args)}"
        )
        for name in self._names[: len(args)]:
            assert name not in named, f"Parameter {name} was passed more than once"
        for name in self._names[len(args) :]:
            if name in named:
                positional.append(named.pop(name))
            elif name in self._defaults:
                positional.append(self._defaults[name])
            else:
                raise createPoptorchError(f"Mandatory parameter {name} missing")
        for name, default in self._keyword_only.items():
            if name not in named:
                if default is inspect.Parameter.empty:
                    raise createPoptorchError(f"Mandatory parameter {name} missing")
                named[name] = default
        if not self._takes_any_named:
            unknown = [name for name in named if name not in self._keyword_only]
            assert not unknown, (
                f"Unexpected keyword arguments {unknown}: expected {self._names + list(self._keyword_only)}"
            )
        return Arguments(positional, named, self._names)

    def on_device(self, arguments: Arguments) -> Arguments:
        """Return the arguments with detached, contiguous tensors of device types."""
        return arguments.with_tensors([self.device_tensor(t) for t in arguments.tensors()])

    def device_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a detached, contiguous tensor of a device type."""
        if tensor.requires_grad:
            logger.warning(
                "Input tensor has requires_grad=True set. This tensor will be detached because backward pass via "
                "inputs is not supported."
            )
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            if not self._warned_non_contiguous:
                logger.warning(
                    "At least one input tensor is not contiguous: it is copied. Make inputs contiguous to "
                    "avoid the copy."
                )
                self._warned_non_contiguous = True
            tensor = tensor.contiguous()
        if tensor.dtype == torch.int64:
            _warn_narrowed(torch.int64, torch.int32)
            return wrapped(tensor)
        narrow = device_dtype(tensor.dtype)
        if narrow != tensor.dtype:
            _warn_narrowed(tensor.dtype, narrow)
        return tensor.to(narrow)


def _warn_narrowed(wide: torch.dtype, narrow: torch.dtype) -> None:
    if wide not in _warned_types:
        _warned_types.add(wide)
        logger.warning("Tensors of type %s are not supported on the device: they are cast to %s.", wide, narrow)


def matching_tensors(compiled: Arguments, given: Arguments) -> List[torch.Tensor]:
    """Return the tensors of a call in the order of the call that was compiled.

    Raises:
        Error: If the arguments differ in number, type, shape or value from the compiled ones.
    """
    if len(compiled.positional) != len(given.positional):
        raise createPoptorchError(
            f"Number of positional arguments mismatch: expected {len(compiled.positional)} arguments but got "
            f"{len(given.positional)}.{_ADVICE}"
        )
    found: List[torch.Tensor] = []
    for index, (expected, item) in enumerate(zip(compiled.positional, given.positional)):
        _compare(compiled.name_of(index), expected, item, found)
    _compare_dict("", compiled.named, given.named, found)
    return found


def _compare(name: str, expected: Any, given: Any, found: List[torch.Tensor]) -> None:
    if type(expected) is not type(given):
        raise createPoptorchError(
            f"Type mismatch for {name}: expected {type(expected)} but got {type(given)}.{_ADVICE}"
        )
    if isinstance(expected, torch.Tensor):
        _compare_tensors(name, expected, given)
        found.append(given)
    elif custom_parser_of(expected) is not None:
        expected_tensors, given_tensors = list(tensors_in(expected)), list(tensors_in(given))
        if len(expected_tensors) != len(given_tensors):
            raise createPoptorchError(
                f"Number of tensors mismatch for {name}: expected {len(expected_tensors)} but got "
                f"{len(given_tensors)}.{_ADVICE}"
            )
        for index, (one, other) in enumerate(zip(expected_tensors, given_tensors)):
            _compare(f"{name}.tensor[{index}]", one, other, found)
    elif isinstance(expected, (tuple, list)):
        if len(expected) != len(given):
            raise createPoptorchError(
                f"Length mismatch for {name}: expected {len(expected)} but got {len(given)}.{_ADVICE}"
            )
        for index, (one, other) in enumerate(zip(expected, given)):
            _compare(f"{name}[{index}]", one, other, found)
    elif isinstance(expected, dict):
        _compare_dict(name, expected, given, found)
    elif expected != given:
        raise createPoptorchError(
            f"Value mismatch for {name}: expected {expected!r} but got {given!r}. Python values are constants "
            f"of the compiled model.{_ADVICE}"
        )


def _compare_dict(name: str, expected: Dict[str, Any], given: Dict[str, Any], found: List[torch.Tensor]) -> None:
    missing = [str(key) for key in expected if key not in given]
    unexpected = [str(key) for key in given if key not in expected]
    if missing or unexpected:
        text = f"Keys mismatch for {name or 'the named arguments'}:"
        if missing:
            text += f" Missing arguments: {', '.join(missing)}."
        if unexpected:
            text += f" Unexpected arguments: {', '.join(unexpected)}."
        raise createPoptorchError(text + _ADVICE)
    for key, item in expected.items():
        _compare(f"{name}[{key}]" if name else str(key), item, given[key], found)


def _compare_tensors(name: str, expected: torch.Tensor, given: torch.Tensor) -> None:
    if expected.dtype != given.dtype:
        raise createPoptorchError(
            f"Tensor dtype mismatch for {name}: expected {expected.dtype} but got {given.dtype}.{_ADVICE}"
        )
    if expected.shape != given.shape:
        raise createPoptorchError(
            f"Tensor shape mismatch for {name}: expected {expected.shape} but got {given.shape}.{_ADVICE}"
        )
