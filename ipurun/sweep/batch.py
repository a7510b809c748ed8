"""Points as jobs of joblib and submitit: they run where these put them, and talk to the sweep through files.

So the sweep, the queue and the point may be on different machines that share a folder. What a point has done is in its
files whatever happens to its job, and a sweep that was ended finds it there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from ipurun.errors import ConfigError
from ipurun.module_search import python_command
from ipurun.sweep.child import GRACE_SECONDS, Outcome, outcome_of
from ipurun.sweep.launchers import Launcher, RunningPoint, Task
from ipurun.sweep.ledger import FAILED, INTERRUPTED
from ipurun.sweep.remote import read_message

__all__ = ["JoblibLauncher", "RemotePoint", "SubmititLauncher", "import_extra"]

_POLL_SECONDS = 0.5
_ASK_SECONDS = 5.0  # between questions to the queue
_LOST_SECONDS = 15.0  # how long files may take to appear after a job has ended
_LIVING = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED")
_TIMED_OUT = "timed-out too many times"


def import_extra(name: str, choice: str) -> Any:
    """Import a library that only some sweeps need.

    Args:
        name: Its name.
        choice: What was typed to need it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"`{choice}` needs the package `{name}`",
            where=f"command line: {choice}",
            seen=str(error),
            fix="pip install 'ipurun[sweep]'",
        ) from error


class RemotePoint:
    """Callable that runs a point in the process of a job, on the machine a library chose.

    Args:
        task: The point.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._folder = os.getcwd()
        self._process: Optional[subprocess.Popen] = None

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_process": None}

    def __call__(self) -> int:
        """Run the point to its end, or until the sweep asks it to stop; return its exit code."""
        task, parent = self._task, os.getppid()
        # SLURM may send the signal of a time limit to all processes of a job. It is for this one, see `checkpoint`:
        # the other would end without having saved.
        with task.output_file.open("ab") as output, _blocked(signal.SIGUSR1, signal.SIGUSR2):
            self._process = subprocess.Popen(
                [*python_command("ipurun.sweep.worker.console"), *map(str, self._arguments())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**os.environ, **task.environment},
                start_new_session=True,
            )
        self._say(do="job", host=socket.gethostname(), pid=self._process.pid)
        ended_by, kill_at = "", float("inf")
        begun = time.monotonic()
        while not self._has_ended():
            try:
                time.sleep(_POLL_SECONDS)
                reason = "interrupt" if task.stop_file.exists() or os.getppid() != parent else ""
                if task.timeout_seconds is not None and time.monotonic() - begun >= task.timeout_seconds:
                    reason = reason or "timeout"
            except KeyboardInterrupt:  # from the terminal, to all processes of the sweep
                reason = "interrupt"
            if reason and not ended_by:
                ended_by = reason
                kill_at = time.monotonic() + GRACE_SECONDS if reason == "timeout" else float("inf")
                self._signal(signal.SIGTERM)
            if time.monotonic() >= kill_at:
                self._signal(signal.SIGKILL)
        code = self._process.wait()
        self._signal(signal.SIGKILL)  # workers that a crashed process has left
        self._say(do="ended", code=code, by=ended_by)
        return code

    def checkpoint(self) -> Any:
        """Save before the time limit of the job; called by submitit, which then puts the job into the queue again."""
        self._signal(signal.SIGTERM)
        while not self._has_ended():
            time.sleep(_POLL_SECONDS)
        self._say(do="requeued")
        return importlib.import_module("submitit.helpers").DelayedSubmission(self)

    def _arguments(self) -> Sequence[Path]:
        return self._task.job_file.absolute(), self._task.result_file.absolute(), self._task.messages_file.absolute()

    def _has_ended(self) -> bool:
        # Without reaping it: a signal handler may ask while the interrupted code does.
        assert self._process is not None
        if self._process.returncode is not None:
            return True
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _say(self, **message: Any) -> None:
        with self._task.messages_file.open("ab") as stream:
            stream.write((json.dumps(message) + "\n").encode())


@contextlib.contextmanager
def _blocked(*numbers: int) -> Iterator[None]:
    """Block signals, also for good in processes that are started inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Job(RunningPoint):
    """A point that is a job: its messages are read from a file.

    Args:
        task: The point.
        job: How the queue calls it.
    """

    def __init__(self, task: Task, job: Optional[str] = None) -> None:
        super().__init__(task)
        self.job = job
        self.is_waiting = True
        self._read_bytes = 0
        self._where: Dict[str, Any] = {}
        self._gone_since: Optional[float] = None
        self._interrupted = False

    def poll(self) -> List[str]:
        lines = self._new_lines()
        for line in lines:
            call = read_message(line) or {"do": ""}
            if call["do"] == "job":
                self.is_waiting, self._where = False, call
            elif call["do"] == "requeued":
                self.is_waiting = True
            elif call["do"] == "ended":
                task = self.task
                by = call["by"] or ("interrupt" if self._interrupted else "")
                self.outcome = outcome_of(call["code"], task.result_file, task.output_file, by, task.timeout_seconds)
        if self.outcome is None:
            self._look_for_loss()
        return lines

    def interrupt(self) -> None:
        self._interrupted = True
        self.task.stop_file.touch()
        if self.is_waiting:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the queue may not answer, or not know the job any more
            self.cancel()
        if self._where.get("host") == socket.gethostname():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._where["pid"], signal.SIGKILL)
        self.outcome = Outcome(INTERRUPTED, "interrupted")

    def cancel(self) -> None:
        """Take it out of the queue."""

    def lost(self) -> str:
        """Return why there will be no more messages, empty while there may be some."""
        return ""

    def _look_for_loss(self) -> None:
        why = self.lost()
        if not why:
            self._gone_since = None
            return
        self._gone_since = self._gone_since or time.monotonic()
        if time.monotonic() - self._gone_since >= _LOST_SECONDS or _TIMED_OUT in why:
            self.outcome = Outcome(FAILED, why, f"error: {why}")

    def _new_lines(self) -> List[str]:
        try:
            with self.task.messages_file.open("rb") as stream:
                stream.seek(self._read_bytes)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read_bytes += len(whole) + len(newline)
        return whole.decode("utf-8", "replace").splitlines()


