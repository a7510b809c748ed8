"""The functions of horovod.torch over the processes of poprun or `ipurun exec --instances`, or for a single one."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, TypeVar

import torch

from ipurun.emulator.processes import Processes, connected, launched

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
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_REDUCTIONS = {Average: "SUM", Sum: "SUM", Min: "MIN", Max: "MAX", Product: "PRODUCT"}
_initialized = False
_count = 1  # processes
_results: Dict[int, torch.Tensor] = {}
_Value = TypeVar("_Value")


def init(*args: Any, **kwargs: Any) -> None:
    """Connect the processes of poprun or `ipurun exec --instances`; without a launcher there is one.

    Raises:
        RuntimeError: A launcher that is not known here started several processes.
    """
    global _initialized, _count
    found = launched()
    _count = 1 if found is None else found[1]
    for name in _SIZE_VARIABLES:
        if int(os.environ.get(name) or "1") not in (1, _count):
            raise RuntimeError(
                f"Horovod is not installed, and its replacement in the CPU emulator knows {_count} of the processes, "
                f"but {name} is {os.environ[name]}. Install Horovod, or start them with ipurun exec --instances."
            )
    if _count > 1:
        connected(_count)
    _initialized = True


def shutdown() -> None:
    """End what `init` started."""
    global _initialized, _count
    _initialized, _count = False, 1


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _initialized


def _answer(value: _Value) -> _Value:
    if not _initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return value


def _processes() -> Optional[Processes]:
    """Return the processes to exchange with; None if there is only this one."""
    return connected(_answer(_count)) if _count > 1 else None


def size() -> int:
    """Return the number of processes."""
    return _answer(_count)


def local_size() -> int:
    """Return the number of processes on this machine."""
    return _answer(_of_launcher(_LOCAL_SIZES, _count))


def cross_size() -> int:
    """Return the number of machines."""
    return _answer(-(-_count // local_size()))


def rank() -> int:
    """Return the index of this process."""
    found = launched()
    return _answer(0 if _count == 1 or found is None else found[0])


def local_rank() -> int:
    """Return the index of this process on this machine."""
    return _answer(_of_launcher(_LOCAL_RANKS, rank()))


def cross_rank() -> int:
    """Return the index of this machine."""
    return _answer(rank() // local_size())


def _of_launcher(names: Sequence[str], default: int) -> int:
    if _count == 1:
        return default
    return int(next((os.environ[name] for name in names if os.environ.get(name)), default))


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
    """Return the mean of a tensor over the processes, or another reduction of it.

    Raises:
        ValueError: Both `average` and `op` are given, or the reduction is not one of this replacement.
    """
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    kind = op if op is not None else Sum if average is False else Average
    processes = _processes()
    value = tensor.detach().clone().contiguous() if prescale_factor == 1 else tensor.detach() * prescale_factor
    if processes is not None:
        if kind not in _REDUCTIONS:
            raise ValueError("Adasum is not part of Horovod's replacement in the CPU emulator.")
        processes.reduce_(value, _REDUCTIONS[kind])
        if kind == Average:
            value = value // processes.count if not value.is_floating_point() else value / processes.count
    return value if postscale_factor == 1 else value * postscale_factor


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce the tensor in place and return it."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> List[torch.Tensor]:
    """Return a reduced copy of each tensor."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def allgather(tensor: torch.Tensor, name: Optional[str] = None, process_set: Any = None) -> torch.Tensor:
    """Return the tensors of all processes, joined in the first dimension, in which they may differ."""
    processes = _processes()
    if processes is None:
        return _answer(tensor).clone()
    return torch.cat(processes.exchanged(tensor.detach()))


def alltoall(
    tensor: torch.Tensor, splits: Optional[torch.Tensor] = None, name: Optional[str] = None, process_set: Any = None
) -> Any:
    """Return the parts that the processes send to this one, and their sizes if the splits were given."""
    processes = _processes()
    if processes is None:
        received = _answer(tensor).clone()
        return received if splits is None else (received, torch.as_tensor(splits).clone())
    sizes = [len(tensor) // processes.count] * processes.count if splits is None else torch.as_tensor(splits).tolist()
    sent = processes.exchanged(list(tensor.detach().split(sizes)))
    parts = [of_process[processes.rank] for of_process in sent]
    received = torch.cat(parts)
    return received if splits is None else (received, torch.tensor([len(part) for part in parts]))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = None
) -> torch.Tensor:
    """Return a copy of the tensor of the root process."""
    return broadcast_(tensor.detach().clone().contiguous(), root_rank)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = None
) -> torch.Tensor:
    """Overwrite the tensor with that of the root process, and return it."""
    processes = _from_root(root_rank)
    if processes is not None:
        sent = tensor.detach().contiguous()
        processes.broadcast_(sent, root_rank)
        with torch.no_grad():
            tensor.copy_(sent)
    return tensor


def broadcast_object(obj: _Value, root_rank: int = 0, name: Optional[str] = None, process_set: Any = None) -> _Value:
    """Return the object of the root process."""
    processes = _from_root(root_rank)
    return obj if processes is None else processes.exchanged(obj if processes.rank == root_rank else None)[root_rank]


def allgather_object(obj: _Value, name: Optional[str] = None, process_set: Any = None) -> List[_Value]:
    """Return the objects of all processes."""
    processes = _processes()
    return [_answer(obj)] if processes is None else processes.exchanged(obj)


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: Any = None) -> None:
    """Overwrite the parameters with those of the root process.

    Raises:
        ValueError: `params` is neither a dict nor a list of named parameters.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    elif not isinstance(params, list) and not hasattr(params, "__next__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    if _from_root(root_rank) is not None:
        for _, value in params:
            if isinstance(value, torch.Tensor):
                broadcast_(value, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, **kwargs: Any) -> None:
    """Overwrite the state of the optimizer with that of the root process."""
    if _from_root(root_rank) is not None:
        optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))


def join(device: int = -1) -> int:
    """Wait for all processes; return the last one to join, which is not known here: the last of all."""
    barrier()
    return _answer(_count - 1)


def barrier(process_set: Any = None) -> None:
    """Wait for the other processes."""
    processes = _processes()
    if processes is not None:
        processes.wait()
    _answer(None)


def _from_root(root_rank: int) -> Optional[Processes]:
    if not 0 <= root_rank < size():
        raise ValueError(
            f"Horovod has {_count} process{'es' if _count > 1 else ''}, and not one with rank {root_rank}."
        )
    return _processes()


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
    """Names of the ways to compress gradients, which are sent as they are here."""

    none = "none"
    fp16 = "fp16"


def _synchronize(self: torch.optim.Optimizer) -> None:
    """Replace the gradients by their means over the processes."""
    for group in self.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                allreduce_(parameter.grad)


@contextlib.contextmanager
def _skip_synchronize(self: Any) -> Iterator[None]:
    self._is_synchronized = True
    try:
        yield
    finally:
        self._is_synchronized = False


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Optional[Iterable[Any]] = None, *args: Any, **kwargs: Any
) -> torch.optim.Optimizer:
    """Return the optimizer with Horovod's two methods: `step` first averages the gradients over the processes."""
    kind = type(optimizer)

    def step(self: Any, closure: Any = None) -> Any:
        if not getattr(self, "_is_synchronized", False) and _count > 1:
            self.synchronize()
        return kind.step(self, closure)

    members: Dict[str, Any] = {"synchronize": _synchronize, "skip_synchronize": _skip_synchronize}
    if _count > 1:
        members["step"] = step
    optimizer.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
    return _answer(optimizer)
