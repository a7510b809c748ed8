"""The weights of an executor on their way between the user's model and the device."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from ipurun.emulator._capture.model_guard import named_tensors
from ipurun.emulator._executor import wrapping
from ipurun.emulator._executor.optimizer import ExecutorOptimizer
from ipurun.emulator._executor.reports import ExecutorReports
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logging import logger, native_logger

__all__ = ["ExecutorWeights"]


class ExecutorWeights(ExecutorReports):
    """What an executor does with its weights; its own state is set by its constructor."""

    _model: torch.nn.Module
    _user_model: Any
    _optimizer: Optional[ExecutorOptimizer]
    _dirty_host_weights: bool
    _host_weights_version: int
    _seen_weights_version: int

    def copyWeightsToHost(self) -> None:
        """Copies the device's parameters and buffers to the user's model.

        Raises:
            Error: If the model is not compiled.
        """
        executable = self._compiled("copyWeightsToHost")
        self._dirty_host_weights = False
        native_logger.debug("Writing weights from IPU to host.")
        executable.weights.download(self._host_tensors())
        self._host_weights_version += 1

    def copyWeightsToDevice(self) -> None:
        """Copies the user's parameters and buffers to the device; training progress not copied back is lost.

        Raises:
            Error: If the model is not compiled.
        """
        executable = self._compiled("copyWeightsToDevice")
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.read_back()
        native_logger.debug("Writing weights from host to IPU memory.")
        executable.weights.upload(self._host_tensors())

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copies the weights to the host if they are newer on the device.

        Returns:
            Whether they were copied.
        """
        if not self._dirty_host_weights:
            return False
        self._dirty_host_weights = False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

    def copyNamedBuffersToDevice(self) -> None:
        """Uploads the buffers listed by `Options.updatableNamedBuffers`.

        Raises:
            Error: If the model is not compiled or the option is not set.
        """
        executable = self._compiled("copyNamedBuffersToDevice")
        names = self._options._Popart.options.get("updatableNamedBuffers")
        if not names:
            raise createPoptorchError("copyNamedBuffersToDevice needs Options.updatableNamedBuffers([...]).")
        host = self._host_tensors()
        executable.weights.upload({name: host[name] for name in names})

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Loads parameters and buffers into the user's model, and uploads them if attached."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def _host_tensors(self) -> Dict[str, torch.Tensor]:
        parameters, buffers = named_tensors(self._model)
        return {**parameters, **buffers}

    def _follow_training_weights(self) -> None:
        """Takes new weights from the training executor that the user's model belongs to."""
        if not wrapping.is_wrapped(self._user_model) or wrapping.executor_of(self._user_model) is None:
            return
        self._user_model.copyWeightsToHostIfNeeded()
        version = self._user_model._host_weights_version
        if version != self._seen_weights_version:
            logger.debug("Implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
            self._seen_weights_version = version
