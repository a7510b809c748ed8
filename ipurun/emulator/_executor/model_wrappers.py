"""``trainingModel``, ``inferenceModel`` and ``load``: a model and its options become an executor."""

from __future__ import annotations

import copy
from typing import Callable, Optional, Union

import torch

from ipurun.emulator._executor.files import read
from ipurun.emulator._impl import __version__
from ipurun.emulator._poplar_executor import PoplarExecutor
from ipurun.emulator.enums import ConnectionType
from ipurun.emulator.options import Options

__all__ = ["inferenceModel", "load", "trainingModel"]


def _user_model(model: Union[torch.nn.Module, PoplarExecutor]) -> torch.nn.Module:
    return model._user_model if isinstance(model, PoplarExecutor) else model


def trainingModel(
    model: Union[torch.nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a model that returns a loss, so that each call runs forward, backward and the weight update.

    Args:
        model: The model, or an executor of it. Its class is changed in place, so that reading its weights
            fetches them from the device.
        options: How to run it; frozen from now on.
        optimizer: One of ``poptorch.optim`` or ``torch.optim``; SGD with lr 0.01 if None.

    Returns:
        The executor, to be called in place of the model.

    Raises:
        RuntimeError: The model is wrapped for training already.
    """
    user_model = _user_model(model)
    return PoplarExecutor(
        model=copy.copy(user_model),
        options=options,
        training=True,
        poptorch_version=__version__,
        optimizer=optimizer,
        user_model=user_model,
    )


def inferenceModel(model: Union[torch.nn.Module, PoplarExecutor], options: Optional[Options] = None) -> PoplarExecutor:
    """Wrap a model so that each call runs its forward pass on the device.

    Args:
        model: The model, or an executor of it, whose weights are then shared.
        options: How to run it; frozen from now on.

    Returns:
        The executor, to be called in place of the model.
    """
    user_model = _user_model(model)
    return PoplarExecutor(
        model=copy.copy(user_model),
        options=options,
        training=False,
        poptorch_version=__version__,
        user_model=user_model,
    )


def load(filename: str, edit_opts_fn: Optional[Callable[[Options], None]] = None) -> PoplarExecutor:
    """Build an executor from a file that ``PoplarExecutor.save`` or ``compileAndExport`` wrote.

    Args:
        filename: The file.
        edit_opts_fn: Called with the stored options before they are used.

    Returns:
        The executor, compiled and with the stored weights.

    Raises:
        AssertionError: The file was written by another version, or without the model.
    """
    data = read(filename)
    assert data["version"] == __version__, (
        f"{filename} was exported by PopTorch version {data['version']}, this is {__version__}"
    )
    assert data["model"] is not None, (
        f"{filename} does not contain the model: re-create it and call loadExecutable({filename!r})"
    )
    options = data["options"].clone()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never.value:
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    optimizer = data.get("optimizer")
    if optimizer is not None and data.get("optimizer_state", {}).get("ipu_state") is not None:
        optimizer.load_state_dict(data["optimizer_state"])
    executor = PoplarExecutor(data["model"], options, data["training"], __version__, optimizer)
    positional, named = data["arguments"]
    executor.compile(*positional, **named)
    if data["rng_state"]:
        executor.rng_state = data["rng_state"]
    return executor
