"""Python processes that have already imported torch and Hydra: forked from a process that has, they start in no time.

Otherwise they are as new: their own environment, working folder, module search path, `sys.argv` and `__main__`. Nothing
of ipurun is imported, so that tests of the package in another place work too.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, Dict, List, Mapping, Optional

_IMPORTED = ["torch", "torch.utils.data", "hydra", "omegaconf", "rich.live", "rich.progress", "rich.table", "numpy"]
_server: Optional[subprocess.Popen] = None


class WarmProcess:
    """One process; only one at a time can run.

    Args:
        words: What follows the interpreter on a command line: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``.
        cwd: Its working folder.
        env: Its environment.
        stdout: Path of the file or pipe that it writes to.
        stderr: The same for errors.
    """

    def __init__(self, words: List[str], cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> None:
        server = _started()
        paths = {"stdout": str(stdout), "stderr": str(stderr)}
        _send(server.stdin, {"words": words, "cwd": str(cwd), "env": dict(env), **paths})
        self.pid = int(_received(server.stdout))

    def wait(self) -> int:
        """Wait for its end; return the exit code as `subprocess` does."""
        return int(_received(_started().stdout))


def run_warm(words: List[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess:
    """Run a process to its end, as `subprocess.run` with captured text does."""
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / "stdout", Path(place) / "stderr"]
        code = WarmProcess(words, cwd, env, *paths).wait()
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return subprocess.CompletedProcess(words, code, stdout, stderr)


def _started() -> subprocess.Popen:
    global _server
    if _server is None or _server.poll() is not None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        _server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/"
        )
        atexit.register(_server.kill)
    return _server


def _send(stream: Optional[IO[str]], value: Any) -> None:
    assert stream is not None
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def _received(stream: Optional[IO[str]]) -> Any:
    assert stream is not None
    line = stream.readline()
    assert line, "the process that starts others has ended"
    return json.loads(line)


def _serve() -> None:
    sys.path.pop(0)  # the folder of this file
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own_path = [place for place in sys.path if place not in given]
    for name in _IMPORTED:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(task, own_path)
        _send(sys.stdout, pid)
        _, status = os.waitpid(pid, 0)
        _send(sys.stdout, -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _become(task: Dict[str, Any], own_path: List[str]) -> None:
    """Run the task and end."""
    code: Any = 1
    try:
        os.environ.clear()
        os.environ.update(task["env"])
        os.chdir(task["cwd"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(task[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        given = [place for place in task["env"].get("PYTHONPATH", "").split(os.pathsep) if place]
        sys.path[:] = [*given, *own_path]
        code = _exit_code(task["words"])
        sys.stdout.flush()
    finally:
        os._exit(code)


def _exit_code(words: List[str]) -> int:
    kind, *rest = words
    try:
        if kind == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.path.insert(0, os.path.dirname(kind))
            sys.argv = words
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    _serve()
