"""Keep two processes out of one run or sweep folder.

The lock is a file that says who holds it. It is made by a hard link, which is atomic on network file systems too. On
the same machine, its process shows whether the holder lives. The lock of another machine is watched: a small process
renews a counter in it as long as the holder lives, also while a compilation keeps Python busy for minutes. So neither
clocks nor locks of the file system have to agree between machines.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Set

from ipurun.errors import ConfigError, Problem

__all__ = ["LOCK_NAME", "is_held", "locked"]

LOCK_NAME = "lock.json"
_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 20.0  # how long the counter of another machine's process may stand still
_POLL_SECONDS = 0.5
_SETTLE_SECONDS = 0.3  # between taking a dead lock and relying on it
_GUARD = ".guard"
_UNKNOWN = "unknown"
_HELD: Set[str] = set()  # tokens of the locks of this process

# Renews the lock until it is another's or gone, or the parent ends. That closes standard input, unless a forked worker
# has a copy of the pipe, and always changes the parent.
_BEAT = """
import json, os, select, sys
path, token, parent, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
waited = 0.0
while os.getppid() == parent and not select.select([sys.stdin], [], [], min(1.0, seconds))[0]:
    waited += min(1.0, seconds)
    if waited < seconds:
        continue
    waited = 0.0
    try:
        with open(path) as stream:
            record = json.load(stream)
        if record["token"] != token:
            break
        record["beat"] += 1
        partial = path + "." + token
        with open(partial, "w") as stream:
            json.dump(record, stream)
        if os.getppid() == parent:
            os.replace(partial, path)
    except FileNotFoundError:
        break
    except (OSError, ValueError):
        continue
"""


@contextlib.contextmanager
def locked(folder: Path, what: str, on_wait: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold the lock of a folder during a `with` statement.

    Args:
        folder: The folder, which must exist.
        what: What it is, for messages: ``run`` or ``sweep``.
        on_wait: Called with a line of text before the lock of another machine's process is watched.

    Raises:
        ConfigError: Another process holds it.
    """
    path = folder / LOCK_NAME
    token = _acquire(path, what, on_wait)
    if token is None:  # the folder cannot have a lock; writing the run itself will say why
        yield
        return
    _HELD.add(token)
    beat = _start_beat(path, token)
    try:
        yield
    finally:
        _HELD.discard(token)
        if beat is not None:
            beat.kill()
            beat.wait()
            if beat.stdin is not None:
                beat.stdin.close()
        for left in (f"{path.name}.{token}", f"{path.name}{_GUARD}"):
            with contextlib.suppress(OSError):
                path.with_name(left).unlink()
        if (_read(path) or {}).get("token") == token:
            with contextlib.suppress(OSError):
                path.unlink()


def _acquire(path: Path, what: str, on_wait: Callable[[str], None]) -> Optional[str]:
    token = uuid.uuid4().hex
    own = path.with_name(f"{path.name}.{token}")
    record = {
        **_machine(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "token": token,
        "beat": 0,
    }
    try:
        own.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        return None
    try:
        while not _link(own, path):
            holder = _read(path)
            if holder is None:
                if not path.exists():
                    continue  # released just now
                # Not a lock that was written by us: there is no process to ask whether it is in use.
                holder = {"token": "", "host": _UNKNOWN}
            if _lives(holder, path, on_wait, what):
                raise ConfigError(_in_use(path, what, holder))
            _remove_dead(path, holder)
            # Others may have found the same dead lock: the one whose record is still there has the folder.
            if _link(own, path):
                time.sleep(_SETTLE_SECONDS)
                now = _read(path)
                if now is not None and now.get("token") == token:
                    break
        return token
    finally:
        with contextlib.suppress(OSError):
            own.unlink()


def _link(own: Path, path: Path) -> bool:
    """Make the lock; return False if there is one."""
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as stream:
            stream.write(own.read_bytes())
    return True


def _lives(holder: Dict[str, Any], path: Path, on_wait: Callable[[str], None], what: str) -> bool:
    """Return whether the process that holds a lock still runs."""
    lives_here = _lives_here(holder)
    if lives_here is not None:
        return lives_here
    on_wait(f"{_described(holder)} may still use this {what}: watching its lock for {_WATCH_SECONDS:.0f} s")
    deadline = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now = _read(path)
        if now is None and not path.exists():
            return False
        if now is not None and now != holder:
            return True
    return False


def _lives_here(holder: Dict[str, Any]) -> Optional[bool]:
    """Return whether the process that holds a lock runs on this machine; None if it is of another one."""
    if holder.get("token") in _HELD:
        return True
    here = _machine()
    if _UNKNOWN in here.values() or any(holder.get(key) != value for key, value in here.items()):
        return None
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False  # of an earlier process with our number, or of this one before it forgot the lock
    return _start_of(pid) == holder.get("started") if _start_of(pid) else _is_hidden(pid)


def is_held(folder: Path) -> bool:
    """Return whether a process uses a folder, for display: it is not waited for one of another machine.

    Such a process renews its lock; the time of the file shows whether it did so recently, as far as clocks agree.
    """
    path = folder / LOCK_NAME
    holder = _read(path)
    if holder is None:
        return False
    lives_here = _lives_here(holder)
    if lives_here is not None:
        return lives_here
    try:
        return abs(time.time() - path.stat().st_mtime) < _WATCH_SECONDS
    except OSError:
        return False


def _remove_dead(path: Path, dead: Dict[str, Any]) -> None:
    """Remove the lock of a dead process, unless it is another one by now."""
    with contextlib.suppress(OSError), path.with_name(path.name + _GUARD).open("w") as guard:
        with contextlib.suppress(OSError):  # a file system without such locks: the check after `_link` remains
            fcntl.flock(guard, fcntl.LOCK_EX)
        if (_read(path) or {"token": ""}).get("token") == dead["token"]:
            path.unlink()


def _start_beat(path: Path, token: str) -> Optional[subprocess.Popen]:
    words = [str(path.absolute()), token, str(os.getpid()), str(_BEAT_SECONDS)]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BEAT, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a signal to the whole group ends the run, which may still have to save
        )
    except OSError:
        return None  # processes of this machine still see that this one lives


def _machine() -> Dict[str, str]:
    """Return what a process number belongs to: containers of one machine have the same boot and other numbers."""
    return {"host": socket.gethostname(), "boot": _boot(), "namespace": _namespace()}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return _UNKNOWN


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return _UNKNOWN


def _start_of(pid: int) -> str:
    """Return when a process started, in ticks since the machine did; empty if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_hidden(pid: int) -> bool:
    """Return whether a process runs although it cannot be seen, because it belongs to another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False  # seen by now, or a zombie


def _read(path: Path) -> Optional[Dict[str, Any]]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("token"), str) else None


def _described(holder: Dict[str, Any]) -> str:
    host, pid, since = (holder.get(key, _UNKNOWN) for key in ("host", "pid", "since"))
    return f"process {pid} on {host}, since {since}"


def _in_use(path: Path, what: str, holder: Dict[str, Any]) -> Problem:
    return Problem(
        f"the {what} `{path.parent}` is in use by another process",
        where=str(path),
        seen=_described(holder),
        fix=f"wait for its end, or end it: `kill {holder.get('pid')}` on {holder.get('host')}",
        key="resume",
    )
