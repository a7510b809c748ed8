"""Options of a process that poprun would set up: what the launcher decides cannot be set."""

from __future__ import annotations

from typing import Any, NoReturn

from ipurun.emulator import options

__all__ = ["Options"]


def _refuse(method: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{method}` with popdist.poptorch.Options: the launcher decides")


class _DistributedOptions(options._DistributedOptions):
    def disable(self) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        _refuse("Distributed.disable")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        _refuse("Distributed.setEnvVarNames")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        _refuse("Distributed.configureProcessId")


class Options(options.Options):
    """PopTorch's options for the only process: one replica, no other processes.

    Args:
        ipus_per_replica: IPUs that the model uses; poprun would compare it with what it reserved.
    """

    def __init__(self, ipus_per_replica: int = 1) -> None:
        super().__init__()
        self.Distributed.disable()
        # The group is the parent's own, made by it: only what may be called on it changes.
        self.Distributed.__class__ = _DistributedOptions

    def useIpuId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        _refuse("useIpuId")

    def replicationFactor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        _refuse("replicationFactor")
