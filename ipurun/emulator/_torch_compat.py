"""What programs written for PopTorch 3.4, and so for torch 2.0, find missing or changed in newer torch."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch.utils.data import Sampler

__all__ = ["load_whole_objects", "restore_removed"]

_WHOLE_OBJECTS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def restore_removed() -> None:
    """Put back what newer torch has taken away; calling it again, or on torch 2.0, changes nothing."""
    if Sampler.__init__ is object.__init__:
        Sampler.__init__ = _take_data_source  # type: ignore[assignment]


def load_whole_objects() -> None:
    """Let `torch.load(file)` read whole objects, as models saved by PopTorch are, here and in child processes.

    Since 2.6 torch reads nothing but tensors unless `weights_only=False` is passed. Calls that pass the
    argument keep what they ask for, and so does a user who has set torch's variable.
    """
    if _WHOLE_OBJECTS in os.environ:
        return
    os.environ[_WHOLE_OBJECTS] = "1"
    # Torch tells of the variable at every load, but it was not the program that set it.
    warnings.filterwarnings("ignore", message=f"Environment variable {_WHOLE_OBJECTS} detected")


def _take_data_source(self: Any, data_source: Any = None) -> None:
    """Does nothing, as in torch 2.0: samplers pass their data source on, and keep it themselves."""
