"""Replacement for Graphcore's libpvti (host traces for PopVision), used if that is not installed: traces nothing."""

from __future__ import annotations

import os
from typing import Any, Callable, List, Sequence, TypeVar

from ipurun.emulator._logging import logger

__all__ = [
    "Graph",
    "HeatmapDouble",
    "HeatmapFloat",
    "HeatmapInt",
    "Series",
    "TraceChannel",
    "Tracepoint",
    "checkTraceChannel",
    "closeTrace",
    "createTraceChannel",
    "disableTraceChannel",
    "enableTraceChannel",
    "getCurrentTraceFilename",
    "instrument",
    "instrument_fn",
    "listTraceChannel",
    "traceDrivers",
    "traceFramework",
    "tracePoplar",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class TraceChannel:
    """A named series of trace events.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self.name = name


_channels: List[TraceChannel] = []


def createTraceChannel(name: str) -> TraceChannel:
    """Return a new channel."""
    _channels.append(TraceChannel(name))
    return _channels[-1]


traceDrivers = createTraceChannel("Drivers")  # noqa: N816  # PopVision's names
tracePoplar = createTraceChannel("Poplar")  # noqa: N816
traceFramework = createTraceChannel("Framework")  # noqa: N816


def listTraceChannel() -> List[List[Any]]:
    """Return the name of each channel and whether it is enabled: none is."""
    return [[channel.name, False] for channel in _channels]


def checkTraceChannel(channel: TraceChannel) -> bool:
    """Return False: no channel is enabled without the SDK."""
    return False


def enableTraceChannel(channel: TraceChannel) -> None:
    """Do nothing."""


def disableTraceChannel(channel: TraceChannel) -> None:
    """Do nothing."""


def getCurrentTraceFilename() -> str:
    """Return an empty name: no file is written."""
    return ""


def closeTrace() -> None:
    """Do nothing: there is no file to close."""


class Tracepoint:
    """Context manager around a piece of work.

    Args:
        channel: Where to record it.
        label: Its name.
    """

    def __init__(self, channel: TraceChannel, label: str) -> None:
        self._channel = channel
        self._label = label

    def __enter__(self) -> Tracepoint:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    @staticmethod
    def begin(channel: TraceChannel, label: str) -> None:
        """Do nothing."""

    @staticmethod
    def end(channel: TraceChannel, label: str) -> None:
        """Do nothing."""

    @staticmethod
    def event(channel: TraceChannel, label: str) -> None:
        """Do nothing."""


class Series:
    """A line of a graph.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, value: float) -> None:
        """Do nothing."""


class Graph:
    """A graph of values over time.

    Args:
        name: Its name.
        unit: Unit of its values.
    """

    def __init__(self, name: str, unit: str = "") -> None:
        self.name = name
        self.unit = unit

    def addSeries(self, name: str) -> Series:
        """Return a new line of the graph."""
        return Series(name)


class _Heatmap:
    """Counts of values in bins over time.

    Args:
        name: Its name.
        edges: The edges of the bins.
        unit: Unit of the values.
    """

    def __init__(self, name: str, edges: Sequence[float], unit: str = "") -> None:
        self.name = name
        self.edges = list(edges)
        self.unit = unit

    def add(self, values: Sequence[float]) -> None:
        """Do nothing."""


class HeatmapDouble(_Heatmap):
    """A heatmap of double-precision numbers."""


class HeatmapFloat(_Heatmap):
    """A heatmap of single-precision numbers."""


class HeatmapInt(_Heatmap):
    """A heatmap of integers."""


def instrument(obj: Any, methods: Sequence[str], channel: TraceChannel) -> None:
    """Leave the methods of an object as they are."""


def instrument_fn(channel: TraceChannel) -> Callable[[_Function], _Function]:
    """Return a decorator that leaves a function as it is."""
    return lambda function: function


if "PVTI_OPTIONS" in os.environ:
    logger.warning("PVTI_OPTIONS is set, but PopVision's libpvti is not installed: no trace is recorded.")
