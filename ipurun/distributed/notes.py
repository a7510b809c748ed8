"""Notes between the ipurun that starts the instances of a run and the instances, and among those of one machine.

They are small files in a folder of the one that starts them. Only the standard library is imported here: an instance
begins with this, before anything that takes time or may fail.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.distributed.environment import LAUNCH_FOLDER, launched
from ipurun.errors import EXIT_FAILED, IpurunError, Problem
from ipurun.files import write_atomically

__all__ = ["EXIT_LOST", "SIGNALS", "LaunchFolder", "begin_instance", "run_instance", "tail", "write_to"]

EXIT_LOST = 75  # of an instance that ended because another one did
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_PARENT_DEATH_SIGNAL = 1
_TAIL_LINES = 12
_CRASH = "Fatal Python error"  # how faulthandler begins
_EXITS = "exits.json"
_EXITING = 0x4  # the flag of a process that the kernel takes down, in /proc/PID/stat; set before its connections close


class LaunchFolder:
    """The notes of one launch.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_this_process(cls) -> Optional[LaunchFolder]:
        """Return the folder of the ipurun that started this process; None if another program did."""
        path = os.environ.get(LAUNCH_FOLDER, "")
        return cls(Path(path)) if path and launched() is not None and Path(path).is_dir() else None

    @property
    def stop_file(self) -> Path:
        """Exists when the run is to stop: instances that start after that end at once."""
        return self.path / "stop"

    @property
    def run_file(self) -> Path:
        """Names the run folder, once there is one."""
        return self.path / "run"

    def early_log(self, rank: int) -> Path:
        """Return where an instance writes until there is a run folder."""
        return self.path / f"instance-{rank}.log"

    def begin(self, attempt: int, rank: int) -> None:
        """Note that an instance has started."""
        place = self.path / str(attempt)
        place.mkdir(exist_ok=True)
        write_atomically(place / f"{rank}.pid", str(os.getpid()))

    def end(self, attempt: int, rank: int, how: str, problems: Sequence[Problem] = (), code: int = 0) -> None:
        """Note how an instance ended, and if it lost another one, which.

        Args:
            attempt: Its attempt.
            rank: Its number.
            how: done, interrupted, lost, or failed.
            problems: Why it failed, if it knows.
            code: Its exit code.
        """
        document: Dict[str, Any] = {"how": how, "problems": [problem.to_dict() for problem in problems], "code": code}
        if how == "lost":
            document["lost"] = self._died(attempt)
        with suppress(OSError):
            write_atomically(self.path / str(attempt) / f"{rank}.end", json.dumps(document))

    def note_exits(self, attempt: int, codes: Mapping[int, int]) -> None:
        """Note the exit codes of instances, those first that had ended before their launcher ended the others."""
        place = self.path / str(attempt)
        place.mkdir(exist_ok=True)
        write_atomically(place / _EXITS, json.dumps({str(rank): code for rank, code in codes.items()}))

    def note_run(self, rank: int, run: Path) -> None:
        """Note the run folder; every instance may."""
        own = self.path / f"run-{rank}"
        own.write_text(str(run), encoding="utf-8")
        os.replace(own, self.run_file)

    def pids(self) -> List[int]:
        """Return the instances of the last attempt on this machine that have started."""
        attempt = self.last_attempt()
        found = (self.path / str(attempt)).glob("*.pid") if attempt is not None else ()
        return [int(path.read_text(encoding="utf-8")) for path in found]

    def ends(self, attempt: int) -> Dict[int, Dict[str, Any]]:
        """Return how the instances of an attempt ended: empty for those that did not say so."""
        ends = {}
        for started in sorted((self.path / str(attempt)).glob("*.pid")):
            end = started.with_suffix(".end")
            ends[int(started.stem)] = json.loads(end.read_text(encoding="utf-8")) if end.is_file() else {}
        return ends

    def culprit(self, attempt: int) -> Tuple[Optional[int], str]:
        """Return the instance that ended an attempt for all, and how; None if the notes do not tell.

        That an instance left no note does not make it the culprit: its launcher ends those that are still starting.
        """
        ends, exits = self.ends(attempt), self._exits(attempt)
        knows_why = [rank for rank, end in ends.items() if end.get("how") == "failed" and end["problems"]]
        lost = [rank for end in ends.values() for rank in end.get("lost", [])]
        # Those of the launcher's SIGTERM come last: it ends what is left after the first.
        exited = [rank for rank, code in exits.items() if code != EXIT_LOST]
        exited.sort(key=lambda rank: exits[rank] == -signal.SIGTERM)
        failed = [rank for rank, end in ends.items() if end.get("how") == "failed"]
        silent = [] if exits else [rank for rank, end in ends.items() if not end]
        for rank in [*knows_why, *lost, *exited, *failed, *silent]:
            return rank, "failed" if rank in failed else _how_it_ended(exits.get(rank))
        return None, ""

    def _exits(self, attempt: int) -> Dict[int, int]:
        file = self.path / str(attempt) / _EXITS
        return {int(rank): code for rank, code in json.loads(file.read_text()).items()} if file.is_file() else {}

    def _died(self, attempt: int) -> List[int]:
        """Return the instances on this machine that have ended, or are ending, without a note."""
        started = {int(path.stem): path for path in sorted((self.path / str(attempt)).glob("*.pid"))}
        # In this order: whoever only lost another one has noted so before it ended.
        gone = [rank for rank, path in started.items() if not _lives(int(path.read_text(encoding="utf-8")))]
        return [rank for rank in gone if not started[rank].with_suffix(".end").is_file()]

    def last_attempt(self) -> Optional[int]:
        """Return the number of the last attempt; None if no instance has started."""
        return max((int(place.name) for place in self.path.iterdir() if place.name.isdigit()), default=None)

    def failed(self) -> Optional[Tuple[int, List[Problem], int]]:
        """Return the instance that failed with problems that it knows, these, and its exit code; None: none did."""
        for attempt in range((self.last_attempt() or 0) + 1):
            for rank, end in self.ends(attempt).items():
                if end.get("how") == "failed" and end["problems"]:
                    return rank, [Problem(**problem) for problem in end["problems"]], int(end["code"])
        return None


