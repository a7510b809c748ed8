"""The two loggers of PopTorch (Python and native layer), with levels and destinations."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Dict, Mapping, Set, Union

__all__ = ["logger", "native_logger", "setLogLevel", "setPopartLogLevel", "trace"]

TRACE = 5
OFF = logging.CRITICAL + 10

_LEVEL_NUMBERS: Dict[str, int] = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3, "ERR": 4, "OFF": 6}
_SYNONYMS: Dict[str, str] = {"TRACE_ALL": "TRACE", "DEBUG_IR": "DEBUG"}
_PYTHON_LEVELS: Dict[int, int] = {
    0: TRACE,
    1: logging.DEBUG,
    2: logging.INFO,
    3: logging.WARNING,
    4: logging.ERROR,
    6: OFF,
}
_LEVEL_WORDS: Dict[int, str] = {
    TRACE: "trace",
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.poptorch_level = _LEVEL_WORDS.get(record.levelno, record.levelname.lower())
        return super().format(record)


class _CurrentStream(logging.Handler):
    """Writes to the current stderr or stdout, which test tools replace after this module is imported."""

    def __init__(self, stream_name: str) -> None:
        super().__init__()
        self._stream_name = stream_name
        self.setFormatter(
            _Formatter(
                "[%(asctime)s.%(msecs)03d] [%(name)s] [%(poptorch_level)s] %(message)s",
                datefmt="%H:%M:%S",
            )
        )

    def emit(self, record: logging.LogRecord) -> None:
        stream = getattr(sys, self._stream_name)
        if stream is None or getattr(stream, "closed", False):
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # like handlers of the standard library: logging never ends a program
            self.handleError(record)


def _native_handler(environment: Mapping[str, str]) -> logging.Handler:
    destination = environment.get("POPTORCH_LOG_DEST", "stderr")
    if destination in ("stdout", "stderr"):
        return _CurrentStream(destination)
    handler = logging.FileHandler(destination, delay=True)
    handler.setFormatter(_CurrentStream("stderr").formatter)
    return handler


def _make_logger(name: str, handler: logging.Handler) -> logging.Logger:
    made = logging.getLogger(name)
    for old in list(made.handlers):
        made.removeHandler(old)
    made.addHandler(handler)
    return made


logger = _make_logger("poptorch::python", _CurrentStream("stderr"))
native_logger = _make_logger("poptorch:cpp", _native_handler(os.environ))


def _level_number(level: Union[str, int]) -> int:
    if isinstance(level, int):
        if level not in _PYTHON_LEVELS:
            raise ValueError(f"Invalid log level integer: {level}")
        return level
    name = _SYNONYMS.get(level, level)
    if name not in _LEVEL_NUMBERS:
        *first, last = sorted(_LEVEL_NUMBERS)
        raise ValueError(f"Unknown log level: {level}. Valid values are {', '.join(first)} and {last}")
    return _LEVEL_NUMBERS[name]


def setLogLevel(level: Union[str, int]) -> None:
    """Set PopTorch's log level.

    Args:
        level: TRACE (0), DEBUG (1), INFO (2), WARN (3), ERR (4) or OFF (6), as name or number.

    Raises:
        ValueError: The level is unknown.
    """
    python_level = _PYTHON_LEVELS[_level_number(level)]
    logger.setLevel(python_level)
    native_logger.setLevel(python_level)


def setPopartLogLevel(level: str) -> None:
    """Set the backend's log level.

    Raises:
        ValueError: The level is not the name of a level.
    """
    from ipurun.emulator._logs import program  # imported here because the graph, which it needs, imports this module

    program.set_level(level)


_warned: Set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless this process has already logged it."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)


def trace(message: str, *args: Any) -> None:
    """Log on the native logger at TRACE level, which Python's logging does not have."""
    native_logger.log(TRACE, message, *args)


setLogLevel(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"))
