"""Replace the forward of linear layers and embeddings, to compute in parts or with a share of tile memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipurun.errors import ConfigError
from ipurun.planning.modules import MATMUL_MODES
from ipurun.planning.plan import Serialized
from ipurun.table_parts import look_up

__all__ = ["Forwards"]

_ABSENT = object()


class Forwards:
    """Replaced `forward` methods of single layers.

    Args:
        model: The user's model.
        engine_module: PopTorch, or the emulator.
        serialized: Layers that are computed in parts.
        proportions: Linear layer -> share of tile memory for its matmul.
    """

    def __init__(
        self,
        model: nn.Module,
        engine_module: ModuleType,
        serialized: Sequence[Serialized],
        proportions: Mapping[str, float],
    ) -> None:
        self._model = model
        self._engine = engine_module
        self._serialized = {layer.module: layer for layer in serialized}
        self._proportions = proportions
        self._before: List[Tuple[nn.Module, Any]] = []

    def install(self) -> None:
        """Replace the layers' forwards.

        Raises:
            ConfigError: A layer cannot be computed in parts.
        """
        for name in dict.fromkeys((*self._serialized, *self._proportions)):
            module = self._model.get_submodule(name)
            forward = self._forward(name, module)
            if forward is not None:
                self._before.append((module, module.__dict__.get("forward", _ABSENT)))
                module.forward = forward  # type: ignore[method-assign]  # undone by `remove`

    def remove(self) -> None:
        """Restore the layers' own forwards."""
        for module, before in reversed(self._before):
            if before is _ABSENT:
                del module.__dict__["forward"]
            else:
                module.forward = before  # type: ignore[method-assign]  # one that other code had set
        self._before.clear()

    def _forward(self, name: str, module: nn.Module) -> Optional[Callable[..., torch.Tensor]]:
        layer = self._serialized.get(name)
        if isinstance(module, nn.Embedding):
            if layer is None:
                return None
            if module.max_norm is not None or module.scale_grad_by_freq:
                raise ConfigError(
                    f"`memory.serialize`: `{name}` has max_norm or scale_grad_by_freq, which need the whole table",
                    key="memory.serialize",
                )
            return _Lookup(module, layer.factor)
        if not hasattr(module, "weight") or module.weight.dim() != 2:
            return None  # a convolution: a mark on its output is enough
        return _Product(module, self._engine, layer, self._proportions.get(name))


class _Product:
    """A linear layer's forward as a separate matmul, which can be marked and serialised."""

    def __init__(
        self, module: nn.Module, engine_module: ModuleType, layer: Optional[Serialized], share: Optional[float]
    ) -> None:
        self._module = module
        # the weight of transformers' Conv1D, GPT-2's linear layer, is transposed
        self._is_transposed = type(module).__name__ == "Conv1D"
        self._matmul: Callable[..., torch.Tensor] = torch.matmul
        self._extra: Tuple[Any, ...] = ()
        self._share = share
        self._set_share = engine_module.set_available_memory
        if layer is not None:
            mode = getattr(engine_module.MatMulSerializationMode, MATMUL_MODES[layer.mode])
            self._matmul = engine_module.serializedMatMul
            self._extra = (mode, layer.factor, layer.keep_precision)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        product = self._matmul(values, weight if self._is_transposed else weight.t(), *self._extra)
        if self._share is not None:
            product = self._set_share(product, self._share)
        return product if bias is None else product + bias


class _Lookup:
    """An embedding's forward that reads the table part by part."""

    def __init__(self, module: nn.Embedding, parts: int) -> None:
        self._module = module
        self._parts = parts

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        weight, padding = self._module.weight, self._module.padding_idx
        rows = -(-weight.shape[0] // self._parts)
        total: Optional[torch.Tensor] = None
        for first in range(0, weight.shape[0], rows):
            found = look_up(weight[first : first + rows], first, indices, padding)
            total = found if total is None else total + found
        assert total is not None, "an embedding has rows"
        return total
