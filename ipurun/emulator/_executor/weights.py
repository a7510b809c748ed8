"""The device's copy of a model's parameters and buffers."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, Optional

import torch

from ipurun.emulator._capture.dtypes import wrapped
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator.enums import CommGroupType, VariableRetrievalMode


def device_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that values of a host type have on the device.

    Integers stay 64 bits wide, as torch's kernels require for indices; results are narrowed.
    """
    return {torch.float64: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """Groups of replicas that share one value of a parameter.

    Attributes:
        kind: How replicas are grouped.
        size: Number of replicas in a group.
        retrieval: Whether the host reads one value per group or per replica.
    """

    kind: CommGroupType
    size: int
    retrieval: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup

    def count(self, num_replicas: int) -> int:
        """Return the number of groups."""
        if self.kind == CommGroupType.All:
            return 1
        if self.kind == CommGroupType.NoGrouping:
            return num_replicas
        return num_replicas // self.size

    def group_of(self, replica: int, num_replicas: int) -> int:
        """Return the group that a replica belongs to."""
        if self.kind == CommGroupType.All:
            return 0
        if self.kind == CommGroupType.NoGrouping:
            return replica
        if self.kind == CommGroupType.Consecutive:
            return replica // self.size
        return replica % self.count(num_replicas)

    def rows(self, num_replicas: int) -> int:
        """Return the size of the leading dimension: one value per group, or per replica."""
        return num_replicas if self._one_per_replica else self.count(num_replicas)

    def row_of(self, replica: int, num_replicas: int) -> int:
        """Return the row that a replica computes with."""
        return replica if self._one_per_replica else self.group_of(replica, num_replicas)

    def rows_trained_by(self, replica: int, num_replicas: int) -> List[int]:
        """Return the rows that a replica's gradient updates: those of all replicas in its group."""
        group = self.group_of(replica, num_replicas)
        if not self._one_per_replica:
            return [group]
        return [other for other in range(num_replicas) if self.group_of(other, num_replicas) == group]

    @property
    def _one_per_replica(self) -> bool:
        return self.retrieval == VariableRetrievalMode.AllReplicas


class DeviceWeights:
    """The device's parameters and buffers, separate from the host's.

    Integer parameters and buffers are constants of the compiled program: they keep the values that the host had when
    the model was compiled, and are not copied back.

    Args:
        parameters: The host's parameters by name, without duplicates.
        buffers: The host's buffers by name, without duplicates.
        num_replicas: Number of replicas.
        groups: The parameters whose values differ between replicas.
    """

    def __init__(
        self,
        parameters: Dict[str, torch.Tensor],
        buffers: Dict[str, torch.Tensor],
        num_replicas: int,
        groups: Optional[Dict[str, ReplicaGroups]] = None,
    ) -> None:
        self.num_replicas = num_replicas
        self.groups = dict(groups or {})
        self.parameters = {name: _on_device(tensor) for name, tensor in parameters.items()}
        self.buffers: Dict[str, List[torch.Tensor]] = {name: [_on_device(tensor)] for name, tensor in buffers.items()}
        for name, group in self.groups.items():
            self._check_group(name, group)

    def separate_buffers(self, names: Iterable[str]) -> None:
        """Give each replica its own copy of the named buffers."""
        for name in names:
            first = self.buffers[name][0]
            self.buffers[name] = [first] + [first.clone() for _ in range(self.num_replicas - 1)]

    def parameter_of(self, name: str, replica: int) -> torch.Tensor:
        """Return the parameter value that a replica computes with."""
        group = self.groups.get(name)
        tensor = self.parameters[name]
        return tensor if group is None else tensor[group.row_of(replica, self.num_replicas)]

    def rows_by_replica(self) -> Dict[str, List[int]]:
        """Return, for parameters whose values differ between replicas, the row that each replica computes with."""
        replicas = range(self.num_replicas)
        return {
            name: [group.row_of(replica, self.num_replicas) for replica in replicas]
            for name, group in self.groups.items()
        }

    def buffer_of(self, name: str, replica: int) -> torch.Tensor:
        """Return the buffer that a replica computes with."""
        copies = self.buffers[name]
        return copies[replica] if len(copies) > 1 else copies[0]

    def upload(self, host: Dict[str, torch.Tensor], *, constants: bool = False) -> None:
        """Copy host values to the device, ignoring unknown names.

        Args:
            host: The host's values by name.
            constants: Whether to copy integers too, while the model is compiled.
        """
        with torch.no_grad():
            for name, tensor in host.items():
                if not (constants or tensor.is_floating_point()):
                    continue
                if name in self.parameters:
                    _copy(self.parameters[name], tensor, name)
                for copy in self.buffers.get(name, ()):
                    _copy(copy, tensor, name)

    def download(self, host: Dict[str, torch.Tensor]) -> None:
        """Copy the device's values into the host's tensors, buffers from the first replica."""
        with torch.no_grad():
            for name, tensor in host.items():
                if not tensor.is_floating_point():
                    continue
                if name in self.parameters:
                    tensor.copy_(self.parameters[name])
                elif name in self.buffers:
                    tensor.copy_(self.buffers[name][0])

    def _check_group(self, name: str, group: ReplicaGroups) -> None:
        tensor = self.parameters[name]
        rows = group.rows(self.num_replicas)
        if tensor.dim() == 0:
            raise createPoptorchError(
                f"The parameter {name} has no leading dimension to hold one value per group of replicas."
            )
        if tensor.shape[0] != rows:
            raise createPoptorchError(
                f"The parameter {name} of shape {tuple(tensor.shape)} must have a leading dimension of {rows}: "
                f"{group.retrieval} keeps {rows} values for {self.num_replicas} replicas in "
                f"{group.count(self.num_replicas)} groups."
            )


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _narrow(tensor).detach().to(device_dtype(tensor.dtype), copy=True)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return wrapped(tensor) if tensor.dtype == torch.int64 else tensor


def _copy(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    if target.shape != source.shape:
        raise createPoptorchError(
            f"{name} had shape {tuple(target.shape)} when the model was compiled and has "
            f"{tuple(source.shape)} now. Call destroy() on the executor to compile again."
        )
    target.copy_(_narrow(source))


class ParameterProxy:
    """A parameter of the model, read as an attribute of its executor.

    Args:
        executor: The executor of the model.
        name: The name of the parameter.
        parameter: The parameter that attribute access is forwarded to.
    """

    def __init__(self, executor: Any, name: str, parameter: torch.nn.Parameter) -> None:
        self._executor = executor
        self._name = name
        self._parameter = parameter

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._parameter, attribute)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas separate values, held in a leading dimension of the parameter.

        Args:
            comm_group_type: How replicas are grouped.
            shards: Number of replicas in a group.
            variable_retrieval_mode: Whether the host reads one value per group or per replica.
        """
        self._executor.per_replica_params[self._name] = ReplicaGroups(comm_group_type, shards, variable_retrieval_mode)
