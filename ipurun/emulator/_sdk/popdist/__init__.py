"""Replacement for Graphcore's popdist, used if that is not installed: a single process, not started by poprun."""

from __future__ import annotations

__all__ = [
    "getDeviceId",
    "getInstanceIndex",
    "getNumInstances",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isPopdistEnvSet",
]


def isPopdistEnvSet() -> bool:
    """Return False: poprun is not part of the emulator."""
    return False


def init() -> None:
    """Do nothing: a single process needs no setup."""


def getInstanceIndex() -> int:
    """Return the index of this process, from 0."""
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


def getDeviceId() -> int:
    """Return the id of the device that this process attaches to."""
    return 0
