"""Block annotations: which part of a model belongs to which stage, phase and IPU."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from typing import Any, Callable, Iterator, List, Optional, TypeVar

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder
from ipurun.emulator._options_impl import IStageManager

F = TypeVar("F", bound=Callable[..., Any])


def _stage_manager() -> Optional[IStageManager]:
    """Return the stage manager of the running compile, None outside a compile."""
    recorder = active_recorder()
    return None if recorder is None else recorder.options._execution_strategy.stage_manager()


def _begin(user_id: Optional[str], ipu_id: Optional[int]) -> None:
    recorder, manager = active_recorder(), _stage_manager()
    if recorder is not None and manager is not None:
        recorder.begin_block(*manager.beginStage(user_id, ipu_id))


class Block(torch.nn.Module):
    """Context manager that puts the ops called inside it in a block.

    Args:
        user_id: Name of the block; blocks with the same name are one block. Automatic if None.
        ipu_id: IPU to run on, an index within the model's IPUs.
    """

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Restart the automatic names ("0", "1", ...); call it first in `forward`."""
        manager = _stage_manager()
        if manager is not None:
            manager.resetAutoId()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Begin a block that lasts until another one starts."""
        _begin(user_id, ipu_id)

    def __enter__(self) -> None:
        _begin(self._user_id, self._ipu_id)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        recorder = active_recorder()
        if recorder is not None:
            recorder.end_block()


class _BeginsBlock:
    """Begins a block when called; without a name it keeps the automatic one of its first capture."""

    _user_id: Optional[str]
    _ipu_id: Optional[int]

    def _begin_block(self) -> None:
        manager = _stage_manager()
        if manager is None:
            return
        if self._user_id is None:
            self._user_id = manager.nextAutoId()
        _begin(self._user_id, self._ipu_id)


class BlockHook(_BeginsBlock):
    """Forward pre-hook installed by BeginBlock; an object, so that it can be copied and pickled."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, input: Any) -> None:
        self._begin_block()

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn(torch.nn.Module, _BeginsBlock):
    """Module that begins a block and then calls a plain function."""

    def __init__(
        self, layer_to_call: Callable[..., Any], user_id: Optional[str] = None, ipu_id: Optional[int] = None
    ) -> None:
        super().__init__()
        self._layer_to_call = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        self._begin_block()
        return self._layer_to_call(*input, **kwargs)


def BeginBlock(
    layer_to_call: torch.nn.Module, user_id: Optional[str] = None, ipu_id: Optional[int] = None
) -> torch.nn.Module:
    """Make a module begin a block each time it is called, lasting until the next block.

    Args:
        layer_to_call: The module, changed in place. A plain callable is wrapped in a module.
        user_id: Name of the block; automatic, chosen at the first capture, if None.
        ipu_id: IPU to run on.

    Returns:
        The module itself, or the wrapper of a callable.

    Raises:
        poptorch.Error: The module already begins a block, or the argument is not callable.
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        if not callable(layer_to_call):
            raise createPoptorchError("module is not an instance of torch.nn.Module or function.")
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)

    if any(isinstance(hook, BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise createPoptorchError("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(BlockHook(user_id, ipu_id))
    return layer_to_call


def BlockFunction(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> Callable[[F], F]:
    """Decorator that runs a function inside a Block.

    Args:
        user_id: Name of the block; automatic if None.
        ipu_id: IPU to run on.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def inside_block(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside_block  # type: ignore[return-value]  # wraps keeps the signature of F

    return decorate


_adopted: List[type] = []


def adopt_blocks(block_class: type) -> None:
    """Let captures also see the blocks of another PopTorch, the real one, that a model may have imported.

    Args:
        block_class: Its `Block`. Adopting it again has no effect.
    """
    if block_class is not Block and block_class not in _adopted:
        _adopted.append(block_class)


@contextlib.contextmanager
def adopted_blocks() -> Iterator[None]:
    """Make adopted blocks begin and end blocks of the running capture.

    PopTorch's blocks, its hooks and its decorator all call the stage manager that an execution strategy has put on
    `Block`, and do nothing if there is none.
    """
    before = [
        (adopted, adopted.__dict__.get("_stages_manager"), adopted.__dict__.get("__exit__")) for adopted in _adopted
    ]
    for adopted, _, _ in before:
        adopted._stages_manager = _AdoptingManager()  # type: ignore[attr-defined]
        adopted.__exit__ = Block.__exit__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for adopted, manager, leave in before:
            adopted._stages_manager = manager  # type: ignore[attr-defined]
            adopted.__exit__ = leave  # type: ignore[attr-defined]


class _AdoptingManager:
    """Stage manager that replaces PopTorch's own for its blocks."""

    def beginStage(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        _begin(user_id, ipu_id)

    def nextAutoId(self) -> Optional[str]:
        manager = _stage_manager()
        return None if manager is None else manager.nextAutoId()

    def resetAutoId(self) -> None:
        Block.useAutoId()


def removeBlocks(module: torch.nn.Module) -> None:
    """Undo BeginBlock for a module and all its submodules."""
    assert isinstance(module, torch.nn.Module), "removeBlocks takes a torch.nn.Module"
    for part in module.modules():
        kept = [(key, hook) for key, hook in part._forward_pre_hooks.items() if not isinstance(hook, BlockHook)]
        part._forward_pre_hooks = OrderedDict(kept)
