"""MultiConv: convolutions that a device plans and runs together."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipurun.emulator import enums
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder

_PARTIALS_CODES = {torch.float32: 0, torch.float16: 1}


class _ConvolutionCounter(TorchDispatchMode):
    """Counts the convolutions called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.overloadpacket.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


class MultiConv:
    """Context manager that combines the convolutions called inside it.

    The results are those of the separate convolutions; the settings matter on a device only.
    """

    _open_scope: Optional[MultiConv] = None

    def __init__(self) -> None:
        self._available_memory_proportions: Optional[Sequence[float]] = None
        self._partials_types: Optional[Sequence[int]] = None
        self._plan_type: Optional[enums.MultiConvPlanType] = None
        self._per_conv_reserved_tiles: Optional[int] = None
        self._cycle_back_off: Optional[float] = None
        self._enable_conv_ditherings: Optional[Sequence[bool]] = None
        self._counter: Optional[_ConvolutionCounter] = None

    def availableMemoryProportions(self, value: Union[float, List[float]]) -> MultiConv:
        """Set the share of temporary memory, one for all convolutions or one for each."""
        if value is not None:
            values = value if isinstance(value, (list, tuple)) else (value,)
            valid = len(values) > 0 and all(isinstance(item, float) for item in values)
            assert valid, f"Invalid available memory proportion! Got {value!r}"
            self._available_memory_proportions = tuple(values)
        else:
            self._available_memory_proportions = None
        return self

    def partialsTypes(self, value: Union[torch.dtype, List[torch.dtype]]) -> MultiConv:
        """Set the type of partial results (float32 or float16), one for all or one for each."""
        values = value if isinstance(value, (list, tuple)) else (value,)
        if not all(item in _PARTIALS_CODES for item in values):
            raise ValueError(f"Invalid partials types. Expecting torch.float or torch.half, got {value!r}")
        self._partials_types = tuple(_PARTIALS_CODES[item] for item in values)
        return self

    def enableConvDithering(self, value: Union[bool, List[bool]]) -> MultiConv:
        """Set whether start tiles are spread, one for all or one for each."""
        if value is None:
            self._enable_conv_ditherings = None
            return self
        values = value if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(item, bool) for item in values):
            raise ValueError(f"value must be bool or list of bools, got {value!r}")
        self._enable_conv_ditherings = tuple(values)
        return self

    def planType(self, value: enums.MultiConvPlanType) -> MultiConv:
        """Set whether the convolutions run beside or after each other."""
        assert value is None or isinstance(value, enums.MultiConvPlanType), f"Invalid plan type! Got {value!r}"
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the number of tiles kept for each convolution."""
        assert isinstance(value, int), f"perConvReservedTiles must be an int, got {value!r}"
        self._per_conv_reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set the share of cycles by which a parallel plan may be slower."""
        assert isinstance(value, float), f"cycleBackOff must be a float, got {value!r}"
        self._cycle_back_off = value
        return self

    def _settings(self) -> Dict[str, Any]:
        return {
            "available_memory_proportions": self._available_memory_proportions,
            "partials_types": self._partials_types,
            "plan_type": None if self._plan_type is None else self._plan_type.value,
            "per_conv_reserved_tiles": self._per_conv_reserved_tiles,
            "cycle_back_off": self._cycle_back_off,
            "enable_conv_dithering": self._enable_conv_ditherings,
        }

    def __enter__(self) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if MultiConv._open_scope is not None:
            raise createPoptorchError("Nested poptorch.MultiConv is not supported.")
        MultiConv._open_scope = self
        recorder.record_event("begin_multi_conv")
        self._counter = _ConvolutionCounter()
        self._counter.__enter__()

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        MultiConv._open_scope = None
        counter.__exit__(type, value, traceback)
        recorder = active_recorder()
        if value is not None or recorder is None:
            return
        if counter.count == 0:
            raise createPoptorchError("Unexpected end_multi_conv: no convolution inside poptorch.MultiConv.")
        recorder.record_event("end_multi_conv", convolutions=counter.count, **self._settings())
