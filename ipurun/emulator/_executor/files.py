"""Files that an executor writes: saved models and compile reports."""

from __future__ import annotations

import hashlib
import io
import json
import os
from typing import Any, Callable, Dict, Mapping, Tuple

import torch

from ipurun.emulator._impl import Error, __version__, createPoptorchError
from ipurun.emulator._logging import TRACE, logger, native_logger, trace, warn_once

_MAGIC = b"ipurun-emulator-executable"
_AGAIN = "Export it again with this version."
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
    content = stream.getvalue()
    checksum = hashlib.sha256(content).hexdigest()
    temporary = f"{path}.partial"
    with open(temporary, "wb") as file:
        file.write(_MAGIC + f" {executor._poptorch_version} {checksum}\n".encode())
        file.write(content)
    os.replace(temporary, path)


def read_metadata(filename: str) -> bytes:
    """Return everything that `save` wrote after the first line.

    Raises:
        AssertionError: It is not such a file.
        Error: It is damaged.
    """
    return _content(filename)[1]


def _content(filename: str) -> Tuple[str, bytes]:
    """Return the version that wrote a file, "" where it does not say so, and what it wrote."""
    with open(filename, "rb") as file:
        first, content = file.readline(200), file.read()
    words = first.split()
    assert words[:1] == [_MAGIC] and len(words) in (1, 3), f"{filename} is not a valid PopTorch file"
    if len(words) == 1:
        return "", content  # of a version that wrote no checksum
    if hashlib.sha256(content).hexdigest().encode() != words[2]:
        raise createPoptorchError(
            f"{filename} is damaged: it was cut off or changed after it was written. Export it again."
        )
    return words[1].decode("ascii", "replace"), content


def other_version(filename: str, version: str) -> str:
    """Return a message that names both versions."""
    return f"{filename} was exported by PopTorch version {version}, this is {__version__}. {_AGAIN}"


def problem_of(filename: str) -> str:
    """Return why a file cannot be loaded, "" if nothing shows it before its Python objects are read."""
    try:
        version, _ = _content(filename)
    except (OSError, AssertionError, Error) as error:
        return getattr(error, "message", None) or str(error)
    return other_version(filename, version) if version not in ("", __version__) else ""


def read(filename: str) -> Dict[str, Any]:
    """Return what `save` stored in a file."""
    version, content = _content(filename)
    try:
        data = torch.load(io.BytesIO(content), weights_only=False)
    except Exception as error:  # whatever a damaged file, or objects of another version, raise
        known = f", exported by PopTorch version {version}," if version else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        raise createPoptorchError(f"{filename}{known} cannot be read: {reason}. {_AGAIN}") from error
    assert isinstance(data, dict) and "version" in data, f"{filename} is not a valid PopTorch file"
    return data


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
