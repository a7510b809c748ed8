"""The optimizer of a training executor: conversion, device side, and synchronisation of state."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from ipurun.emulator import optim
from ipurun.emulator._capture.graph import grads_from_half
from ipurun.emulator._optimizer.base import DeviceState
from ipurun.emulator._optimizer.base import Optimizer as PoptorchOptimizer
from ipurun.emulator._optimizer.convert import AttributeTracker, Converted, convert, forces_running_mean
from ipurun.emulator._optimizer.update import DeviceOptimizer
from ipurun.emulator._run.executable import Executable
from ipurun.emulator.enums import MeanReductionStrategy


class ExecutorOptimizer:
    """Holds the user's optimizer and keeps the device's consistent with it.

    Args:
        options: The executor's options, not frozen yet.
        optimizer: The user's optimizer; SGD with lr=0.01 for None.
        model: The user's model.
    """

    def __init__(self, options: Any, optimizer: Optional[torch.optim.Optimizer], model: torch.nn.Module) -> None:
        if optimizer is None:
            optimizer = optim.SGD([{"params": list(model.parameters())}], lr=0.01)
        self._options = options
        self._tracker = AttributeTracker(options._relax_optimizer_checks)
        self._executable: Optional[Executable] = None
        self._is_attached = False
        self.optimizer: torch.optim.Optimizer = optimizer
        self._apply_reduction_rule(optimizer)
        self._converted: Converted = self._convert(optimizer)

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the values from the same or another optimizer.

        Raises:
            Error: If a value changed that the compiled model holds as a constant.
            ValueError: If it needs a different reduction than the compiled model uses.
        """
        self._apply_reduction_rule(optimizer)
        converted = self._convert(optimizer)
        if self._executable is not None and self._executable.optimizer is not None:
            self._executable.optimizer.update(converted)
        self._converted = converted
        if optimizer is not self.optimizer:
            self._disconnect()
            self.optimizer = optimizer
            self._connect()

    def constants(self) -> str:
        """Return what an executable holds of the optimizer: its kind, and all values that are not variable."""

        def fixed(values: Dict[str, Any]) -> List[Any]:
            return [(name, repr(value) if is_const else None) for name, (value, is_const) in sorted(values.items())]

        converted = self._converted
        groups = [fixed(group) for group in converted.groups]
        attributes, defaults = fixed(converted.attributes), fixed(converted.defaults)
        return repr((converted.type.name, attributes, defaults, groups, converted.group_sizes))

    def compile(self, executable: Executable, named_parameters: Dict[str, torch.Tensor]) -> None:
        """Create the device side for a newly compiled model.

        Raises:
            KeyError: If the optimizer has tensors that are not in the model.
        """
        names = {id(tensor): name for name, tensor in named_parameters.items()}
        group_of: Dict[str, int] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                group_of[names[id(parameter)]] = index
        trained = {name: executable.weights.parameters[name] for name in executable.graph.grads}
        executable.optimizer = DeviceOptimizer(
            self._converted,
            trained,
            group_of,
            self._options,
            accumulation=executable.layout.accumulation,
            num_replicas=executable.layout.replicas * self._options.Distributed.numProcesses,
            rows=executable.weights.rows_by_replica(),
            processes=None if executable.adds_in_order else executable.processes,
            from_half=grads_from_half(executable.graph),
        )
        if self._converted.value("accum_type") == torch.float16:
            executable.chunks.disable()  # a half accumulator rounds after every micro-batch
        self._executable = executable

    def attach(self) -> None:
        """Upload state that the user loaded to the newly attached device."""
        self._is_attached = True
        self.before_run()
        self._connect()

    def detach(self) -> None:
        """Read the state before the device detaches."""
        self.read_back()
        self._disconnect()
        self._is_attached = False

    def destroy(self) -> None:
        """Drop the compiled model."""
        if self._is_attached:
            self.detach()
        self._executable = None

    def read_back(self) -> None:
        """Read the device's state if it is newer than the optimizer's."""
        if isinstance(self.optimizer, PoptorchOptimizer) and self.optimizer._needs_reading():
            self.optimizer._pull()

    def has_state_to_upload(self) -> bool:
        """Whether `before_run` will change the device's state."""
        return isinstance(self.optimizer, PoptorchOptimizer) and self.optimizer._has_state_to_upload()

    def before_run(self) -> None:
        """Upload state that the user loaded since the last run."""
        if isinstance(self.optimizer, PoptorchOptimizer) and self._device is not None:
            state = self.optimizer._take_state_to_upload()
            if state is not None:
                self._device.write_state(state)

    def after_run(self) -> None:
        """Note that the device's state is newer than the host's."""
        if isinstance(self.optimizer, PoptorchOptimizer):
            self.optimizer._mark_device_newer()

    @property
    def _device(self) -> Optional[DeviceOptimizer]:
        return None if self._executable is None else self._executable.optimizer

    def _convert(self, optimizer: torch.optim.Optimizer) -> Converted:
        automatic = self._options._Popart.options.get("automaticLossScalingSettings.enabled", False)
        return convert(optimizer, self._tracker, automatic_loss_scaling=bool(automatic))

    def _connect(self) -> None:
        if self._is_attached and self._device is not None and isinstance(self.optimizer, PoptorchOptimizer):
            self.optimizer._connect(self.read_device_state)

    def read_device_state(self) -> DeviceState:
        """Read the device's state; a parameter that differs between replicas has one step count per value."""
        assert self._executable is not None
        assert self._executable.optimizer is not None
        state = self._executable.optimizer.read_state()
        weights = self._executable.weights
        for name, group in weights.groups.items():
            key = f"Step___{name}"
            if key in state["ipu_state"]:
                state["ipu_state"][key] = state["ipu_state"][key].expand(group.rows(weights.num_replicas)).clone()
        return dict(state)

    def write_device_state(self, state: DeviceState) -> None:
        """Overwrite the device's state."""
        assert self._device is not None
        self._device.write_state(state)

    def _disconnect(self) -> None:
        if isinstance(self.optimizer, PoptorchOptimizer):
            self.optimizer._disconnect()

    def _apply_reduction_rule(self, optimizer: torch.optim.Optimizer) -> None:
        training = self._options.Training
        running = MeanReductionStrategy.Running
        if not forces_running_mean(optimizer):
            return
        if training.meanAccumulationAndReplicationReductionStrategy == running:
            return
        if self._executable is not None:
            raise ValueError(
                "accum_type=torch.float16 needs the Running mean reduction, but the model is already compiled. "
                "Set Training.setMeanAccumulationAndReplicationReductionStrategy(Running) before."
            )
        frozen = self._options._is_frozen
        if frozen:
            self._options._unfreeze()
        training.setMeanAccumulationAndReplicationReductionStrategy(running)
        if frozen:
            self._options._freeze()
