"""Layer below PopTorch's Python code: the device, the data sent to it, and the errors."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Optional

sent: List[Any] = []  # (what, value) in the order in which the layer above sent it
_attached: Dict[int, int] = {}  # executor -> IPUs


class Error(Exception):
    """Any error of PopTorch."""


class RecoverableError(Error):
    recovery_action = "FULL_RESET"


class UnrecoverableError(Error):
    pass


def num_ipus() -> int:
    return int(os.environ.get("DOUBLE_IPUS", "8"))


def attach(executor: Any, ipus: int) -> None:
    if ipus > num_ipus() - sum(_attached.values()):
        raise Error(f"Failed to acquire {ipus} IPU(s)")
    _attached[id(executor)] = ipus
    sent.append(("attach", ipus))


def detach(executor: Any) -> None:
    del _attached[id(executor)]
    sent.append(("detach", None))


def compile_or_load(folder: Optional[str], key: str) -> None:
    """Leave a file for each executable as PopART does, and nothing that says whether one was loaded."""
    if "DOUBLE_OUT_OF_MEMORY" in os.environ:
        raise Error("poplar_memory_allocation_error: out of memory: tile 0 needs more than its 638976 bytes")
    path = os.path.join(folder or "", hashlib.md5(key.encode()).hexdigest() + ".popef")
    if folder is not None and os.path.exists(path):
        return
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"popef" + key.encode())


def check_dictionary(name: str, value: Any) -> None:
    """Poplar takes texts only, and its booleans are spelled true and false."""
    for key, entry in value.items():
        if not isinstance(entry, str) or entry in ("True", "False"):
            raise Error(f"{name}: {entry!r} is not a valid value of {key}")


class Trace:
    """The block that is active while a model is traced, and every operation with its block and result type."""

    def __init__(self) -> None:
        self.ipu: Optional[int] = 0
        self.operations: List[Any] = []


trace: Optional[Trace] = None


def begin_ipu_block(ipu: int) -> None:
    assert trace is not None
    trace.ipu = ipu


def end_ipu_block() -> None:
    if trace is not None:
        trace.ipu = None
