"""Options that refuse the settings which poprun determines."""

from __future__ import annotations

from typing import Any, NoReturn

from ipurun.emulator import options

__all__ = ["Options"]


def _refuse(method: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{method}` with popdist.poptorch.Options: the launcher decides")


class _DistributedOptions(options._DistributedOptions):
    def disable(self) -> NoReturn:
        """Raise an error: poprun determines this setting.

        Raises:
            RuntimeError: Always.
        """
        _refuse("Distributed.disable")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: poprun determines this setting.

        Raises:
            RuntimeError: Always.
        """
        _refuse("Distributed.setEnvVarNames")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: poprun determines this setting.

        Raises:
            RuntimeError: Always.
        """
        _refuse("Distributed.configureProcessId")


class Options(options.Options):
    """PopTorch's options for a single process with one replica.

    Args:
        ipus_per_replica: Number of IPUs that the model uses; ignored, as there is no reservation to check.
    """

    def __init__(self, ipus_per_replica: int = 1) -> None:
        super().__init__()
        self.Distributed.disable()
        # Change only the class: the group was created by the base class.
        self.Distributed.__class__ = _DistributedOptions

    def useIpuId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: poprun determines this setting.

        Raises:
            RuntimeError: Always.
        """
        _refuse("useIpuId")

    def replicationFactor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: poprun determines this setting.

        Raises:
            RuntimeError: Always.
        """
        _refuse("replicationFactor")
