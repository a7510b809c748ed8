"""The processes that load data: they outlive signals to the process group, end with their parent and leave no memory.

Batch systems and terminals signal every process of a group. Without its loader a run could not reach the end of its
host call and save, so the processes of the loader leave signals to the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.queues
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Type

import torch

__all__ = [
    "AnonymousBatches",
    "DeadWorkerError",
    "LoaderTimeoutError",
    "WaitLimit",
    "WorkerSetup",
    "children_unwatched",
    "closed_queues_ignored",
    "deaths",
    "kill",
    "signals_held",
    "start_fork_server",
    "started_by",
]

_OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.5


class LoaderTimeoutError(Exception):
    """No batch came within `loader.timeout_seconds`."""


class DeadWorkerError(Exception):
    """A process of a loader has died."""


class WorkerSetup:
    """Prepare a process of the loader; used as `worker_init_fn` of torch's data loader.

    PopTorch's asynchronous accessor has no such hook, but receives the loader, and this with it, by pickle: its process
    is prepared when it unpickles this.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()

    def __call__(self, worker: int) -> None:
        self._end_if_alone()
        _end_only_with(os.getppid())
        sys.excepthook = _report_unless_disconnected  # also of the thread that hands over shared memory
        # Torch names shared memory and removes the name a moment later: a process that is killed in between leaves the
        # memory behind until the machine is restarted. This is where torch's collate function gets its memory.
        torch.UntypedStorage._new_using_fd_cpu = staticmethod(_anonymous_storage)  # type: ignore[assignment,method-assign]

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self._owner and threading.current_thread() is threading.main_thread():
            self._end_if_alone()
            _end_only_with(self._owner)

    def _end_if_alone(self) -> None:
        if os.getppid() == 1 and self._owner != 1:  # the parent is gone already, and init has taken its place
            os._exit(0)


class WholeBatch(List[torch.Tensor]):
    """The items of a batch that was read as a whole, in place of its samples."""


