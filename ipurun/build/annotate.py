"""Placement and recomputation marks on a model whose code is not touched: hooks on its modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from ipurun.build.batch import map_tensors
from ipurun.build.precision import cast_hooks
from ipurun.plan.types import Placement

__all__ = ["Annotations"]


class Annotations:
    """All hooks that ipurun puts on a model, installed together so that their order is always the same.

    PopTorch counts what a pre-hook does before BeginBlock's own hook to the preceding block, so blocks come
    first, then casts, then recomputation checkpoints.

    Args:
        model: The user's model.
        engine_module: Answers to PopTorch's names.
        precision: Such as ``16.32``.
        rules: Module name -> ``16`` or ``32``.
        checkpoints: Modules whose outputs are kept when the rest is recomputed.
    """

    def __init__(
        self,
        model: nn.Module,
        engine_module: ModuleType,
        precision: str,
        rules: Mapping[str, str],
        checkpoints: Sequence[str],
    ) -> None:
        self._model = model
        self._engine = engine_module
        self._precision = precision
        self._rules = rules
        self._checkpoints = checkpoints
        self._blocks: List[Tuple[nn.Module, int]] = []
        self._handles: List[Any] = []

    def install(self, placements: Sequence[Placement]) -> None:
        """Put the marks for these placements on the model, in place of any installed before."""
        self.remove()
        for placement in placements:
            module = self._model.get_submodule(placement.module)
            before = set(module._forward_pre_hooks)
            self._engine.BeginBlock(module, user_id=placement.block_id, ipu_id=placement.ipu)
            self._blocks += [(module, hook) for hook in module._forward_pre_hooks if hook not in before]
        self._handles += cast_hooks(self._model, self._precision, self._rules)
        for name in self._checkpoints:
            module = self._model.get_submodule(name)
            self._handles.append(module.register_forward_hook(_KeepOutput(self._engine)))

    def remove(self) -> None:
        """Take away what `install` put there; blocks written in the model's own code stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # removeBlocks would also take away the blocks that the model's author wrote further inside.
        for module, hook in self._blocks:
            module._forward_pre_hooks.pop(hook, None)
        self._blocks.clear()


class _KeepOutput:
    def __init__(self, engine_module: ModuleType) -> None:
        self._engine = engine_module

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return self._engine.recomputationCheckpoint(tensor)

        return map_tensors(keep, output)
