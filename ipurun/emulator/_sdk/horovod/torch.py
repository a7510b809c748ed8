"""The functions of horovod.torch for a single process: every collective returns what this process passes."""

from __future__ import annotations

import contextlib
import os
from typing import Any, ContextManager, Dict, Iterable, List, Optional, Sequence, TypeVar

import torch

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

Average, Sum, Adasum, Min, Max, Product = range(6)
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_initialized = False
_results: Dict[int, torch.Tensor] = {}
_Value = TypeVar("_Value")


def init(*args: Any, **kwargs: Any) -> None:
    """Start the only process.

    Raises:
        RuntimeError: A launcher started several processes, which this replacement cannot connect.
    """
    global _initialized
    for name in _SIZE_VARIABLES:
        if int(os.environ.get(name) or "1") > 1:
            raise RuntimeError(
                f"Horovod is not installed, and its replacement in the CPU emulator knows one process, but {name} is "
                f"{os.environ[name]}. Install Horovod, or start one process."
            )
    _initialized = True


def shutdown() -> None:
    """End what `init` started."""
    global _initialized
    _initialized = False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _initialized


def _answer(value: _Value) -> _Value:
    if not _initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return value


def size() -> int:
    """Return the number of processes."""
    return _answer(1)


def local_size() -> int:
    """Return the number of processes on this machine."""
    return _answer(1)


def cross_size() -> int:
    """Return the number of machines."""
    return _answer(1)


def rank() -> int:
    """Return the index of this process."""
    return _answer(0)


def local_rank() -> int:
    """Return the index of this process on this machine."""
    return _answer(0)


def cross_rank() -> int:
    """Return the index of this machine."""
    return _answer(0)


def is_homogeneous() -> bool:
    """Return True: all machines have the same number of processes."""
    return _answer(True)


def mpi_threads_supported() -> bool:
    """Return False: MPI is not used."""
    return _answer(False)


def mpi_enabled() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def nccl_built() -> int:
    """Return 0: NCCL is not used."""
    return 0


def allreduce(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Return a scaled copy of the tensor: its reduction over one process."""
    factor = _answer(prescale_factor * postscale_factor)
    return tensor.clone() if factor == 1 else tensor * factor


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce the tensor in place and return it."""
    return tensor.copy_(allreduce(tensor.detach(), *args, **kwargs))


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> List[torch.Tensor]:
    """Return a reduced copy of each tensor."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def allgather(tensor: torch.Tensor, name: Optional[str] = None, process_set: Any = None) -> torch.Tensor:
    """Return a copy of the tensor: the tensors of all processes, joined in the first dimension."""
    return _answer(tensor).clone()


def alltoall(
    tensor: torch.Tensor, splits: Optional[torch.Tensor] = None, name: Optional[str] = None, process_set: Any = None
) -> Any:
    """Return a copy of the tensor, and of the splits if there are any."""
    received = _answer(tensor).clone()
    return received if splits is None else (received, torch.as_tensor(splits).clone())


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = None
) -> torch.Tensor:
    """Return a copy of the tensor of the root process."""
    return _from_root(tensor, root_rank).clone()


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = None
) -> torch.Tensor:
    """Return the tensor, which already has the values of the root process."""
    return _from_root(tensor, root_rank)


def broadcast_object(obj: _Value, root_rank: int = 0, name: Optional[str] = None, process_set: Any = None) -> _Value:
    """Return the object of the root process."""
    return _from_root(obj, root_rank)


def allgather_object(obj: _Value, name: Optional[str] = None, process_set: Any = None) -> List[_Value]:
    """Return the objects of all processes."""
    return [_answer(obj)]


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: Any = None) -> None:
    """Leave the parameters as they are: those of the root process.

    Raises:
        ValueError: `params` is neither a dict nor a list of named parameters.
    """
    if not isinstance(params, (dict, list)) and not hasattr(params, "__next__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    _from_root(params, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, **kwargs: Any) -> None:
    """Leave the state of the optimizer as it is: that of the root process."""
    _from_root(optimizer, root_rank)


def join(device: int = -1) -> int:
    """Return the last process to join: this one."""
    return _answer(0)


def barrier(process_set: Any = None) -> None:
    """Wait for no other process."""
    _answer(None)


def _from_root(value: _Value, root_rank: int) -> _Value:
    if root_rank != _answer(0):
        raise ValueError(f"Horovod's replacement in the CPU emulator has one process, rank 0, not rank {root_rank}.")
    return value


def _kept(result: torch.Tensor) -> int:
    handle = len(_results)
    while handle in _results:
        handle += 1
    _results[handle] = result
    return handle


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start `allreduce`; return a handle for `synchronize`."""
    return _kept(allreduce(tensor, *args, **kwargs))


def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start `allreduce_`; return a handle for `synchronize`."""
    return _kept(allreduce_(tensor, *args, **kwargs))


def allgather_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start `allgather`; return a handle for `synchronize`."""
    return _kept(allgather(tensor, *args, **kwargs))


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start `broadcast`; return a handle for `synchronize`."""
    return _kept(broadcast(tensor, *args, **kwargs))


def broadcast_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Start `broadcast_`; return a handle for `synchronize`."""
    return _kept(broadcast_(tensor, *args, **kwargs))


def poll(handle: int) -> bool:
    """Return True: every operation is complete at once."""
    return True


def synchronize(handle: int) -> torch.Tensor:
    """Return the result of an asynchronous operation.

    Raises:
        ValueError: There is no operation with this handle, or its result was already taken.
    """
    if handle not in _results:
        raise ValueError(f"no operation with the handle {handle}")
    return _results.pop(handle)


class Compression:
    """Names of the ways to compress gradients, which a single process does not send."""

    none = "none"
    fp16 = "fp16"


def _no_exchange(self: torch.optim.Optimizer) -> None:
    """Do nothing: there are no gradients of other processes."""


def _skip_synchronize(self: torch.optim.Optimizer) -> ContextManager[None]:
    return contextlib.nullcontext()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Optional[Iterable[Any]] = None, *args: Any, **kwargs: Any
) -> torch.optim.Optimizer:
    """Return the optimizer with Horovod's two methods: a single process has no gradients to exchange."""
    kind = type(optimizer)
    members = {"synchronize": _no_exchange, "skip_synchronize": _skip_synchronize, "__module__": kind.__module__}
    optimizer.__class__ = type(kind.__name__, (kind,), members)
    return _answer(optimizer)
