"""Start the processes of points by forking one that has imported torch and the CPU engine.

That takes milliseconds, a new Python seconds. The server computes nothing with torch, so that it has no threads that a
fork would lose. It runs in a process of its own because the sweep, which plans the points, has used torch.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

from ipurun.module_search import append_working_folder, python_command

__all__ = ["ForkServer", "ForkedProcess", "console"]

_LARGEST_MESSAGE = 65536
_POLL_SECONDS = 0.02


class ForkedProcess:
    """A process of a fork server, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> Optional[int]:
        return self._server.exit_code(self.pid)

    def wait(self, timeout: Optional[float] = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self.poll()
            if code is not None:
                return code
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), float(timeout or 0))
            time.sleep(_POLL_SECONDS)


class ForkServer:
    """Starts processes of `ipurun.sweep.worker`. It ends with this process, and ends its processes then.

    Its start takes as long as that of one point, in the background.

    Args:
        modules: Further modules to import.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: Dict[int, Optional[int]] = {}
        self._started: List[int] = []
        self.environment = dict(os.environ)  # of the processes that it starts
        with theirs:
            self._server = subprocess.Popen(
                [*python_command("ipurun.sweep.forks.console"), str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def start(
        self, arguments: Sequence[str], output_file: Path, environment: Mapping[str, str], writer: int
    ) -> ForkedProcess:
        """Start a process; arguments as for `Child`.

        Raises:
            OSError: The server has ended.
        """
        request = {"arguments": list(arguments), "output": str(output_file), "environment": dict(environment)}
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))]
        self._socket.sendmsg([json.dumps(request).encode()], passed)
        while not self._started:
            self._receive(wait=True)
        return ForkedProcess(self._started.pop(), self)

    def exit_code(self, pid: int) -> Optional[int]:
        """Return the exit code of a process, negative for a signal; None while it runs."""
        self._receive(wait=False)
        return self._codes[pid]

    def close(self) -> None:
        """End the server, and the processes that it has started."""
        self._socket.close()
        if None not in self._codes.values():
            self._server.kill()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _receive(self, wait: bool) -> None:
        while wait or select.select([self._socket], [], [], 0)[0]:
            message = self._socket.recv(_LARGEST_MESSAGE)
            if not message:
                if wait:
                    raise OSError("the process that starts points has ended")
                lost = [pid for pid, code in self._codes.items() if code is None and not os.path.exists(f"/proc/{pid}")]
                self._codes.update(dict.fromkeys(lost, -signal.SIGKILL))
                return
            found = json.loads(message)
            if "code" in found:
                self._codes[found["pid"]] = found["code"]
            else:
                self._codes[found["pid"]] = None
                self._started.append(found["pid"])
            wait = False


def console() -> None:
    """Serve until the sweep is gone; in each process that is forked, run its point."""
    gc.disable()
    append_working_folder()
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ipurun import engine
    from ipurun.sweep import worker

    worker.import_all()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    engine.load("cpu")
    gc.freeze()  # what is there stays: to look through it would also copy its pages in every process
    gc.enable()
    arguments = _serve(control)
    if arguments is None:
        return
    sys.exit(worker.main(arguments))


def _serve(control: socket.socket) -> Optional[List[str]]:
    """Fork a process for each request; return its arguments there, and None in the server at its end."""
    waker, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: Set[int] = set()
    while True:
        readable, _, _ = select.select([control, waker], [], [])
        if waker in readable:
            os.read(waker, 4096)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                _send(control, {"pid": pid, "code": _exit_code(status)})
        if control not in readable:
            continue
        message, passed, _, _ = control.recvmsg(_LARGEST_MESSAGE, socket.CMSG_SPACE(4))
        if not message:
            _end(running)
            return None
        request = json.loads(message)
        writer = array.array("i", passed[0][2][:4])[0]
        pid = os.fork()
        if pid == 0:
            control.close()
            os.close(waker)
            signal.set_wakeup_fd(-1)
            os.close(wakeup)
            _become_a_point(request)
            return [*request["arguments"], str(writer)]
        _lead_group(pid)
        os.close(writer)
        running.add(pid)
        _send(control, {"pid": pid})


def _become_a_point(request: Mapping[str, Any]) -> None:
    """Give a forked process what a new one has."""
    os.setpgid(0, 0)  # the server has a session of its own: no terminal sends signals there
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.update(request["environment"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]  # a module


def _lead_group(pid: int) -> None:
    """Let a process lead a group at once, so that signals reach it and those that it starts; it does so itself, too."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        return  # it has ended


def _send(control: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        return  # the sweep is gone: the next message says so


def _end(running: Set[int]) -> None:
    """Let points save and end after the sweep has gone."""
    for pid in running:
        try:
            os.killpg(pid, signal.SIGTERM)
        except OSError:
            continue


def _exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
