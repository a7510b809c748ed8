"""The processes of a distributed program: who they are, and sums and copies between them.

The collectives are gloo's, from torch.distributed. They use a separate group, so that a program may still
initialize torch.distributed itself.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fcntl
import os
import pickle
import socket
import struct
import tempfile
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

__all__ = [
    "FIXED_ORDER_VARIABLE",
    "LostProcessError",
    "Processes",
    "connected",
    "in_fixed_order",
    "launched",
    "only_among",
    "own_address",
]

FIXED_ORDER_VARIABLE = "POPTORCH_EMULATOR_FIXED_ORDER"

_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_TORCHRUN = ("RANK", "WORLD_SIZE")
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_ATTEMPTS = ("TORCHELASTIC_RESTART_COUNT", "IPURUN_ATTEMPT")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of ioctl
_LENGTH = struct.Struct("<Q")
_SHORT_BYTES = 4096  # of an object that is sent together with its length
# Others may compile for hours. A process that dies closes its connections, which ends the wait at once.
_PATIENCE = datetime.timedelta(hours=24)
_PATIENCE_TO_CONNECT = datetime.timedelta(minutes=10)

_connected: Optional[Processes] = None
_chosen: Optional[Tuple[int, ...]] = None  # inside `only_among`


class LostProcessError(RuntimeError):
    """Another process of the program has ended or cannot be reached."""


class Processes:
    """All processes of a program, connected with each other.

    Every method must be called by all of them, in the same order.

    Args:
        group: The group of torch.distributed.
        store: Where further groups find each other.
        rank: Number of this process, from 0.
        count: Number of processes.
    """

    def __init__(self, group: Any, store: Any, rank: int, count: int) -> None:
        self._group = group
        self._store = store
        self._among: Dict[Tuple[int, ...], Processes] = {}
        self._last: Any = None
        self.rank = rank
        self.count = count

    def summed(self, tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Return the sums of some tensors over the processes, sent as one buffer for each type."""
        sums = list(tensors)
        for places, flat in _joined(tensors):
            self.reduce_(flat)
            _spread(flat, places, sums)
        return sums

    def reduce_(self, tensor: torch.Tensor, kind: str = "SUM") -> None:
        """Reduce a contiguous tensor over the processes in place: SUM, MIN, MAX or PRODUCT."""
        from torch.distributed import AllreduceOptions, ReduceOp

        options = AllreduceOptions()
        options.timeout = _PATIENCE
        options.reduceOp = getattr(ReduceOp, kind)
        self._wait(lambda: self._group.allreduce([tensor], options))

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy the contiguous tensor of one process to all, in place."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.timeout = _PATIENCE
        options.rootRank = root
        options.rootTensor = 0
        self._wait(lambda: self._group.broadcast([tensor], options))

    def gathered(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Return the tensors of all processes, which have the same shape and type."""
        from torch._C._distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        options.timeout = _PATIENCE
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        self._wait(lambda: self._group.allgather([parts], [tensor], options))
        return parts

    def gathered_lists(self, tensors: Sequence[torch.Tensor]) -> List[List[torch.Tensor]]:
        """Return the tensors of each process in turn, sent as one buffer for each type."""
        lists: List[List[torch.Tensor]] = [list(tensors) for _ in range(self.count)]
        for places, flat in _joined(tensors):
            for values, received in zip(lists, self.gathered(flat)):
                _spread(received, places, values)
        return lists

    def exchanged(self, value: Any) -> List[Any]:
        """Return the objects of all processes, which must be picklable."""
        data = pickle.dumps(value)
        # What is short takes one round: each costs as much as sending some ten kilobytes.
        first = self.gathered(_with_length(data, _SHORT_BYTES))
        sizes = [_LENGTH.unpack_from(part.numpy().tobytes())[0] for part in first]
        if max(sizes) > _SHORT_BYTES:
            first = self.gathered(_with_length(data, max(sizes)))
        return [
            pickle.loads(part.numpy().tobytes()[_LENGTH.size :][:size])  # from the processes of this program
            for part, size in zip(first, sizes)
        ]

    def wait(self) -> None:
        """Wait until all processes come here."""
        self.reduce_(torch.zeros(1))

    def among(self, ranks: Tuple[int, ...]) -> Optional[Processes]:
        """Return some of the processes, to be called by these; None if it is this one alone."""
        if len(ranks) < 2:
            return None
        if ranks not in self._among:
            name = "-".join(map(str, ranks))
            self._among[ranks] = _connect(self._store, ranks.index(self.rank), len(ranks), name)
        return self._among[ranks]

    def close(self) -> None:
        """End the connections, while Python still can: the threads of a group must not outlive it."""
        self._group = self._store = self._last = None

    def _wait(self, start: Any) -> None:
        # Keep the tensors until the next time. A thread of the group that is the last to release one takes a lock of
        # Python, which a worker of a loader that is forked meanwhile never gets: with Python 3.8, it would hang.
        self._last = start
        try:
            start().wait()
        except RuntimeError as error:
            raise LostProcessError(f"process {self.rank} of {self.count} lost another process: {error}") from error


def _with_length(data: bytes, most: int) -> torch.Tensor:
    """Return the length of some bytes and as many of them as there is space for, as a tensor of one size."""
    sent = bytearray(_LENGTH.size + most)
    _LENGTH.pack_into(sent, 0, len(data))
    sent[_LENGTH.size : _LENGTH.size + min(len(data), most)] = data[:most]
    return torch.frombuffer(sent, dtype=torch.uint8)


def _joined(tensors: Sequence[torch.Tensor]) -> Iterator[Tuple[List[int], torch.Tensor]]:
    """Yield the places of all tensors of each type, and a copy of them as one flat tensor."""
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == kind]
        yield places, torch.cat([tensors[place].reshape(-1) for place in places])


def _spread(flat: torch.Tensor, places: Sequence[int], values: List[torch.Tensor]) -> None:
    """Replace the tensors at some places by the parts of a flat tensor."""
    parts = flat.split([values[place].numel() for place in places])
    for place, part in zip(places, parts):
        values[place] = part.view(values[place].shape)


def launched(environ: Optional[Mapping[str, str]] = None) -> Optional[Tuple[int, int]]:
    """Return number and count of this process, as poprun, mpirun or torchrun give them; None without a launcher."""
    environ = os.environ if environ is None else environ
    for rank, count in (_TORCHRUN, _OPEN_MPI):
        if environ.get(rank, "").isdigit() and environ.get(count, "").isdigit() and int(environ[count]) > 1:
            return int(environ[rank]), int(environ[count])
    return None


def in_fixed_order() -> bool:
    """Return whether gradients are added in the order of micro-batches and replicas, whatever process they are from."""
    return os.environ.get(FIXED_ORDER_VARIABLE, "0") not in ("", "0")


def connected(count: int) -> Optional[Processes]:
    """Return the processes of this program, connected at the first call; inside `only_among`, those.

    Args:
        count: How many processes the program has.

    Returns:
        The processes; None if no launcher has started that many: this process then runs alone.

    Raises:
        LostProcessError: They cannot be reached.
    """
    global _connected
    if _connected is None:
        found = launched()
        if found is None or found[1] != count:
            return None
        _connected = _connect(_store(*found), *found)
    if _connected.count != count:
        return None
    return _connected.among(_chosen) if _chosen is not None else _connected


@contextlib.contextmanager
def only_among(ranks: Sequence[int]) -> Iterator[None]:
    """Let `connected` return only some of the processes inside: those that call this with the same numbers."""
    global _chosen
    before, _chosen = _chosen, tuple(ranks)
    try:
        yield
    finally:
        _chosen = before


def _connect(store: Any, rank: int, count: int, name: str = "all") -> Processes:
    from torch import distributed

    _choose_interface()
    try:
        # torchrun may keep the store of processes that it starts again, with their old addresses in it.
        attempt = next((os.environ[variable] for variable in _ATTEMPTS if variable in os.environ), "0")
        prefixed = distributed.PrefixStore(f"ipurun/{attempt}/{name}", store)
        group = distributed.ProcessGroupGloo(prefixed, rank, count, _PATIENCE_TO_CONNECT)
    except (RuntimeError, ValueError) as error:
        raise LostProcessError(f"process {rank} of {count} cannot reach the others: {error}") from error
    processes = Processes(group, store, rank, count)
    atexit.register(processes.close)
    return processes


def own_address(host: str) -> Optional[str]:
    """Return the address of this machine with which another one is reached; None if there is no way to it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface(address: str) -> Optional[str]:
    """Return the name of the network interface with an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _choose_interface() -> None:
    """Let gloo use the network on which process 0 is, not the one of this machine's name, which may be local."""
    address = own_address(os.environ["MASTER_ADDR"]) if "MASTER_ADDR" in os.environ else None
    name = None if address is None else _interface(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store(rank: int, count: int) -> Any:
    """Return where the processes find each other: at an address, or in a file if all are on one machine."""
    from torch import distributed

    if all(name in os.environ for name in _TORCHRUN + _ADDRESS):
        return next(distributed.rendezvous("env://", timeout=_PATIENCE_TO_CONNECT))[0]
    if all(name in os.environ for name in _ADDRESS):
        host, port = (os.environ[name] for name in _ADDRESS)
        return distributed.TCPStore(host, int(port), count, rank == 0, _PATIENCE_TO_CONNECT)
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", str(count)) != str(count):
        raise RuntimeError("they are on several machines: set MASTER_ADDR and MASTER_PORT to an address of process 0")
    job = next((os.environ[name] for name in _JOB_NAMES if name in os.environ), None) or _parent()
    name = f"ipurun-{os.getuid()}-{job}".replace(os.sep, "_")
    return distributed.FileStore(os.path.join(tempfile.gettempdir(), name), count)


def _parent() -> str:
    """Return the process that started this one, with its start, which no later process shares."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as stream:
            return f"{parent}-{stream.read().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return str(parent)
