"""Options that refuse the settings which poprun determines."""

from __future__ import annotations

from typing import Any, NoReturn

from ipurun.emulator import options
from ipurun.emulator._sdk import popdist

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
    """PopTorch's options with the processes and replicas that the launcher gives; one of each without it.

    Args:
        ipus_per_replica: Number of IPUs that the model uses, which must be that of the launcher; 0: not checked.

    Raises:
        RuntimeError: The launcher reserves another number of IPUs for a replica.
    """

    def __init__(self, ipus_per_replica: int = 0) -> None:
        super().__init__()
        if ipus_per_replica and popdist.isPopdistEnvSet() and not popdist.checkNumIpusPerReplica(ipus_per_replica):
            raise RuntimeError(
                f"The number of IPUs per replica passed to popdist.poptorch.Options ({ipus_per_replica}) differs from "
                f"that of the launcher ({popdist.getNumIpusPerReplica()}): start it with --ipus-per-replica "
                f"{ipus_per_replica}"
            )
        super().replicationFactor(popdist.getNumLocalReplicas())
        self.Distributed.configureProcessId(popdist.getInstanceIndex(), popdist.getNumInstances())
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
