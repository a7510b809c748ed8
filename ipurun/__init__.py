"""ipurun: train PyTorch models on Graphcore IPUs, or on a CPU, from declarative config.

The functions of the Python API are imported when they are first used: `import ipurun` loads neither torch nor Hydra.
"""

from __future__ import annotations

from ipurun import moved

TYPE_CHECKING = False  # not from `typing`, which a file in the working folder could stand in for at this time
if TYPE_CHECKING:
    from ipurun.errors import ConfigError, IpurunError, Problem, RunError
    from ipurun.interface import (
        Evaluated,
        Exported,
        PlanReport,
        Predicted,
        Result,
        evaluate,
        export,
        load,
        plan,
        predict,
        train,
        validate,
    )
    from ipurun.training.callbacks import Callback

__all__ = [
    "Callback",
    "ConfigError",
    "Evaluated",
    "Exported",
    "IpurunError",
    "PlanReport",
    "Predicted",
    "Problem",
    "Result",
    "RunError",
    "evaluate",
    "export",
    "load",
    "plan",
    "predict",
    "train",
    "validate",
]
__version__ = "0.1.0"

moved.install()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module `ipurun` has no attribute `{name}`")
    from ipurun import errors, interface

    found: object = getattr(errors if hasattr(errors, name) else interface, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
