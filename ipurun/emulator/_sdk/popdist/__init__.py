"""Replacement for Graphcore's popdist, used if that is not installed: answers from the variables that poprun sets.

`ipurun exec --instances` sets the same ones. Without them, there is a single process.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Iterable, Optional, TypeVar

from ipurun.emulator.processes import connected, launched, only_among

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


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(f"POPDIST_{name}") or default)


def isPopdistEnvSet() -> bool:
    """Whether poprun, or `ipurun exec --instances`, started this process."""
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def init() -> None:
    """Connect the processes; a single one needs no setup."""
    if getNumInstances() > 1:
        connected(getNumInstances())


def getInstanceIndex() -> int:
    """Return the index of this process, from 0."""
    found = launched() if isPopdistEnvSet() else None
    return 0 if found is None else found[0]


def getLocalInstanceIndex() -> int:
    """Return the index of this process among those of this machine, from 0."""
    return _variable("LOCAL_INSTANCE_INDEX", 0)


def getNumInstances() -> int:
    """Return the number of processes."""
    found = launched() if isPopdistEnvSet() else None
    return 1 if found is None else found[1]


def getNumLocalReplicas() -> int:
    """Return the number of replicas in this process."""
    return _variable("NUM_LOCAL_REPLICAS", 1)


def getNumTotalReplicas() -> int:
    """Return the number of replicas in all processes."""
    return _variable("NUM_TOTAL_REPLICAS", 1)


def getReplicaIndexOffset() -> int:
    """Return the index of this process's first replica among all processes."""
    return _variable("REPLICA_INDEX_OFFSET", 0)


def getNumIpusPerReplica() -> int:
    """Return the number of IPUs that the launcher reserves for each replica."""
    return _variable("NUM_IPUS_PER_REPLICA", 1)


def checkNumIpusPerReplica(ipusPerReplica: int) -> bool:
    """Whether the launcher reserves this number of IPUs for each replica."""
    return ipusPerReplica == getNumIpusPerReplica()


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the id of the device that this process attaches to."""
    return 0


def execute_on_instances(
    instances: Iterable[int], func: Callable[..., _Result], *args: Any, **kwargs: Any
) -> Optional[_Result]:
    """Call a function in some of the processes; collectives inside stay among them.

    Args:
        instances: The indices of these processes.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Its result; None if this process is not one of them.
    """
    chosen = sorted(set(instances))
    if getInstanceIndex() not in chosen:
        return None
    with only_among(chosen):
        return func(*args, **kwargs)