def _how_it_ended(code: Optional[int]) -> str:
    if code is None:
        return "was killed"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _lives(pid: int) -> bool:
    """Return whether a process runs and is not being taken down."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and not int(fields[6]) & _EXITING


def begin_instance(has_log: bool = True) -> Optional[LaunchFolder]:
    """Prepare a process that ipurun started as an instance: its signals, its log, and its note.

    Signals that the one that started it receives are passed on by it, so the instance leaves the terminal's group, in
    which it would get them twice. It ends with the one that started it.

    Args:
        has_log: Whether all but the first write to a log instead of the terminal.

    Returns:
        The notes of the launch; None in a process that ipurun did not start so.
    """
    folder, started = LaunchFolder.of_this_process(), launched()
    if folder is None or started is None:
        return None
    if os.getsid(0) != os.getpid():
        with suppress(OSError):
            os.setsid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
    if started.rank and has_log:
        write_to(folder.early_log(started.rank))
    folder.begin(started.attempt, started.rank)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if folder.stop_file.exists():
        raise SystemExit(0)
    return folder


def run_instance(action: Callable[[], bool]) -> int:
    """Run one of the processes that ipurun started; it notes how it ends. Return its exit code.

    Args:
        action: Returns whether it was interrupted, which is not a failure.
    """
    notes, started = begin_instance(), launched()
    if notes is None or started is None:
        return int(action())
    how, code = "failed", EXIT_FAILED
    problems: Tuple[Problem, ...] = ()
    try:
        how, code = "interrupted" if action() else "done", 0
    except KeyboardInterrupt:
        how, code = "interrupted", 0
    except IpurunError as error:
        from ipurun.distributed.team import LostInstanceError  # deferred: it needs torch

        code, problems = error.exit_code, error.problems
        if isinstance(error, LostInstanceError):
            how, code = "lost", EXIT_LOST
        if started.rank:
            sys.stderr.write(f"{error}\n")  # to its log; the process that started this one shows it
        if how == "failed" and started.is_on_one_machine:
            notes.stop_file.touch()  # another start would fail in the same way
    finally:
        notes.end(started.attempt, started.rank, how, problems, code)
    return code


def write_to(path: Path) -> None:
    """Send everything that this process and its children write to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def tail(path: Optional[Path]) -> str:
    """Return the last lines of a log, or those around the beginning of a native crash; empty if there is none."""
    if path is None:
        return ""
    try:
        lines: List[Any] = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    crash = next((place for place, line in enumerate(lines) if line.startswith(_CRASH)), None)
    first = len(lines) - _TAIL_LINES if crash is None else crash - _TAIL_LINES // 3
    return "\n".join(lines[max(first, 0) :][:_TAIL_LINES])
