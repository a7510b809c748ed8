"""The lock of a folder: one process at a time, and no dead one in the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ipurun.errors import ConfigError
from ipurun.runs import lock
from ipurun.runs.lock import LOCK_NAME, locked


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WATCH_SECONDS", 0.6)
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_SETTLE_SECONDS", 0.05)


def _holder(folder: Path, then: str = "time.sleep(60)", beat: float = 5.0) -> subprocess.Popen:
    """Start a process that holds the lock of a folder, and wait until it does."""
    code = f"""
    import os, signal, sys, time
    from pathlib import Path
    from ipurun.runs import lock
    lock._BEAT_SECONDS = {beat}
    with lock.locked(Path(sys.argv[1]), "run"):
        print("held", flush=True)
        {then}
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def _rewrite(folder: Path, **changes: Any) -> Dict[str, Any]:
    record = {**json.loads((folder / LOCK_NAME).read_text()), **changes}
    (folder / LOCK_NAME).write_text(json.dumps(record))
    return record


def test_a_second_process_is_kept_out_and_the_first_is_named(tmp_path: Path) -> None:
    process = _holder(tmp_path)
    try:
        with pytest.raises(ConfigError) as caught, locked(tmp_path, "run"):
            raise AssertionError
    finally:
        _end(process)
    (problem,) = caught.value.problems
    assert f"the run `{tmp_path}` is in use" in problem.what
    assert f"process {process.pid} on {os.uname().nodename}, since 20" in problem.seen
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME]


def test_a_killed_process_blocks_nobody_and_its_helper_ends(tmp_path: Path) -> None:
    process = _holder(tmp_path)
    helpers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
    _end(process)
    waits: List[str] = []
    with locked(tmp_path, "run", waits.append):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert not waits  # known at once, without watching
    assert list(tmp_path.iterdir()) == []
    assert helpers.split()
    _wait_until_gone([int(helper) for helper in helpers.split()])


def _wait_until_gone(pids: List[int]) -> None:
    deadline = time.monotonic() + 60
    while any(lock._start_of(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_zombie_and_a_process_with_a_used_number_block_nobody(tmp_path: Path) -> None:
    process = _holder(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    while lock._start_of(process.pid):
        time.sleep(0.01)
    with locked(tmp_path, "run"):
        pass  # the process is not waited for yet
    process.communicate()
    process = _holder(tmp_path)
    _rewrite(tmp_path, started="1")
    with locked(tmp_path, "run"):
        pass
    _end(process)


def test_a_lock_of_another_machine_blocks_while_it_is_renewed(tmp_path: Path) -> None:
    process = _holder(tmp_path, beat=0.1)
    lines: List[str] = []
    try:
        _rewrite(tmp_path, host="elsewhere", boot="another")
        with pytest.raises(ConfigError, match="on elsewhere"), locked(tmp_path, "run", lines.append):
            raise AssertionError
    finally:
        _end(process)
    assert "elsewhere" in lines[0] and "watching" in lines[0]


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"boot": "another"}, {"namespace": "pid:[1]"}])
def test_a_dead_lock_of_another_machine_blocks_nobody_whatever_its_clock_says(
    tmp_path: Path, changes: Dict[str, str]
) -> None:
    _end(_holder(tmp_path))
    _rewrite(tmp_path, since="2999-01-01T00:00:00+00:00", **changes)
    with locked(tmp_path, "run"):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "null"])
def test_a_damaged_lock_blocks_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    with locked(tmp_path, "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_renewed_while_python_is_busy(tmp_path: Path) -> None:
    """A compilation on an IPU may hold Python's own lock for minutes; a regular expression does here."""
    busy = "import re; re.match('(a+)+$', 'a' * 40 + 'b')"
    process = _holder(tmp_path, busy, beat=0.1)
    try:
        _rewrite(tmp_path, host="elsewhere")
        with pytest.raises(ConfigError, match="in use"), locked(tmp_path, "run"):
            raise AssertionError
    finally:
        _end(process)


def test_of_many_processes_that_find_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    _end(_holder(tmp_path))
    code = """
    import sys, time
    from pathlib import Path
    from ipurun.errors import ConfigError
    from ipurun.runs.lock import locked
    print("ready", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.001)
    try:
        with locked(Path(sys.argv[1]), "run"):
            print("held", flush=True)
            sys.stdin.read()
    except ConfigError:
        print("refused")
    """
    folder, start = tmp_path, tmp_path.parent / f"{tmp_path.name}.start"
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder), str(start)]
    pipes: Dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(6)]
    assert [process.stdout.readline() for process in processes if process.stdout] == ["ready\n"] * 6
    start.touch()
    deadline = time.monotonic() + 60
    while sum(process.poll() is None for process in processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    said = sorted(process.communicate()[0] for process in processes)  # ends the one that holds it
    assert said == ["held\n"] + ["refused\n"] * 5
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_lock_a_folder_again_after_it_let_go(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path, "run"), pytest.raises(ConfigError, match="in use"), locked(tmp_path, "run"):
            raise AssertionError


def test_a_folder_that_is_deleted_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with locked(folder, "run"):
        (folder / LOCK_NAME).unlink()
        folder.rmdir()
    assert not folder.exists()


def test_a_signal_to_the_whole_group_does_not_stop_the_renewal(tmp_path: Path) -> None:
    process = _holder(
        tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)", 0.1
    )
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    try:
        os.killpg(process.pid, signal.SIGTERM)
        first = json.loads((tmp_path / LOCK_NAME).read_text())["beat"]
        deadline = time.monotonic() + 60
        while json.loads((tmp_path / LOCK_NAME).read_text())["beat"] <= first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        _end(process)
