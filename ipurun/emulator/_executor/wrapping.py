"""Change the class of the user's model so that reading its weights first copies them from the device."""

from __future__ import annotations

import copy
import copyreg
from typing import Any, Dict, Optional, Type

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ipurun.emulator._impl import createPoptorchError

_EXECUTOR = "_poptorch_executor"
_SYNCING_READS = frozenset(
    ["_buffers", "_parameters", "buffers", "named_buffers", "named_parameters", "parameters", "state_dict"]
)
_wrapper_classes: Dict[Type[Any], Type[Any]] = {}


def executor_of(item: Any) -> Optional[Any]:
    """Return the training executor that a wrapped model, parameter or buffer belongs to."""
    try:
        return object.__getattribute__(item, "__dict__").get(_EXECUTOR)
    except AttributeError:
        return None


def _synchronise(item: Any) -> None:
    executor = executor_of(item)
    if executor is not None:
        executor.copyWeightsToHostIfNeeded()


def _synchronise_all(arguments: Any) -> None:
    if isinstance(arguments, (PoptorchParameter, PoptorchBuffer)):
        _synchronise(arguments)
    elif isinstance(arguments, (list, tuple)):
        for item in arguments:
            _synchronise_all(item)


class _SynchronisedTensor:
    """Base class of parameters and buffers of a wrapped model."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__class__", "__dict__"):
            _synchronise(self)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _synchronise_all(args)
        _synchronise_all(list(kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class PoptorchParameter(_SynchronisedTensor, torch.nn.Parameter):
    """A parameter of a model wrapped for training."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class PoptorchBuffer(_SynchronisedTensor, torch.Tensor):
    """A buffer of a model wrapped for training."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Dict[int, Any]) -> torch.Tensor:
        copied = self.detach().as_subclass(torch.Tensor).clone()
        memo[id(self)] = copied
        return copied


def is_wrapped(model: Any) -> bool:
    """Whether the model is wrapped by `trainingModel` and was not destroyed."""
    return getattr(type(model), "_poptorch_base", None) is not None


def wrap(model: torch.nn.Module, executor: Any) -> None:
    """Change the classes of a model, its parameters and its buffers in place.

    Raises:
        RuntimeError: If the model is wrapped already.
        Error: If a buffer is an instance of a subclass of torch.Tensor.
    """
    if is_wrapped(model):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model to unwrap "
            "before wrapping again."
        )
    for name, buffer in model.named_buffers():
        if type(buffer) not in (torch.Tensor, PoptorchBuffer):
            raise createPoptorchError(
                f"Buffer {name} is of type {type(buffer)}: only plain torch.Tensor buffers are supported."
            )
    wrap_tensors(model, executor)
    model.__dict__[_EXECUTOR] = executor
    model.__class__ = _wrapper_class(type(model))


def wrap_tensors(model: torch.nn.Module, executor: Any) -> None:
    """Change the classes of a model's parameters and buffers."""
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.__class__ = PoptorchParameter
            parameter.__dict__[_EXECUTOR] = executor
    for buffer in model.buffers():
        if type(buffer) is torch.Tensor:
            buffer.__class__ = PoptorchBuffer
            buffer.__dict__[_EXECUTOR] = executor


def restore_class(tensor: torch.Tensor, kind: Type[Any], executor: Optional[Any]) -> None:
    """Restore the class and the executor that a tensor had before `unwrap_tensors`."""
    if type(tensor) is not kind:
        tensor.__class__ = kind
        if executor is not None:
            tensor.__dict__[_EXECUTOR] = executor


def unwrap_tensors(model: torch.nn.Module) -> None:
    """Restore the plain classes of a model's parameters and buffers."""
    for parameter in torch.nn.Module.parameters(model):
        if isinstance(parameter, PoptorchParameter):
            parameter.__dict__.pop(_EXECUTOR, None)
            parameter.__class__ = torch.nn.Parameter
    for buffer in torch.nn.Module.buffers(model):
        if isinstance(buffer, PoptorchBuffer):
            buffer.__dict__.pop(_EXECUTOR, None)
            buffer.__class__ = torch.Tensor


# The class and the executor of tensors that `unwrap_tensors_for_now` made plain.
_unwrapped_for_now = WeakTensorKeyDictionary()


