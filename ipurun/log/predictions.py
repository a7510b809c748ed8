"""Write predictions to a file: any outputs as .pt, a single tensor as .npy or .csv."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Mapping

import numpy
import torch

from ipurun.errors import ConfigError, RunError, underlying_os_error
from ipurun.files import replacing

__all__ = ["check_file", "describe", "write_predictions"]

_SUFFIXES = (".pt", ".npy", ".csv")


def check_file(path: Path) -> None:
    """Check before the run that predictions can be written to a file.

    Raises:
        ConfigError: If the file type is unknown, or the folder is not writable.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"predictions cannot be written as `{path.suffix or path.name}`", "--out", known=", ".join(_SUFFIXES)
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"`{path}` cannot be written", "--out", seen=f"the folder {path.parent}", fix="--out FILE")


def write_predictions(path: Path, outputs: Any) -> None:
    """Write the outputs atomically.

    Raises:
        RunError: If the outputs do not fit the file type, or the file cannot be written.
    """
    if path.suffix != ".pt" and not isinstance(outputs, torch.Tensor):
        raise RunError(
            f"the outputs are not a single tensor, so they cannot be written as {path.suffix}",
            seen=describe(outputs),
            fix="--out FILE.pt",
        )
    try:
        with replacing(path) as stream:
            _write(stream, path.suffix, outputs)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        seen = str(underlying_os_error(error))
        fix = "--out FILE in a writable folder with enough free space"
        raise RunError("the predictions could not be written", str(path), seen=seen, fix=fix) from error


def _write(stream: IO[bytes], suffix: str, outputs: Any) -> None:
    if suffix == ".pt":
        torch.save(outputs, stream)
    elif suffix == ".npy":
        numpy.save(stream, outputs.numpy())
    else:
        numpy.savetxt(stream, outputs.float().reshape(len(outputs), -1).numpy(), "%.9g", delimiter=",")


def describe(outputs: Any) -> str:
    """Describe shapes and types in one line: ``1000 x 10 float32``."""
    if isinstance(outputs, torch.Tensor):
        return f"{' x '.join(map(str, outputs.shape))} {str(outputs.dtype).replace('torch.', '')}"
    if isinstance(outputs, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in outputs.items()) + "}"
    if isinstance(outputs, (list, tuple)):
        return "[" + ", ".join(describe(value) for value in outputs) + "]"
    return "nothing" if outputs is None else type(outputs).__name__
