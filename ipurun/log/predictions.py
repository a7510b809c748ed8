"""Predictions in a file: anything as .pt, one tensor as .npy or .csv."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any, Mapping

import numpy
import torch

from ipurun.errors import ConfigError, RunError, os_error_behind

__all__ = ["check_file", "describe", "write_predictions"]

_SUFFIXES = (".pt", ".npy", ".csv")


def check_file(path: Path) -> None:
    """Finds out early whether predictions can be written there.

    Raises:
        ConfigError: The kind of file is not known, or its folder cannot be written to.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"predictions cannot be written as `{path.suffix or path.name}`", "--out", known=", ".join(_SUFFIXES)
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"`{path}` cannot be written", "--out", seen=f"the folder {path.parent}", fix="--out FILE")


def write_predictions(path: Path, outputs: Any) -> None:
    """Writes outputs, whole or not at all.

    Raises:
        RunError: .npy or .csv were asked for and the outputs are not one tensor, or the file cannot be written.
    """
    if path.suffix != ".pt" and not isinstance(outputs, torch.Tensor):
        raise RunError(
            f"the outputs are not one tensor, so they do not fit {path.suffix}",
            seen=describe(outputs),
            fix="--out FILE.pt",
        )
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            _write(stream, path.suffix, outputs)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch tells a full disk as RuntimeError
        with contextlib.suppress(OSError):
            partial.unlink()
        seen = str(os_error_behind(error))
        fix = "--out FILE in a folder with room that you can write to"
        raise RunError("the predictions could not be written", str(path), seen=seen, fix=fix) from error


def _write(stream: IO[bytes], suffix: str, outputs: Any) -> None:
    if suffix == ".pt":
        torch.save(outputs, stream)
    elif suffix == ".npy":
        numpy.save(stream, outputs.numpy())
    else:
        numpy.savetxt(stream, outputs.float().reshape(len(outputs), -1).numpy(), "%.9g", delimiter=",")


def describe(outputs: Any) -> str:
    """Shapes and types in one line: ``1000 x 10 float32``."""
    if isinstance(outputs, torch.Tensor):
        return f"{' x '.join(map(str, outputs.shape))} {str(outputs.dtype).replace('torch.', '')}"
    if isinstance(outputs, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in outputs.items()) + "}"
    if isinstance(outputs, (list, tuple)):
        return "[" + ", ".join(describe(value) for value in outputs) + "]"
    return "nothing" if outputs is None else type(outputs).__name__
