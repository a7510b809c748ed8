"""Files that an executor writes: saved models and compile reports."""

from __future__ import annotations

import io
import json
import os
import pickle
from typing import Any, Callable, Dict, Mapping

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logging import TRACE, logger, native_logger, trace, warn_once

_MAGIC = b"ipurun-emulator-executable\n"
_DEFAULT_NAME = "model.poptorch"
_PROTO_VARIABLE = "POPTORCH_EXPORT_PROTO_FILE"
_PROTO_NAME = "model.proto"
_ENGINE_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_NO_PROFILE = (
    "Profiling is enabled, but no profile.pop is written: PopVision reports come from an IPU or from the IPU Model of "
    "the Poplar SDK, not from the CPU emulator."
)


def save(executor: Any, filename: str, export_model: bool, save_rng_state: bool) -> None:
    """Write an executor to a file; see `PoplarExecutor.save`."""
    path = _target(filename)
    arguments = executor._compiled_arguments
    data: Dict[str, Any] = {
        "version": executor._poptorch_version,
        "arguments": (arguments.positional, arguments.named),
        "options": executor.options,
        "rng_state": executor.rng_state if save_rng_state else None,
        "program": None if executor._export is None else executor._export.program,
        "model": None,
    }
    if export_model:
        executor.copyWeightsToHostIfNeeded()
        data["training"] = executor._training
        data["model"] = executor._user_model
        data["optimizer"] = None
        if executor._optimizer is not None:
            data["optimizer"] = executor._optimizer.optimizer
            data["optimizer_state"] = executor._optimizer.optimizer.state_dict()
    stream = io.BytesIO()
    torch.save(data, stream)
    temporary = f"{path}.partial"
    with open(temporary, "wb") as file:
        file.write(_MAGIC)
        file.write(stream.getvalue())
    os.replace(temporary, path)


def read_metadata(filename: str) -> bytes:
    """Return everything that `save` wrote after the magic bytes."""
    with open(filename, "rb") as file:
        assert file.read(len(_MAGIC)) == _MAGIC, f"{filename} is not a valid PopTorch file"
        return file.read()


def read(filename: str) -> Dict[str, Any]:
    """Return what `save` stored in a file."""
    stream = io.BytesIO(read_metadata(filename))
    try:
        return torch.load(stream, weights_only=False)
    except (pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise createPoptorchError(f"{filename} cannot be read: {error}. Export it again with this version.") from error


def _target(filename: str) -> str:
    path = os.path.expanduser(filename)
    if os.path.isdir(path):
        path = os.path.join(path, _DEFAULT_NAME)
        logger.warning("%s is a directory, saving the executable to %s", filename, path)
    parent = os.path.dirname(path)
    if parent:
        assert not os.path.isfile(parent), f"{parent} is a file, not a directory"
        os.makedirs(parent, exist_ok=True)
    return path


def write_compile_files(program: Callable[[], str], options: Any, environment: Mapping[str, str]) -> None:
    """Write the program where the environment or the log level requests it.

    On a device the file holds the compiled model. Here it holds the captured program as JSON: its operations and
    their placement. A requested profile is not written, because only Poplar can write one.

    Args:
        program: Returns the compiled program as text.
        options: The executor's options.
        environment: Environment variables.
    """
    if native_logger.isEnabledFor(TRACE):
        trace("PopART IR: %s", program())
    proto = environment.get(_PROTO_VARIABLE, "")
    if proto:
        _write(proto if os.path.splitext(proto)[1] else os.path.join(proto, _PROTO_NAME), program())
    engine_options = {
        **_json_object(environment.get(_ENGINE_VARIABLE, "")),
        **options._Popart.options.get("engineOptions", {}),
    }
    if str(engine_options.get("autoReport.all", "")).lower() == "true":
        warn_once(_NO_PROFILE)


def _json_object(text: str) -> Dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