def _forget_earlier(task: Task) -> None:
    for file in (task.messages_file, task.stop_file, task.result_file):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


class JoblibLauncher(Launcher):
    """Jobs of `joblib.Parallel`.

    Args:
        keys: The keys of ``hydra.launcher``.
        at_once: How many points are given to joblib at the same time; it runs ``n_jobs`` of them.
    """

    def __init__(self, keys: Mapping[str, Any], at_once: int) -> None:
        super().__init__(at_once)
        self._joblib = import_extra("joblib", "hydra/launcher=joblib")
        self._keys = {name: value for name, value in keys.items() if name != "_target_" and value is not None}
        if str(self._keys.get("batch_size", "")).isdigit():
            self._keys["batch_size"] = int(self._keys["batch_size"])

    @staticmethod
    def num_jobs(keys: Mapping[str, Any]) -> int:
        """Return how many points joblib runs at the same time."""
        joblib = import_extra("joblib", "hydra/launcher=joblib")
        try:
            return int(joblib.effective_n_jobs(keys["n_jobs"]))
        except ValueError as error:
            fix = "hydra.launcher.n_jobs=2, or -1 for one per core"
            raise ConfigError("`hydra.launcher.n_jobs` is not a number of jobs", seen=str(error), fix=fix) from error

    def start(self, tasks: Sequence[Task]) -> List[RunningPoint]:
        for task in tasks:
            _forget_earlier(task)
        points = [RemotePoint(task) for task in tasks]
        thread = _Parallel(self._joblib, self._keys, points)
        thread.start()
        return [_JoblibJob(task, thread) for task in tasks]


class _Parallel(threading.Thread):
    def __init__(self, joblib: Any, keys: Mapping[str, Any], points: Sequence[RemotePoint]) -> None:
        super().__init__(daemon=True)
        self._joblib = joblib
        self._keys = keys
        self._points = points
        self.error = ""

    def run(self) -> None:
        try:
            self._joblib.Parallel(**self._keys)(self._joblib.delayed(point)() for point in self._points)
        except BaseException as error:  # of joblib or of a worker: each point that has not ended reports it
            self.error = f"{type(error).__name__}: {error}".splitlines()[0]


class _JoblibJob(_Job):
    def __init__(self, task: Task, thread: _Parallel) -> None:
        super().__init__(task)
        self._thread = thread

    def lost(self) -> str:
        if self._thread.is_alive():
            return ""
        return f"joblib ended without running it{': ' if self._thread.error else ''}{self._thread.error}"


class SubmititLauncher(Launcher):
    """Jobs of submitit: processes of this machine that have a time limit, or jobs of SLURM.

    Args:
        name: ``submitit_local`` or ``submitit_slurm``.
        keys: The keys of ``hydra.launcher``.
        folder: The folder of the sweep.
        job_name: What the queue shows.
        at_once: How many points run, or wait in the queue, at the same time.

    Raises:
        ConfigError: submitit or SLURM is not there, or submitit does not take a key.
    """

    def __init__(self, name: str, keys: Mapping[str, Any], folder: Path, job_name: str, at_once: int) -> None:
        super().__init__(at_once)
        submitit = import_extra("submitit", f"hydra/launcher={name}")
        self.is_elsewhere = name == "submitit_slurm"
        self._timeout_min = keys["timeout_min"]
        if self.is_elsewhere:
            _refuse_early_signals(keys)
        self._queue = _SlurmQueue() if self.is_elsewhere else None
        self._job_class = submitit.SlurmJob
        self._logs = logs = keys.get("submitit_folder") or str(folder.absolute() / ".submitit" / "%j")
        given = {"name": job_name, **{key: value for key, value in keys.items() if value is not None}}
        for not_submitits in ("_target_", "submitit_folder", "max_num_timeout"):
            given.pop(not_submitits, None)
        try:
            limits = {f"{name[9:]}_max_num_timeout": keys["max_num_timeout"]}
            self._executor = submitit.AutoExecutor(folder=logs, cluster=name[9:], **limits)
            self._executor.update_parameters(**_for_submitit(given, name))
        except (ValueError, TypeError, NameError, RuntimeError) as error:
            what = f"`hydra/launcher={name}` cannot be used"
            fix = "see the keys of hydra.launcher in docs/how-to/sweeps.md"
            raise ConfigError(what, seen=str(error).splitlines()[0], fix=fix) from error

    def start(self, tasks: Sequence[Task]) -> List[RunningPoint]:
        for task in tasks:
            _forget_earlier(task)
        try:
            with self._executor.batch() if len(tasks) > 1 else contextlib.nullcontext():
                jobs = [self._executor.submit(RemotePoint(task)) for task in tasks]
        except Exception as error:  # of sbatch: what it says is what the user needs
            reason = f"the job cannot be submitted: {str(error).splitlines()[-1]}"
            return [_NotSubmitted(task, reason) for task in tasks]
        return [_SubmititJob(task, job, self._queue, self._timeout_min) for task, job in zip(tasks, jobs)]

    def find(self, task: Task, job: str) -> Optional[RunningPoint]:
        if self._queue is None:
            return None
        found = _SubmititJob(task, self._job_class(self._logs, job), self._queue, self._timeout_min)
        has_ended = any((read_message(line) or {}).get("do") == "ended" for line in _lines(task.messages_file))
        return found if has_ended or self._queue.state(job) in _LIVING else None


