"""Annotate a model for PopTorch with removable hooks on its modules, leaving its code unchanged."""

from __future__ import annotations

import copy
import dataclasses
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipurun.build.matmuls import Forwards
from ipurun.inspect.facts import EndedBlock
from ipurun.inspect.precision import cast_hooks
from ipurun.planning.plan import Placement, Serialized

__all__ = ["Annotations", "overlap_io"]

_OVERLAPS = {
    "accumulation_loop": "OverlapAccumulationLoop",
    "device_iteration_loop": "OverlapDeviceIterationLoop",
}


class Annotations:
    """All hooks that ipurun puts on a model, installed together so that their order is always the same.

    PopTorch assigns what a pre-hook does before BeginBlock's own hook to the preceding block. So blocks come first
    (those that end with a module are re-opened after it), then casts, then marks on the outputs of modules.

    Args:
        model: The user's model.
        engine_module: PopTorch, or the emulator.
        precision: Such as ``16.32``.
        rules: Module name -> ``16`` or ``32``.
        checkpoints: Modules whose outputs are kept while the rest is recomputed.
        serialized: Linear layers and embeddings that are computed in parts.
        proportions: Linear layer or convolution -> share of tile memory for its product.
        ended_blocks: User blocks to re-open after the module that ends them.
    """

    def __init__(
        self,
        model: nn.Module,
        engine_module: ModuleType,
        precision: str,
        rules: Mapping[str, str],
        checkpoints: Sequence[str],
        serialized: Sequence[Serialized] = (),
        proportions: Optional[Mapping[str, float]] = None,
        ended_blocks: Sequence[EndedBlock] = (),
    ) -> None:
        self._model = model
        self._engine = engine_module
        self._precision = precision
        self._rules = rules
        self._checkpoints = checkpoints
        self._proportions = proportions or {}
        self._ended_blocks = ended_blocks
        self._forwards = Forwards(model, engine_module, serialized, self._proportions)
        self._blocks: List[Tuple[nn.Module, int]] = []
        self._handles: List[Any] = []

    def install(self, placements: Sequence[Placement]) -> None:
        """Install the hooks for these placements, in place of any installed before."""
        self.remove()
        for placement in placements:
            module = self._model.get_submodule(placement.module)
            before = set(module._forward_pre_hooks)
            self._engine.BeginBlock(module, user_id=placement.block_id, ipu_id=placement.ipu)
            self._blocks += [(module, hook) for hook in module._forward_pre_hooks if hook not in before]
        for block in self._ended_blocks:
            begin = _ReopenBlock(self._engine.Block.start, block.block_id, block.ipu)
            self._handles.append(self._model.get_submodule(block.module).register_forward_hook(begin))
        self._handles += cast_hooks(self._model, self._precision, self._rules)
        self._forwards.install()
        for name, share in self._proportions.items():
            module = self._model.get_submodule(name)
            if "forward" not in module.__dict__:  # a linear layer's replaced forward marks its product
                mark = _MarkOutput(self._engine.set_available_memory, share)
                self._handles.append(module.register_forward_hook(mark))
        for name in self._checkpoints:
            mark = _MarkOutput(self._engine.recomputationCheckpoint)
            self._handles.append(self._model.get_submodule(name).register_forward_hook(mark))

    def remove(self) -> None:
        """Remove the hooks of `install`; blocks in the model's own code stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forwards.remove()
        # removeBlocks would also remove the blocks that the model's author wrote in submodules.
        for module, hook in self._blocks:
            module._forward_pre_hooks.pop(hook, None)
        self._blocks.clear()


def overlap_io(wrapped: nn.Module, engine_module: ModuleType, mode: str) -> None:
    """Mark the inputs and outputs of a model for transfers that overlap computation.

    Args:
        wrapped: The model with its loss, as the executor gets it.
        engine_module: PopTorch, or the emulator.
        mode: ``none``, ``accumulation_loop`` or ``device_iteration_loop``.
    """
    if mode == "none":
        return
    overlap = getattr(engine_module.OverlapMode, _OVERLAPS[mode])
    wrapped.register_forward_pre_hook(_MarkInputs(engine_module.set_overlap_for_input, overlap), with_kwargs=True)
    wrapped.register_forward_hook(_MarkOutput(engine_module.set_overlap_for_output, overlap))


class _ReopenBlock:
    def __init__(self, start: Callable[..., None], *block: Any) -> None:
        self._start = start
        self._block = block

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._start(*self._block)


class _MarkOutput:
    def __init__(self, mark: Any, *arguments: Any) -> None:
        self._mark = mark
        self._arguments = arguments

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _marked(lambda tensor: self._mark(tensor, *self._arguments), output)


class _MarkInputs:
    def __init__(self, mark: Any, mode: Any) -> None:
        self._mark = mark
        self._mode = mode

    def __call__(
        self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        return _marked(lambda tensor: self._mark(tensor, self._mode), (args, kwargs))


def _marked(mark: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Mark every tensor of a structure; containers keep their classes, because the model's code uses them."""
    if isinstance(value, torch.Tensor):
        return mark(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_marked(mark, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_marked(mark, item) for item in value)
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)  # such as transformers' ModelOutput, whose items are also attributes
        for key, item in value.items():
            copied[key] = _marked(mark, item)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _marked(mark, getattr(value, name)) for name in names})
    return value
