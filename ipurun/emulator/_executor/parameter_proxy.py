"""What `executor.<parameter>` returns: the parameter, with the setting of its replica groups."""

from __future__ import annotations

from typing import Any

import torch

from ipurun.emulator._executor.weights import ReplicaGroups
from ipurun.emulator.enums import CommGroupType, VariableRetrievalMode

__all__ = ["ParameterProxy"]


class ParameterProxy:
    """Stands for a parameter that is a direct attribute of the model.

    Args:
        executor: The executor of the model.
        name: The name of the parameter.
        parameter: The parameter, whose attributes are forwarded.
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
        """Gives groups of replicas values of their own, held in a leading dimension of the parameter.

        Args:
            comm_group_type: How replicas are grouped.
            shards: Number of replicas in a group.
            variable_retrieval_mode: Whether the host reads one value for each group or each replica.
        """
        self._executor.per_replica_params[self._name] = ReplicaGroups(comm_group_type, shards, variable_retrieval_mode)
