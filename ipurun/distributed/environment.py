"""Rank and size of a process, read from its launcher: PopRun, mpirun, torchrun or ipurun itself.

Only the standard library is imported here: a plan asks it, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping, Optional

__all__ = ["LAUNCH_FOLDER", "Launched", "launched"]

LAUNCH_FOLDER = "IPURUN_LAUNCH_FOLDER"  # of the ipurun that started this process, for notes between the two
_VARIABLES = (("torchrun", "RANK", "WORLD_SIZE"), ("poprun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


@dataclass(frozen=True)
class Launched:
    """A process that a launcher started with others.

    Args:
        by: ``poprun``, ``mpirun`` or ``torchrun``.
        rank: Number of this process, from 0.
        count: Number of processes.
        attempt: How often the processes were started again before, after one of them died.
        is_on_one_machine: Whether all are on this machine.
    """

    by: str
    rank: int
    count: int
    attempt: int = 0
    is_on_one_machine: bool = True


def launched(environ: Optional[Mapping[str, str]] = None) -> Optional[Launched]:
    """Return what the launcher of this process says; None if there is none, or only one process."""
    environ = os.environ if environ is None else environ
    for by, rank, count in _VARIABLES:
        if environ.get(rank, "").isdigit() and environ.get(count, "").isdigit() and int(environ[count]) > 1:
            if by == "poprun" and "POPDIST_NUM_TOTAL_REPLICAS" not in environ:
                by = "mpirun"
            attempt = environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("IPURUN_ATTEMPT") or "0"
            local = environ.get("LOCAL_WORLD_SIZE") or environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environ[count]
            return Launched(by, int(environ[rank]), int(environ[count]), int(attempt), local == environ[count])
    return None
