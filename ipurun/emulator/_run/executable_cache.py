"""The folder of the executable cache: one file for each compiled program, and a lock between processes.

On a CPU there is no executable to reuse. The file describes the program under a stable key, which shows which
executables a device would find in its cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from typing import Any, Iterator, Optional

import torch

from ipurun.emulator._capture.graph import Graph
from ipurun.emulator._logging import logger, native_logger

# Options that may differ between runs of the same executable.
_RUN_TIME_OPTIONS = frozenset(["cachePath", "enableEngineCaching", "ipu_id", "log_dir", "random_seed"])


def graph_key(graph: Graph, options: Any) -> str:
    """Return a key that is equal for equal programs compiled with equal options."""
    kept = {key: repr(value) for key, value in options.toDict().items() if key not in _RUN_TIME_OPTIONS}
    text = repr((_program(graph), sorted(kept.items())))
    return hashlib.sha256(text.encode()).hexdigest()


def _program(graph: Graph) -> Any:
    """Return a description that identifies a graph: operations, branches, inputs and constants."""
    operations = [
        (
            node.name,
            repr(node.args),
            repr(node.kwargs),
            repr(node.outputs),
            tuple(node.placement),
            [_program(body) for body in node.bodies],
        )
        for node in graph.nodes
    ]
    inputs = [(item.kind, item.name, graph.specs[item.value][:2]) for item in graph.inputs]
    # A view of a weight is not a constant of the program, although the capture treats it as a plain tensor.
    of_weights = {graph.specs[item.value].storage for item in graph.inputs_of("parameter", "buffer", "input")}
    constants = [
        (int(value), _digest(tensor))
        for value, tensor in graph.constants.items()
        if graph.specs[value].storage not in of_weights
    ]
    return operations, inputs, constants, repr(graph.outputs)


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def file_name(graph: Graph, options: Any) -> str:
    """Return the name of a program's file in the cache folder."""
    return f"{graph_key(graph, options)[:20]}.popef"


def store(graph: Graph, options: Any) -> None:
    """Write the description of a program to the cache folder, if the options name one."""
    folder = _folder(options)
    if folder is None:
        return
    path = os.path.join(folder, file_name(graph, options))
    if os.path.exists(path):
        native_logger.info("Found the executable in the cache: %s", path)
        return
    try:
        _write(path, graph)
    except OSError as error:  # such as a full disk: the program itself does not need the file
        logger.warning("The executable could not be saved to the cache: %s", error)
        return
    native_logger.info("Saved the executable to the cache: %s", path)


def _write(path: str, graph: Graph) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    description = {"operations": [node.name for node in graph.nodes], "inputs": len(graph.inputs)}
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(description, file)
    os.replace(temporary, path)


@contextlib.contextmanager
def cache_lock(model: Any, options: Any) -> Iterator[None]:
    """Let one process of a distributed program compile at a time, so that others can reuse its executable."""
    if options.Distributed.numProcesses < 2:
        yield
        return
    folder = _folder(options)
    if folder is None:
        logger.warning(
            "Every process compiles the model: use poptorch.Options().enableExecutableCaching to compile once."
        )
        yield
        return
    os.makedirs(folder, exist_ok=True)
    name = hashlib.md5(repr(model).encode()).hexdigest()
    with open(os.path.join(folder, f"{name}.lock"), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        logger.debug("Process %d: cache file locked", options.Distributed.processId)
        try:
            yield
        finally:
            logger.debug("Process %d: released the cache lock", options.Distributed.processId)
            fcntl.flock(file, fcntl.LOCK_UN)


def _folder(options: Any) -> Optional[str]:
    settings = options._Popart.options
    return settings.get("cachePath") if settings.get("enableEngineCaching", False) else None