class AnonymousBatches:
    """Collate samples; in a worker, into shared memory that has no name, so that no kill can leave it behind.

    Args:
        collate: Makes a batch of samples.
    """

    def __init__(self, collate: Callable[[List[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: List[Any]) -> Any:
        batch = list(samples) if isinstance(samples, WholeBatch) else self._collate(samples)
        return batch if torch.utils.data.get_worker_info() is None else _shared(batch)


class WaitLimit:
    """Kill the processes of a loader that takes too long; whoever waits for them then gets an error.

    PopTorch's accessor waits without a limit, and torch's data loader does not limit how long it receives a batch.

    Args:
        seconds: The limit; None: no limit.
    """

    def __init__(self, seconds: Optional[float]) -> None:
        self._seconds = seconds
        self._others: List[Any] = []
        self._deadline: Optional[float] = None
        self._is_running = False
        self.is_exceeded = False

    @contextlib.contextmanager
    def waiting(self, others: List[Any], more_seconds: float = 0.0) -> Iterator[None]:
        """Limit the time spent inside.

        Args:
            others: The child processes that do not belong to the loader.
            more_seconds: Added to the limit.
        """
        if self._seconds is None:
            yield
            return
        self._others = others
        self._deadline = time.monotonic() + self._seconds + more_seconds
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._watch, args=(min(_POLL_SECONDS, self._seconds / 4),), daemon=True).start()
        try:
            yield
        finally:
            self._deadline = None

    def close(self) -> None:
        """End the watch."""
        self._is_running = False

    def _watch(self, pause_seconds: float) -> None:
        while self._is_running:
            time.sleep(pause_seconds)
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self.is_exceeded = True
                kill(started_by(self._others))
                return


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals to the group back; a process that is started inside cannot be ended by one before it is prepared."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def closed_queues_ignored() -> Iterator[None]:
    """Let queues that are first used inside not report that the other end is gone; also those of forked processes.

    A loader that is closed early closes its queues while batches and indices are still on their way.
    """
    queues: Any = multiprocessing.queues.Queue
    usual = queues._on_queue_feeder_error

    def report(error: Exception, item: Any) -> None:
        if not isinstance(error, BrokenPipeError):
            usual(error, item)

    queues._on_queue_feeder_error = staticmethod(report)
    try:
        yield
    finally:
        queues._on_queue_feeder_error = staticmethod(usual)


@contextlib.contextmanager
def children_unwatched() -> Iterator[None]:
    """Undo what torch does when it starts workers: to raise an error wherever the main thread is when one dies.

    It would interrupt a host call or a save. Whoever waits for a batch notices all the same.
    """
    with _handling_deaths(signal.getsignal(signal.SIGCHLD)):
        yield


@contextlib.contextmanager
def _handling_deaths(handler: Any) -> Iterator[None]:
    """Handle the ends of child processes in some way meanwhile, and afterwards as before."""
    before = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or before is None:  # nothing that Python could restore
        yield
        return
    signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def start_fork_server() -> None:
    """Start Python's fork server, from which PopTorch starts its accessor, such that signals do not end it.

    A process whose fork server has ended counts as ended.
    """
    multiprocessing.resource_tracker.ensure_running()  # first, because it releases the signals that are held
    with signals_held():
        multiprocessing.forkserver.ensure_running()


def started_by(others: List[Any]) -> List[Any]:
    """Return the child processes that are not among others, which were there before."""
    return [process for process in multiprocessing.active_children() if process not in others]


def deaths(processes: List[Any]) -> str:
    """Return which processes have died and how, empty if none has."""
    codes = {process.pid: process.exitcode for process in processes if process.exitcode}
    how = {
        pid: f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        for pid, code in codes.items()
    }
    return ", ".join(f"process {pid}: {text}" for pid, text in how.items())


def kill(processes: List[Any]) -> None:
    """Kill processes that are still running, also stopped ones, for which Python would wait forever at exit.

    A loader that the user started before has torch raise an error for each worker that is killed: not for these.
    """
    running = [process for process in processes if process.is_alive()]
    with _handling_deaths(signal.SIG_DFL):
        for process in running:
            process.kill()
        for process in running:
            process.join(1.0)


def _report_unless_disconnected(kind: Type[BaseException], error: BaseException, place: Any) -> None:
    if not isinstance(error, (ConnectionError, EOFError)):  # the run has ended while a batch was on its way
        sys.__excepthook__(kind, error, place)


def _end_only_with(owner: int) -> None:
    """Leave signals to the run, and end when its owner asks for it or the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))
    # SIGTERM is also how its owner ends a process that hangs: the sender makes the difference.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    threading.Thread(target=_wait_for_the_end, args=(os.getppid(), owner), daemon=True).start()


def _wait_for_the_end(parent: int, owner: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait((signal.SIGTERM,), _POLL_SECONDS)
        if received is not None and received.si_pid == owner:
            break
    os._exit(0)  # for torch, any other code is a failure to report


def _shared(value: Any) -> Any:
    """Move the tensors of a batch to shared memory; what torch would not send as plain tensors stays as it is."""
    if type(value) is dict:
        return {key: _shared(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_shared, value))
    if type(value) in (list, tuple):
        return type(value)(map(_shared, value))
    if type(value) is not torch.Tensor or value.is_shared() or value.requires_grad or not value.numel():
        return value
    if value.layout != torch.strided or value.device.type != "cpu":
        return value
    moved = torch.empty(0, dtype=value.dtype)
    moved.set_(_anonymous_storage(value.numel() * value.element_size()), 0, value.shape)  # type: ignore[call-overload]
    return moved.copy_(value)


def _anonymous_storage(num_bytes: int) -> torch.UntypedStorage:
    descriptor = os.memfd_create("ipurun_batch")
    try:
        os.ftruncate(descriptor, num_bytes)
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, num_bytes)
    finally:
        os.close(descriptor)
