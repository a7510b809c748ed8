"""Start the instances of a run, pass signals on to them, start them again when one dies, and leave none behind.

torch.distributed.elastic does so on CPUs, PopRun on IPUs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipurun.distributed.environment import LAUNCH_FOLDER
from ipurun.distributed.notes import SIGNALS, LaunchFolder, tail
from ipurun.emulator.processes import own_address
from ipurun.errors import Problem

__all__ = ["Failure", "Outcome", "run_poprun", "run_torchrun"]

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 30.0  # of instances whose launcher has ended
_MOST_INTERRUPTS = 2  # that instances handle themselves: the first lets them save, the second ends them
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_POPRUN_PORT = 29471  # of the first host, where it is not this one


@dataclass(frozen=True)
class Failure:
    """Why instances ended.

    Args:
        what: The instance and what happened to it.
        log: Its log; None if it has none.
        log_end: The last lines of the log.
        problems: What is wrong, if the instance said so.
        code: Its exit code then.
    """

    what: str
    log: Optional[Path] = None
    log_end: str = ""
    problems: Tuple[Problem, ...] = ()
    code: int = 1


@dataclass(frozen=True)
class Outcome:
    """Result of a launch.

    Args:
        run: The run folder that the instances named; None if they did not come that far.
        is_interrupted: Whether a signal ended it.
        failure: Why it failed; None if it did not.
    """

    run: Optional[Path]
    is_interrupted: bool = False
    failure: Optional[Failure] = None


def run_torchrun(
    command: Sequence[str],
    count: int,
    hosts: int = 1,
    rendezvous: Optional[str] = None,
    max_restarts: int = 0,
    environment: Optional[Mapping[str, str]] = None,
) -> Outcome:
    """Run a command as several processes with torch.distributed.elastic, and wait for their end.

    Args:
        command: The program and its arguments.
        count: Processes in total.
        hosts: Machines on which this function is called, each of which starts an equal share.
        rendezvous: ``HOST:PORT`` of one of the machines; None: this one, at a free port.
        max_restarts: How often all are started again after one has died.
        environment: Variables to set for them.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    local = count // hosts
    host = (rendezvous or "localhost:0").rpartition(":")[0]
    is_local = host in _LOCAL_HOSTS
    variables = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // local, 1))}
    if is_local:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    with _launch({**variables, **(environment or {})}) as (folder, signals):
        config = LaunchConfig(
            min_nodes=hosts,
            max_nodes=hosts,
            nproc_per_node=local,
            run_id="ipurun",
            rdzv_backend="c10d",
            rdzv_endpoint=rendezvous or "localhost:0",
            max_restarts=max_restarts,
            monitor_interval=_SECONDS_BETWEEN_LOOKS,
            local_addr="localhost" if is_local else own_address(host),
            rdzv_configs={} if is_local else {"is_host": _is_own(host)},
            **_logs_in(folder.path / "elastic"),
        )
        failure = None
        try:
            with _quiet("torch.distributed.elastic"), _handlers_kept(), _exits_noted(folder):
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            failure = _torchrun_failure(error.failures, folder, max_restarts)
        except Exception as error:  # of the rendezvous: another machine did not come, or has left
            asked = "" if rendezvous is None else f" (distributed.rendezvous={rendezvous}: an address of one of them)"
            failure = Failure(f"the machines do not find each other{asked}: {type(error).__name__}: {error}")
        return _outcome(folder, signals, failure)


