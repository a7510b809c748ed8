"""Automatic casting as in PopTorch up to 3.0. PopTorch 3.4 does not have it, so each name warns once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Callable, ContextManager, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode

from ipurun.emulator._logging import logger

__all__ = ["Policy", "autocast", "autocast_module", "warn_removed"]

_warned: Set[str] = set()

_FP16_NAMES = frozenset(
    [
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "matmul",
        "mm",
        "mv",
    ]
)
_PROMOTE_NAMES = frozenset(
    ["addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "equal", "index_put", "stack", "tensordot"]
)
# The functions that the layers of a policy call.
_MODULE_FUNCTIONS: Dict[str, str] = {
    "Conv1d": "conv1d",
    "Conv2d": "conv2d",
    "Conv3d": "conv3d",
    "ConvTranspose1d": "conv_transpose1d",
    "ConvTranspose2d": "conv_transpose2d",
    "ConvTranspose3d": "conv_transpose3d",
    "Linear": "linear",
    "Bilinear": "bilinear",
}


def warn_removed(name: str) -> None:
    """Warn once per name that PopTorch 3.4 does not have it."""
    if name not in _warned:
        _warned.add(name)
        logger.warning("%s was removed after PopTorch 3.0: it works here, but not with PopTorch 3.4", name)


def _function_name(entry: Any) -> str:
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)
    return _MODULE_FUNCTIONS.get(name, name.rstrip("_"))


class Policy:
    """The operations that run in half, in float, or in the type of their widest or narrowest input.

    Args:
        fp16: Torch functions or module classes whose float inputs are cast to float16.
        fp32: The same for half inputs cast to float32.
        promote: The same for mixed inputs cast to float32.
        demote: The same for mixed inputs cast to float16.
    """

    def __init__(
        self,
        fp16: Optional[Iterable[Any]] = None,
        fp32: Optional[Iterable[Any]] = None,
        promote: Optional[Iterable[Any]] = None,
        demote: Optional[Iterable[Any]] = None,
    ) -> None:
        self.fp16 = self._names(_FP16_NAMES if fp16 is None else fp16)
        self.fp32 = self._names(() if fp32 is None else fp32)
        self.promote = self._names(_PROMOTE_NAMES if promote is None else promote)
        self.demote = self._names(() if demote is None else demote)

    @staticmethod
    def _names(entries: Iterable[Any]) -> FrozenSet[str]:
        return frozenset(_function_name(entry) for entry in entries)

    def target(self, function: Callable[..., Any], dtypes: Set[torch.dtype]) -> Optional[torch.dtype]:
        """Return the type to cast the floating-point inputs of a call to, None to leave them unchanged."""
        name = getattr(function, "__name__", "").rstrip("_")
        if name == "linear" and "matmul" in self.fp16:
            return torch.float16
        if name in self.fp16:
            return torch.float16
        if name in self.fp32:
            return torch.float32
        if len(dtypes) > 1:
            if name in self.promote:
                return torch.float32
            if name in self.demote:
                return torch.float16
        return None


class _CastInputs(TorchFunctionMode):
    """Casts the inputs of functions called inside it according to a policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy

    def __enter__(self) -> _CastInputs:
        _regions.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _regions.remove(self)

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        # Modes nest, so a call passes through every enclosing region; only the innermost one applies.
        if _regions[-1] is not self:
            return func(*args, **kwargs)
        dtypes: Set[torch.dtype] = set()
        _map_floats(lambda tensor: dtypes.add(tensor.dtype), (args, kwargs))
        target = self._policy.target(func, dtypes) if dtypes else None
        if target is not None:
            args, kwargs = _map_floats(lambda tensor: tensor.to(target), (args, kwargs))
        return func(*args, **kwargs)


_regions: List[_CastInputs] = []


def _map_floats(function: Callable[[torch.Tensor], Any], structure: Any) -> Any:
    if isinstance(structure, torch.Tensor):
        return function(structure) if structure.dtype in (torch.float16, torch.float32) else structure
    if isinstance(structure, (list, tuple)) and not hasattr(structure, "_fields"):
        return type(structure)(_map_floats(function, element) for element in structure)
    if isinstance(structure, dict):
        return {key: _map_floats(function, element) for key, element in structure.items()}
    return structure


def _region(enabled: bool) -> ContextManager[Any]:
    """Return the region to enter; it has no effect unless a model is captured whose options allow casting."""
    from ipurun.emulator._capture.recorder import current

    recorder = current()
    if recorder is None or not recorder.options.Precision._autocast_enabled:
        return contextlib.nullcontext()
    if not enabled:
        return _CastInputs(Policy((), (), (), ()))
    return _CastInputs(recorder.options.Precision._autocast_policy or Policy())


class autocast:  # noqa: N801  # PopTorch's name
    """Cast the operations in a region of a model; a context manager and decorator.

    Has an effect only while a model is captured for a device, as in PopTorch.

    Args:
        enabled: False switches casting off inside a region that has it on.
    """

    def __init__(self, enabled: bool = True) -> None:
        warn_removed("poptorch.autocast")
        self._enabled = enabled
        self._entered: List[ContextManager[Any]] = []

    def __enter__(self) -> autocast:
        region = _region(self._enabled)
        region.__enter__()
        self._entered.append(region)
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self._entered.pop().__exit__(type, value, traceback)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def cast(*args: Any, **kwargs: Any) -> Any:
            with _region(self._enabled):
                return function(*args, **kwargs)

        return cast


class _CastForward:
    """The forward of a module inside a region; an object, so that the module can be copied and pickled."""

    def __init__(self, module: torch.nn.Module, enabled: bool) -> None:
        self._module = module
        self._enabled = enabled
        self.__signature__ = inspect.signature(type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _region(self._enabled):
            return type(self._module).forward(self._module, *args, **kwargs)


def autocast_module(module: torch.nn.Module, enabled: bool = True) -> torch.nn.Module:
    """Cast the operations of a module and its submodules; ``torch.nn.Module.autocast`` in PopTorch 3.0.

    Args:
        module: Changed in place.
        enabled: False switches casting off for the module.

    Returns:
        The module.
    """
    warn_removed("torch.nn.Module.autocast")
    module.forward = _CastForward(module, enabled)  # type: ignore[method-assign]  # as PopTorch did
    return module
