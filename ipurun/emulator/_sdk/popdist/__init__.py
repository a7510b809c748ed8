"""Stand-in for Graphcore's popdist where that is not installed: answers as in a program that poprun did not start."""

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
    """Whether poprun started this process: never, it is not part of the emulator."""
    return False


def init() -> None:
    """Do nothing: a single process needs no setup."""


def getInstanceIndex() -> int:
    """The number of this process, from 0."""
    return 0


def getNumInstances() -> int:
    """How many processes there are."""
    return 1


def getNumLocalReplicas() -> int:
    """Replicas of this process."""
    return 1


def getNumTotalReplicas() -> int:
    """Replicas of all processes."""
    return 1


def getReplicaIndexOffset() -> int:
    """The number, over all processes, of this process's first replica."""
    return 0


def getDeviceId() -> int:
    """The device that this process attaches to."""
    return 0