def _refuse_early_signals(keys: Mapping[str, Any]) -> None:
    """Refuse jobs that SLURM would ask to save before they have done anything."""
    limit, delay = 60 * keys["timeout_min"], keys["signal_delay_s"]
    if delay >= limit:
        raise ConfigError(
            "a job would be asked to save as soon as it has started, again and again",
            "hydra.launcher.signal_delay_s",
            seen=f"{delay} s before the end of timeout_min={keys['timeout_min']}, which is {limit} s",
            fix=f"hydra.launcher.signal_delay_s={limit // 4} or hydra.launcher.timeout_min={delay // 60 + 1}",
            key="hydra.launcher.signal_delay_s",
        )


def _lines(file: Path) -> List[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _for_submitit(keys: Mapping[str, Any], name: str) -> Dict[str, Any]:
    """Return keys as submitit's AutoExecutor takes them: its own plain, those of SLURM with a prefix."""
    shared = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name")
    taken = {key: value for key, value in keys.items() if key in (*shared, "stderr_to_stdout")}
    if name == "submitit_slurm":
        taken.update({f"slurm_{key}": value for key, value in keys.items() if key not in taken})
    return taken


class _NotSubmitted(RunningPoint):
    def __init__(self, task: Task, reason: str) -> None:
        super().__init__(task)
        self.outcome = Outcome(FAILED, reason, f"error: {reason}")

    def poll(self) -> List[str]:
        return []

    def interrupt(self) -> None:
        """Do nothing: it does not run."""

    def kill(self) -> None:
        """Do nothing: it does not run."""


class _SubmititJob(_Job):
    def __init__(self, task: Task, job: Any, queue: Optional[_SlurmQueue], timeout_min: int) -> None:
        super().__init__(task, job.job_id)
        self._job = job
        self._queue = queue
        self._timeout_min = timeout_min

    def cancel(self) -> None:
        self._job.cancel(check=False)

    def lost(self) -> str:
        state = self._job.state if self._queue is None else self._queue.state(str(self.job))
        if state in _LIVING:
            return ""
        limit = f"hydra.launcher.timeout_min={self._timeout_min}"
        if self._is_timed_out() or state == "TIMEOUT":
            return f"{_TIMED_OUT}: its job reached {limit}; it has saved, and resume continues it"
        logs = f"see {self._job.paths.stderr}"
        return f"its job {self.job} ended without a result, as {state or 'unknown to the queue'}; {logs}"

    def _is_timed_out(self) -> bool:
        with contextlib.suppress(OSError):
            return _TIMED_OUT in self._job.paths.stderr.read_text(encoding="utf-8", errors="replace")
        return False


class _SlurmQueue:
    """State of jobs according to SLURM, queried together; works without SLURM's accounting."""

    def __init__(self) -> None:
        if shutil.which("sbatch") is None:
            what = "`hydra/launcher=submitit_slurm` needs SLURM: there is no `sbatch` here"
            fix = "run it on a login node, or hydra/launcher=submitit_local"
            raise ConfigError(what, "command line: hydra/launcher=submitit_slurm", fix=fix)
        self._states: Dict[str, str] = {}
        self._asked = 0.0

    def state(self, job: str) -> str:
        """Return the state of a job, empty if SLURM does not know it."""
        if time.monotonic() - self._asked >= _ASK_SECONDS:
            self._ask()
        return self._states.get(job, "RUNNING" if not self._states else "")

    def _ask(self) -> None:
        self._asked = time.monotonic()
        command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%F_%K|%T"]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return  # busy: ask again later
        if done.returncode:
            return
        self._states = {"": ""}
        for line in done.stdout.splitlines():
            number, in_array, state = (line.split("|") + ["", ""])[:3]
            self._states.update({number: state, in_array: state})