def unwrap_tensors_for_now(model: torch.nn.Module) -> None:
    """Restore the plain classes of a model's parameters and buffers until `rewrap_tensors`."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, (PoptorchParameter, PoptorchBuffer)):
            _unwrapped_for_now[tensor] = (type(tensor), executor_of(tensor))
    unwrap_tensors(model)


def rewrap_tensors(model: torch.nn.Module) -> None:
    """Undo `unwrap_tensors_for_now` for the parameters and buffers that the model still has."""
    for tensor in (*model.parameters(), *model.buffers()):
        kind, executor = _unwrapped_for_now.pop(tensor, (type(tensor), None))
        restore_class(tensor, kind, executor)


def unwrap(model: torch.nn.Module) -> None:
    """Restore the plain classes of a model, its parameters and its buffers.

    Raises:
        Error: If the model is not wrapped.
    """
    if not is_wrapped(model):
        raise createPoptorchError("model has never been wrapped in 'poptorch.trainingModel', or was destroyed.")
    model.__dict__.pop(_EXECUTOR, None)
    model.__class__ = type(model)._poptorch_base  # type: ignore[attr-defined]  # set by _wrapper_class
    unwrap_tensors(model)


def _wrapper_class(base: Type[Any]) -> Type[Any]:
    if base not in _wrapper_classes:
        name = f"Poptorch{base.__name__}"
        members = {**_WRAPPER_MEMBERS, "_poptorch_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
        _wrapper_classes[base] = type(name, (base,), members)
    return _wrapper_classes[base]


def _getattribute(self: Any, name: str) -> Any:
    if name == "_host_weights_version":
        executor = executor_of(self)
        return 0 if executor is None else executor._host_weights_version
    if name in _SYNCING_READS:
        _synchronise(self)
    return type(self)._poptorch_base.__getattribute__(self, name)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    _synchronise(self)
    return type(self)._poptorch_base.__call__(self, *args, **kwargs)


def _state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
    _synchronise(self)
    state = type(self)._poptorch_base.state_dict(self, *args, **kwargs)
    plain: Dict[int, torch.Tensor] = {}
    for key, item in list(state.items()):
        if isinstance(item, (PoptorchParameter, PoptorchBuffer)):
            if id(item) not in plain:
                plain[id(item)] = item.data.as_subclass(torch.Tensor)
            state[key] = plain[id(item)]
    return state


def _destroy(self: Any) -> None:
    executor = executor_of(self)
    if executor is not None:
        executor.destroy()


def _copy_weights_to_host_if_needed(self: Any) -> bool:
    executor = executor_of(self)
    return executor is not None and executor.copyWeightsToHostIfNeeded()


def _plain_shallow_copy(self: Any) -> Any:
    _synchronise(self)
    base = type(self)._poptorch_base
    plain = base.__new__(base)
    plain.__dict__.update({key: item for key, item in self.__dict__.items() if key != _EXECUTOR})
    return plain


def _reduce_ex(self: Any, protocol: Any) -> Any:
    reduced = _plain_shallow_copy(self).__reduce_ex__(max(2, protocol))
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle checks its class argument
        return (new_instance, *reduced[1:])
    return reduced


def new_instance(kind: Type[Any], *args: Any) -> Any:
    """Create an instance without calling its constructor, for pickle."""
    return kind.__new__(kind, *args)


def _copy(self: Any) -> Any:
    """Copy the model; a shallow copy shares the tensors, so it keeps the executor."""
    copied = copy.copy(_plain_shallow_copy(self))
    copied.__class__ = type(self)
    executor = executor_of(self)
    if executor is not None:
        copied.__dict__[_EXECUTOR] = executor
    return copied


def _deepcopy(self: Any, memo: Dict[int, Any]) -> Any:
    copied = copy.deepcopy(_plain_shallow_copy(self), memo)
    memo[id(self)] = copied
    copied.__class__ = type(self)
    return copied


_WRAPPER_MEMBERS = {
    "__getattribute__": _getattribute,
    "__call__": _call,
    "state_dict": _state_dict,
    "destroy": _destroy,
    "copyWeightsToHostIfNeeded": _copy_weights_to_host_if_needed,
    "__reduce_ex__": _reduce_ex,
    "__copy__": _copy,
    "__deepcopy__": _deepcopy,
}
