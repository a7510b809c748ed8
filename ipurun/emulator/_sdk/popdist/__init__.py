"""Replacement for Graphcore's popdist, used if that is not installed: a single process, not started by poprun."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Optional, TypeVar

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isPopdistEnvSet",
]

_Result = TypeVar("_Result")


def isPopdistEnvSet() -> bool:
    """Return False: poprun is not part of the emulator."""
    return False


def init() -> None:
    """Do nothing: a single process needs no setup."""


def getInstanceIndex() -> int:
    """Return the index of this process, from 0."""
    return 0


def getLocalInstanceIndex() -> int:
    """Return the index of this process among those of this machine, from 0."""
    return 0


def getNumInstances() -> int:
    """Return the number of processes."""
    return 1


def getNumLocalReplicas() -> int:
    """Return the number of replicas in this process."""
    return 1


def getNumTotalReplicas() -> int:
    """Return the number of replicas in all processes."""
    return 1


def getReplicaIndexOffset() -> int:
    """Return the index of this process's first replica among all processes."""
    return 0


def getNumIpusPerReplica() -> int:
    """Return the number of IPUs that the launcher reserves for each replica."""
    return 1


def checkNumIpusPerReplica(ipusPerReplica: int) -> bool:
    """Whether the launcher reserves this number of IPUs for each replica."""
    return ipusPerReplica == getNumIpusPerReplica()


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the id of the device that this process attaches to."""
    return 0


def execute_on_instances(
    instances: Iterable[int], func: Callable[..., _Result], *args: Any, **kwargs: Any
) -> Optional[_Result]:
    """Call a function in some of the processes.

    Args:
        instances: The indices of these processes.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Its result; None if this process is not one of them.
    """
    return func(*args, **kwargs) if getInstanceIndex() in set(instances) else None
