"""Errors of a device raised on request, so that a program's recovery can be tested without one.

`POPTORCH_EMULATOR_FAULTS` lists them, separated by commas: `call=3:IPU_RESET` raises a recoverable error with
that recovery action at the third call of an executor, `call=5:UNRECOVERABLE` an unrecoverable one, and
`call=7:ERROR` a plain one. A fault is raised once in a process.
"""

from __future__ import annotations

import os
from typing import Dict, Set

from ipurun.emulator._errors import Error, native_error

__all__ = ["raise_requested_fault"]

VARIABLE = "POPTORCH_EMULATOR_FAULTS"
_RECOVERY_ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")
_raised: Set[str] = set()


def raise_requested_fault(call: int) -> None:
    """Raises the fault that the environment asks for at this call.

    Args:
        call: Number of the executor's call, the first is 1.

    Raises:
        RecoverableError: If a recovery action is asked for.
        UnrecoverableError: If `UNRECOVERABLE` is asked for.
        Error: If `ERROR` is asked for.
        ValueError: If the variable cannot be read.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        _raised.clear()
        return
    wanted = _parse(text).get(call)
    if wanted is None or f"{call}:{wanted}" in _raised:
        return
    _raised.add(f"{call}:{wanted}")
    raise _fault(wanted, call)


def _parse(text: str) -> Dict[int, str]:
    faults: Dict[int, str] = {}
    for entry in text.split(","):
        position, _, kind = entry.strip().partition(":")
        word, _, number = position.partition("=")
        kind = kind.strip().upper()
        known = (*_RECOVERY_ACTIONS, "UNRECOVERABLE", "ERROR")
        if word.strip() != "call" or not number.strip().isdigit() or kind not in known:
            raise ValueError(
                f"{VARIABLE}: expected entries such as call=3:IPU_RESET with one of {known}, got {entry!r}"
            )
        faults[int(number)] = kind
    return faults


def _fault(kind: str, call: int) -> Error:
    message = f"Fault asked for by {VARIABLE} at call {call}"
    if kind in _RECOVERY_ACTIONS:
        return native_error(message, type="poplar_recoverable_runtime_error", recovery_action=kind)
    if kind == "UNRECOVERABLE":
        return native_error(message, type="poplar_unrecoverable_runtime_error", unrecoverable=True)
    return native_error(message, type="poplar_application_runtime_error")
