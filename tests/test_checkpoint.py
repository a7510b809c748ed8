"""Checkpoints survive kills, full disks and damaged files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ipurun.checkpoint import best, broken, latest, listed, load, newest_good, save
from ipurun.errors import RunError


def _state(value: float) -> dict:
    return {"model": {"weight": torch.full((3, 2), value)}, "step": int(value), "random": (3, (1, 2), None)}


def test_saved_state_is_loaded_unchanged(tmp_path: Path) -> None:
    save(tmp_path, 7, _state(7), info={"epoch": 2})
    found = latest(tmp_path)
    assert found is not None and found.step == 7 and found.info["epoch"] == 2
    state = load(found)
    assert torch.equal(state["model"]["weight"], torch.full((3, 2), 7.0))
    assert state["random"] == (3, (1, 2), None)


def test_the_newest_is_found_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (99, 7037, 123456789):
        save(tmp_path, step, _state(1))
    assert [c.step for c in listed(tmp_path)] == [99, 7037, 123456789]
    assert latest(tmp_path).step == 123456789


def test_no_checkpoint_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, _state(step), keep=2, is_best=step == 2)
    assert [c.step for c in listed(tmp_path)] == [2, 4, 5]
    assert best(tmp_path).step == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"step-{step:08d}.{kind}" for step in (2, 4, 5) for kind in ("json", "pt")
    )


def test_keep_zero_keeps_all(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, _state(step), keep=0)
    assert len(listed(tmp_path)) == 4


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1))
    save(tmp_path, 1, _state(5))
    assert load(latest(tmp_path))["step"] == 5


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1))
    save(tmp_path, 2, _state(2))
    path = latest(tmp_path).path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(RunError) as caught:
        load(latest(tmp_path))
    assert len(caught.value.problems) == 1
    text = str(caught.value)
    assert "step-00000002.pt" in text and "checksum" in text and "step-00000001.pt" in text


def test_a_truncated_file_is_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1))
    newest = save(tmp_path, 2, _state(2))
    newest.path.write_bytes(newest.path.read_bytes()[:100])
    assert latest(tmp_path).step == 1
    with pytest.raises(RunError, match="step-00000002"):
        load(newest)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    save(tmp_path, 1, {"model": {}, "trap": _Trap(str(sprung))})
    with pytest.raises(RunError, match="cannot be used"):
        load(latest(tmp_path))
    assert not sprung.exists()


class _Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (self.path,))


def test_an_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError) as caught:
        save(tmp_path / "file" / "checkpoints", 3, _state(1))
    assert "step 3 could not be saved" in str(caught.value)
    assert len(caught.value.problems) == 1


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).resolve().parents[1])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="file size limits are POSIX")
def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A limit on the file size makes the kernel refuse a write in the middle, as a full disk does."""
    done = _run(
        """
        import resource, sys
        from pathlib import Path
        import torch
        from ipurun.checkpoint import save
        from ipurun.errors import RunError
        place = Path(sys.argv[1])
        save(place, 1, {"model": torch.ones(10)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            save(place, 2, {"model": torch.ones(100_000)})
        except RunError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "step 2 could not be saved; earlier ones are intact" in done.stdout
    assert f"then ipurun train resume={tmp_path.parent}" in " ".join(done.stdout.split())
    assert [c.step for c in listed(tmp_path)] == [1]
    assert torch.equal(load(latest(tmp_path))["model"], torch.ones(10))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("moment", ["during the tensors", "before the description", "before the rename"])
def test_a_kill_during_a_save_keeps_the_earlier_checkpoint(tmp_path: Path, moment: str) -> None:
    done = _run(
        """
        import os, signal, sys
        from pathlib import Path
        import torch
        from ipurun import checkpoint as store
        from ipurun.checkpoint import save
        place, moment = Path(sys.argv[1]), sys.argv[2]
        save(place, 1, {"model": torch.ones(10)})

        def die(*args, **named):
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "during the tensors":
            write = store._HashingWriter.write
            def write_some(self, data):
                if self.written > 20_000:
                    die()
                return write(self, data)
            store._HashingWriter.write = write_some
        elif moment == "before the description":
            store.json.dumps = die
        else:
            os.replace = die
        save(place, 2, {f"w{i}": torch.ones(5_000) for i in range(20)})
        """,
        str(tmp_path),
        moment,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [c.step for c in listed(tmp_path)] == [1]
    assert torch.equal(load(latest(tmp_path))["model"], torch.ones(10))
    save(tmp_path, 2, _state(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001.json",
        "step-00000001.pt",
        "step-00000002.json",
        "step-00000002.pt",
    ]


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_while_a_step_is_saved_again_leaves_one_of_the_two(tmp_path: Path, renames: int) -> None:
    """Kills before the first, second and third rename of the second save, and after the last one."""
    save(tmp_path, 1, _state(1))
    save(tmp_path, 2, _state(2), is_best=True)
    done = _run(
        """
        import os, signal, sys
        from pathlib import Path
        import torch
        from ipurun.checkpoint import save
        place, left = Path(sys.argv[1]), int(sys.argv[2])
        rename = os.replace
        def count(*names):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*names)
        os.replace = count
        save(place, 2, {"model": {"weight": torch.full((300, 2), 5.0)}, "step": 5}, is_best=True)
        """,
        str(tmp_path),
        str(renames),
    )
    assert done.returncode == (-signal.SIGKILL if renames < 3 else 0), done.stderr
    assert [c.step for c in listed(tmp_path)] == [1, 2]
    assert load(latest(tmp_path))["step"] == (2 if renames < 2 else 5)
    found, skipped = newest_good(tmp_path)
    assert found.step == 2 and skipped == {}
    save(tmp_path, 2, _state(6))
    assert load(latest(tmp_path))["step"] == 6 and len(list(tmp_path.iterdir())) == 4


def test_the_newest_good_one_is_used_and_newer_broken_ones_are_named(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, _state(step))
    names = [f"step-{step:08d}" for step in range(6)]
    (tmp_path / f"{names[1]}.pt").write_bytes(b"old and broken, which does not matter")
    content = bytearray((tmp_path / f"{names[3]}.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / f"{names[3]}.pt").write_bytes(bytes(content))
    (tmp_path / f"{names[4]}.pt").write_bytes(b"short")
    (tmp_path / f"{names[5]}.json").unlink()
    found, skipped = newest_good(tmp_path)
    assert found.step == 2 and load(found)["step"] == 2
    assert list(skipped) == [f"{names[5]}.pt", f"{names[4]}.pt", f"{names[3]}.pt"]
    assert "no readable step-00000005.json" in skipped[f"{names[5]}.pt"]
    assert "5 of" in skipped[f"{names[4]}.pt"] and "checksum" in skipped[f"{names[3]}.pt"]
    assert list(broken(tmp_path)) == [f"{names[5]}.pt", f"{names[4]}.pt", f"{names[1]}.pt"]


def test_a_deleted_run_folder_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        save(tmp_path / "deleted" / "checkpoints", 3, _state(1))
    assert "the folder of the run was deleted" in str(caught.value)
    assert not (tmp_path / "deleted").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("elements", [2, 200_000])
def test_a_full_disk_is_reported_as_such(tmp_path: Path, elements: int) -> None:
    """torch replaces a failed write by an error about positions in its file."""
    (tmp_path / "step-00000001.pt.partial").symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipurun.checkpoint._remove_partial", lambda place: None)  # it would clear the device away
        with pytest.raises(RunError) as caught:
            save(tmp_path, 1, {"weight": torch.zeros(elements)})
    (problem,) = caught.value.problems
    assert "No space left" in problem.seen
    assert "free some space" in problem.fix