def run_poprun(
    command: Sequence[str],
    hosts: Sequence[str] = (),
    rendezvous: Optional[str] = None,
    max_restarts: int = 0,
    environment: Optional[Mapping[str, str]] = None,
    on_restart: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run a poprun command, and wait for its end; if it fails, run it again.

    Args:
        command: The command.
        hosts: Its machines.
        rendezvous: ``HOST:PORT`` where the instances find each other; None: a free port of the first host.
        max_restarts: How often to run it again.
        environment: Variables to set for it.
        on_restart: Called with a line of text before it runs again.
    """
    address = _address(hosts, rendezvous)
    with _launch({**address, **(environment or {})}) as (folder, signals):
        for attempt in range(max_restarts + 1):
            os.environ["IPURUN_ATTEMPT"] = str(attempt)
            process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, start_new_session=True)
            signals.launcher = process
            code = process.wait()
            _end_left_behind(folder.pids())
            if code == 0 or signals.received:
                return _outcome(folder, signals, None)
            if folder.stop_file.exists():
                return _outcome(folder, signals, Failure(f"poprun ended with exit code {code}"))
            rank, how = folder.culprit(attempt)
            what = f"poprun ended with exit code {code}" if rank is None else f"instance {rank} {how}"
            if attempt < max_restarts:
                on_restart(f"{what}: starting all instances again, {attempt + 1} of {max_restarts}")
        log = None if rank is None else _log_of(folder, rank)
        return _outcome(folder, signals, Failure(_after_restarts(what, max_restarts), log, tail(log)))


class _Signals:
    """Receives the signals of this process, and passes them on to the instances."""

    def __init__(self, folder: LaunchFolder) -> None:
        self._folder = folder
        self._end = threading.Event()
        self.launcher: Optional[subprocess.Popen] = None
        self.received = 0
        self._thread = threading.Thread(target=self._pass_on, name="signals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _pass_on(self) -> None:
        while not self._end.is_set():
            found = signal.sigtimedwait(SIGNALS, _SECONDS_BETWEEN_LOOKS)
            if found is None:
                continue
            self.received += 1
            self._folder.stop_file.touch()
            pids = self._folder.pids()
            number = found.si_signo if self.received <= _MOST_INTERRUPTS else signal.SIGKILL
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            if self.launcher is not None and not pids:  # the instances are on other machines, or have not begun
                with contextlib.suppress(OSError):
                    self.launcher.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def _launch(environment: Mapping[str, str]) -> Iterator[Any]:
    """Make the folder of notes, set the variables of the instances, and pass signals on while they run."""
    path = Path(tempfile.mkdtemp(prefix="ipurun-launch-"))
    folder = LaunchFolder(path)
    before = dict(os.environ)
    os.environ.update({LAUNCH_FOLDER: str(path), **environment})
    # Blocked for this thread and all that it starts, so that only the thread below receives them. Instances, which
    # inherit that, end it for themselves.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signals = _Signals(folder)
    signals.start()
    try:
        yield folder, signals
    finally:
        signals.stop()
        _end_left_behind(folder.pids())
        os.environ.clear()
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        shutil.rmtree(path, ignore_errors=True)


def _outcome(folder: LaunchFolder, signals: _Signals, failure: Optional[Failure]) -> Outcome:
    run = Path(folder.run_file.read_text(encoding="utf-8")) if folder.run_file.is_file() else None
    failed = folder.failed()
    if failed is not None:
        rank, problems, code = failed
        log = _log_of(folder, rank)
        failure = Failure(f"instance {rank} failed", log, tail(log), tuple(problems), code)
    return Outcome(run, signals.received > 0, failure)


def _torchrun_failure(ranks: Iterable[int], folder: LaunchFolder, max_restarts: int) -> Failure:
    rank, how = folder.culprit(folder.last_attempt() or 0)
    what = f"instance {rank} {how}"
    if rank is None:
        rank = min(ranks)
        what = f"instance {rank} lost another one, of another machine"
    log = _log_of(folder, rank)
    return Failure(_after_restarts(what, max_restarts), log, tail(log))


def _logs_in(folder: Path) -> Dict[str, Any]:
    """Return arguments of LaunchConfig: else torch leaves a temporary folder behind, although it writes no logs."""
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # since torch 2.3
    except ImportError:
        return {"log_dir": str(folder)}
    return {"logs_specs": DefaultLogsSpecs(log_dir=str(folder))}


@contextlib.contextmanager
def _exits_noted(folder: LaunchFolder) -> Iterator[None]:
    """Let torch's agent note exit codes in the order in which it sees them, which it does not tell otherwise."""
    from torch.distributed.launcher import api

    attempts = itertools.count()

    class Agent(api.LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                folder.note_exits(next(attempts), {rank: found.exitcode for rank, found in result.failures.items()})
            return result

    before = api.LocalElasticAgent
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        yield
    finally:
        api.LocalElasticAgent = before  # type: ignore[misc]


def _after_restarts(what: str, max_restarts: int) -> str:
    return what if not max_restarts else f"{what}, after {max_restarts} restart{'s' if max_restarts > 1 else ''}"


def _log_of(folder: LaunchFolder, rank: int) -> Optional[Path]:
    candidates: List[Path] = []
    if folder.run_file.is_file():
        run = Path(folder.run_file.read_text(encoding="utf-8"))
        candidates = [run / "logs" / f"instance-{rank}.log"] + ([run / "log.txt"] if rank == 0 else [])
    return next((path for path in [*candidates, folder.early_log(rank)] if path.is_file()), None)


def _is_own(host: str) -> bool:
    """Return whether an address is one of this machine, whatever the machine's name resolves to."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as trial:
            trial.bind(address)
    except OSError:
        return False
    return True


def _address(hosts: Sequence[str], rendezvous: Optional[str]) -> Dict[str, str]:
    if rendezvous is not None:
        host, _, port = rendezvous.rpartition(":")
    elif not hosts or hosts[0] in (*_LOCAL_HOSTS, socket.gethostname()):
        host = hosts[0] if hosts else "localhost"
        with contextlib.closing(socket.socket()) as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
    else:
        host, port = hosts[0], str(_POPRUN_PORT)
    return {"MASTER_ADDR": host, "MASTER_PORT": port}


def _end_left_behind(pids: Sequence[int]) -> None:
    """End instances that outlive their launcher: they wait for others that are gone."""
    left = [pid for pid in pids if _runs(pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        waiting = threading.Event()
        for _ in range(int(_SECONDS_TO_END / _SECONDS_BETWEEN_LOOKS)):
            left = [pid for pid in left if _runs(pid)]
            if not left:
                return
            waiting.wait(_SECONDS_BETWEEN_LOOKS)


def _runs(pid: int) -> bool:
    """Return whether a process runs that was started for a launch by this one."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            is_ours = f"{LAUNCH_FOLDER}={os.environ.get(LAUNCH_FOLDER)}".encode() in stream.read().split(b"\0")
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return is_ours and stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Let a library log nothing: what it would say is in the outcome."""
    logger = logging.getLogger(name)
    others = [logging.getLogger(known) for known in list(logging.root.manager.loggerDict) if known.startswith(name)]
    before = [(each, each.level) for each in {logger, *others}]
    for each, _ in before:
        each.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for each, level in before:
            each.setLevel(level)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put back the handlers of signals that the launcher's library replaces."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
