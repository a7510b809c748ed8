"""`ipurun cache`, `ipurun compile`, and what a run says of the executable cache."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List

import pytest

import ipurun
from ipurun import emulator, executables
from ipurun.cli.main import main

WORDS = ["+recipe=mnist", "engine=cpu", "max_steps=1", "eval.max_samples=10", "cache.min_seconds=0"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("POPTORCH_CACHE_DIR", raising=False)


def _said(capsys: Any, *argv: str, code: int = 0) -> str:
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    return str(captured.err if code in (1, 2) and not captured.out else captured.out)


def _json(capsys: Any, *argv: str, code: int = 0) -> Any:
    return json.loads(_said(capsys, *argv, "--json", code=code))


def _states(capsys: Any, *words: str) -> List[str]:
    cache = _json(capsys, "train", *WORDS, *words)["cache"]
    return [cache[mode]["state"] for mode in ("training", "inference")]


def test_a_run_says_whether_it_hit_and_what_that_saved(capsys: Any) -> None:
    first, second = (_said(capsys, "train", *WORDS) for _ in range(2))
    assert re.search(r"compiled for training in .*; executable cache: miss for training\n", first)
    assert re.search(r"loaded for training in .*; executable cache: hit for training", second)
    assert re.search(r"loaded for inference in .*; executable cache: hit for inference", second)
    (log,) = sorted(Path("runs/mnist").glob("*/log.txt"))[1:]
    assert "executable cache: hit for training" in log.read_text()
    assert "cache" not in _said(capsys, "train", *WORDS, "cache.min_seconds=99").partition("compiled for")[2][:200]


def test_sweeps_compile_as_often_as_they_must(capsys: Any) -> None:
    """One executable serves all learning rates and seeds; each number of device iterations needs another."""
    assert _states(capsys) == ["miss", "miss"]
    for words in (["optimizer.lr=0.5", "schedule=cosine"], ["seed=7", "runs_dir=elsewhere"]):
        assert _states(capsys, *words) == ["hit", "hit"], words
    for words in (["device_iterations=2"], ["precision=16.16"]):
        assert _states(capsys, *words)[0] == "miss", words
        assert _states(capsys, *words)[0] == "hit", words


def test_entries_are_listed_shown_verified_and_removed(capsys: Any) -> None:
    assert _said(capsys, "cache", "ls").startswith("no executables in ")
    _said(capsys, "compile", *WORDS)
    training, inference = sorted(_json(capsys, "cache", "ls"), key=lambda entry: entry["mode"])[::-1]
    assert (training["mode"], inference["mode"], training["run"]) == ("training", "inference", "mnist")
    assert training["versions"]["ipurun"] == ipurun.__version__ and training["config"]["micro_batch_size"] == 10
    listed = _said(capsys, "cache", "ls")
    assert training["key"] in listed and "2 executables" in listed
    shown = _said(capsys, "cache", "show", training["key"][:20])
    assert "micro_batch_size=10" in shown and "checksum   right" in shown
    assert "no executable has a key" in _said(capsys, "cache", "show", "../..", code=2)
    assert "2 executables checked, 0 damaged" in _said(capsys, "cache", "verify")
    with open(training["file"], "r+b") as file:
        file.seek(500)
        file.write(b"?")
    said = _said(capsys, "cache", "verify", code=1)
    assert f"{training['file']}: its checksum is wrong" in said and "2 executables checked, 1 damaged" in said
    assert os.path.exists(f"{training['file']}.broken")
    assert not Path(training["file"]).with_suffix(".json").exists()
    assert [entry["key"] for entry in _json(capsys, "cache", "ls")] == [inference["key"]]
    assert "removed 1 executable" in _said(capsys, "cache", "clear")
    assert _json(capsys, "cache", "ls") == [] and not os.path.exists(f"{training['file']}.broken")


def test_why_names_the_keys_that_differ_from_the_nearest_entry(capsys: Any) -> None:
    assert "nothing was compiled under this name" in _said(capsys, "cache", "why", *WORDS)
    _said(capsys, "compile", *WORDS)
    _said(capsys, "compile", *WORDS, "device_iterations=4", "precision=16.16")
    assert [each["state"] for each in _json(capsys, "cache", "why", *WORDS)["executables"]] == ["hit", "hit"]
    before = sorted(Path("cache").rglob("*"))
    (training, _) = _json(capsys, "cache", "why", *WORDS, "device_iterations=8")["executables"]
    assert training["state"] == "miss"
    assert training["differences"] == [{"key": "device_iterations", "here": 8, "there": 1}]
    assert "device_iterations: 8 here, 1 there" in _said(capsys, "cache", "why", *WORDS, "device_iterations=8")
    assert sorted(Path("cache").rglob("*")) == before  # nothing is compiled or written


def _age(key_order: List[str], folder: Path) -> None:
    """Give entries distinct times of their last use, the first one the oldest."""
    for number, key in enumerate(key_order):
        about = next(folder.rglob(f"{key}.json"))
        content = json.loads(about.read_text())
        when = time.time() - 86400 * (10 - number)
        about.write_text(json.dumps({**content, "last_use": when}))
        os.utime(about.with_suffix(".graph"), (when, when))


def test_the_least_recently_used_are_removed_first(capsys: Any, tmp_path: Path) -> None:
    for size in (1, 2, 3):
        _said(capsys, "compile", *WORDS, f"micro_batch_size={size}", f"inference.micro_batch_size={size}")
    entries = _json(capsys, "cache", "ls")
    assert len(entries) == 6
    order = [entry["key"] for entry in entries]
    _age(order, tmp_path / "cache")
    sizes = {entry["key"]: entry["bytes"] for entry in entries}
    removed = _json(capsys, "cache", "prune", "--older-than", "9.5d")
    assert [entry["key"] for entry in removed] == order[:1]
    keep = sum(sizes[key] for key in order[3:])
    removed = _json(capsys, "cache", "prune", "--max-size", str(keep))
    assert [entry["key"] for entry in removed] == order[1:3]
    assert _json(capsys, "cache", "prune", "--stale") == []
    # A run keeps the cache below its limit by itself.
    _said(capsys, "compile", *WORDS, "cache.max_size=12KB")
    left = _json(capsys, "cache", "ls")
    assert {entry["mode"] for entry in left if entry["key"] not in order} == {"training", "inference"}
    assert order[3] not in [entry["key"] for entry in left] and sum(entry["bytes"] for entry in left) <= 12_000


def test_a_damaged_record_is_found_removed_and_written_again(capsys: Any, tmp_path: Path) -> None:
    _said(capsys, "compile", *WORDS)
    about = sorted((tmp_path / "cache").rglob("*.json"))[0]
    about.write_text(about.read_text().replace('"hits": 0', '"hits": 9'))
    assert "2 executables checked, 1 damaged" in _said(capsys, "cache", "verify", code=1)
    assert not about.exists()
    assert _states(capsys) == ["hit", "hit"]
    assert json.loads(about.read_text())["config"] and "0 damaged" in _said(capsys, "cache", "verify")


def test_prune_removes_what_was_set_aside_long_ago(capsys: Any, tmp_path: Path) -> None:
    _said(capsys, "compile", *WORDS)
    entry = sorted((tmp_path / "cache").rglob("*.graph"))[0]
    old, new = entry.with_name("old.graph.broken"), entry.with_name("new.graph.7.partial")
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (0, 0))
    _said(capsys, "cache", "prune", "--max-size", "1GB")
    assert (old.exists(), new.exists(), entry.exists()) == (False, True, True)


def test_executables_of_other_versions_are_stale(capsys: Any, tmp_path: Path) -> None:
    _said(capsys, "compile", *WORDS)
    about = next((tmp_path / "cache").rglob("*.json"))
    content = json.loads(about.read_text())
    del content["checksum"]
    executables._write_about(about, {**content, "versions": {**content["versions"], "torch": "1.0"}})
    placeholder = tmp_path / "cache" / "executables" / "mnist" / "0123.popef"  # of earlier versions
    placeholder.write_text('{"operations": ["addmm"], "inputs": 3}')
    (why,) = [each for each in _json(capsys, "cache", "why", *WORDS)["executables"] if each["versions"]]
    assert why["versions"][0]["there"] == "1.0"
    stale = [entry["key"] for entry in _json(capsys, "cache", "prune", "--stale")]
    assert sorted(stale) == ["0123", about.stem] and not placeholder.exists()


def test_unknown_files_and_odd_names_do_no_harm(capsys: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "executables" / "odd"
    (folder / "cpu").mkdir(parents=True)
    (folder / "cpu" / "\x1b[31m;rm -rf.graph").write_bytes(b"x")
    (folder / "cpu" / "notes.txt").write_text("mine")
    (folder / "mine.txt").write_text("mine")
    (folder / "cpu" / "link.graph").symlink_to("/etc/hostname")
    (folder / "cpu" / "folder.graph").mkdir()
    (folder / "a.popef").write_bytes(b"popef")
    listed = _said(capsys, "cache", "ls")
    assert "\x1b" not in listed and "2 executables" in listed
    assert "1 damaged" in _said(capsys, "cache", "verify", code=1)
    _said(capsys, "cache", "clear")
    assert sorted(path.name for path in folder.rglob("*")) == [
        "cpu", "folder.graph", "link.graph", "mine.txt", "notes.txt"
    ]  # fmt: skip


def test_folders_that_the_user_names_are_honoured(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _said(capsys, "compile", *WORDS, f"cache.dir={tmp_path}/named")
    assert _json(capsys, "cache", "ls") == []
    assert len(_json(capsys, "cache", "ls", "--dir", "named")) == 2
    monkeypatch.delenv("IPURUN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path / "named"))
    assert _states(capsys) == ["hit", "hit"]
    assert len(_json(capsys, "cache", "ls")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "`cache` has no action `list`"),
        (["ls", "x"], "`cache ls` takes no `x`"),
        (["prune"], "`cache prune` needs to know what to remove"),
        (["prune", "--older-than", "long"], "`--older-than` is not an age"),
        (["prune", "--max-size", "big"], "`--max-size` is not a size"),
        (["ls", "--dir", "nowhere"], "`--dir` is not a folder"),
        (["why", "+recipe=mnist", "cache.max_size=huge"], "`cache.max_size` is not a size"),
    ],
)
def test_bad_words_are_refused(capsys: Any, words: List[str], said: str) -> None:
    assert said in _said(capsys, "cache", *words, code=2)


LOADER = """
import poptorch, torch
training = poptorch.load("m.poptorch")
x, y = torch.randn(10, 1, 28, 28), torch.randint(0, 10, (10,))
before = training.state_dict()["model.0.weight"].clone() if "model.0.weight" in training.state_dict() else None
losses = [float(training(x, y)) for _ in range(20)]
assert losses[-1] < losses[0], losses
output, loss = poptorch.load("m.inference.poptorch")(x, y)
print(tuple(output.shape))
"""


def test_an_export_is_used_by_a_run_and_by_a_plain_program(capsys: Any, tmp_path: Path) -> None:
    said = _said(capsys, "compile", "+recipe=mnist", "engine=cpu", "--export", "m.poptorch")
    assert "exported m.poptorch and m.inference.poptorch" in said and "loading them runs code" in said
    plain = _json(capsys, "train", *WORDS)
    loaded = _json(capsys, "train", *WORDS, "precompiled=m.poptorch")
    assert loaded["cache"]["training"] == {"state": "precompiled", "why": "m.poptorch"}
    assert loaded["cache"]["inference"] == {"state": "precompiled", "why": "m.inference.poptorch"}
    assert (loaded["loss"], loaded["metrics"]) == (plain["loss"], plain["metrics"])
    Path("plain.py").write_text(LOADER)
    root = os.path.dirname(os.path.dirname(os.path.abspath(ipurun.__file__)))
    environment = {**os.environ, "PYTHONPATH": f"{root}/ipurun/emulator/shim:{root}"}
    done = subprocess.run([sys.executable, "plain.py"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "(10, 10)\n"), done.stderr


def test_an_export_of_other_keys_or_versions_is_refused(capsys: Any) -> None:
    assert "does not exist" in _said(capsys, "train", *WORDS, "precompiled=m.poptorch", code=2)
    _said(capsys, "compile", "+recipe=mnist", "engine=cpu", "--export", "m.poptorch")
    said = _said(capsys, "train", *WORDS, "precompiled=m.poptorch", "micro_batch_size=5", code=2)
    assert "compiled with other keys" in said and "micro_batch_size: 5 here, 10 there" in said
    about = Path("m.poptorch.json")
    about.write_text(about.read_text().replace("emulator of PopTorch 3.4.0", "PopTorch 3.3.0"))
    said = " ".join(_said(capsys, "train", *WORDS, "precompiled=m.poptorch", code=2).split())
    assert "another version" in said and "3.3.0" in said and "this is emulator of PopTorch 3.4.0" in said


def _without_checksum(content: bytes) -> bytes:
    """Return an export as earlier versions wrote it."""
    first, _, rest = content.partition(b"\n")
    return first.split()[0] + b"\n" + rest


@pytest.mark.parametrize(
    ("damage", "code", "seen"),
    [
        (lambda content: content[:-200], 2, "it was cut off or changed after it was written"),
        (lambda content: content[:9000] + bytes([content[9000] ^ 8]) + content[9001:], 2, "cut off or changed"),
        (lambda content: b"", 2, "is not a valid PopTorch file"),
        (lambda content: content.replace(b"3.4.0-emulated", b"3.3.0-emulated"), 2, "cut off or changed"),
        (
            lambda content: content.replace(b"3.4.0-emulated", b"3.3.0-emulated", 1),
            2,
            "exported by PopTorch version 3.3.0",
        ),
        (lambda content: _without_checksum(content)[:-200], 1, "cannot be read"),
        (
            lambda content: _without_checksum(content).replace(b"3.4.0-emulated", b"3.3.0-emulated"),
            1,
            "exported by PopTorch version 3.3.0-emulated, this is 3.4.0-emulated",
        ),
    ],
    ids=["truncated", "flipped", "empty", "changed", "version", "truncated, older", "version, older"],
)
def test_an_export_that_cannot_be_loaded_says_why_and_what_to_do(
    capsys: Any, damage: Any, code: int, seen: str
) -> None:
    _said(capsys, "compile", "+recipe=mnist", "engine=cpu", "--export", "m.poptorch")
    Path("m.poptorch.json").unlink()
    file = Path("m.poptorch")
    file.write_bytes(damage(file.read_bytes()))
    assert main(["train", *WORDS, "precompiled=m.poptorch"]) == code
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("error:") == 1 and "`precompiled` cannot be loaded" in said and seen in said
    assert "try ipurun compile with the same words and --export m.poptorch" in said
    assert "planner" not in said


def test_an_offline_target_leads_to_compile(capsys: Any) -> None:
    said = _said(capsys, "train", *WORDS, "options.useOfflineIpuTarget=2", code=2)
    assert "ipurun compile with the same words" in " ".join(said.split())
    assert "`--ipu-version` cannot be `3`" in _said(capsys, "compile", *WORDS, "--ipu-version", "3", code=2)
    assert "would leave nothing" in _said(capsys, "compile", *WORDS, "cache.enabled=false", code=2)


def test_errors_of_poplar_come_with_what_the_planner_advises(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedies are those that `plan` shows for the same config."""
    words = [*WORDS, "machine.tiles=4", "machine.tile_imbalance_bytes=1000", "machine.code_bytes_per_tile=1000"]
    words += ["micro_batch_size=100"]
    remedies = _json(capsys, "plan", *words, code=3)["estimate"]["remedies"]

    def out_of_memory(executor: Any, *args: Any, **kwargs: Any) -> None:
        raise emulator.Error("poplar_memory_allocation_error: out of memory: tiles only have 638976 bytes")

    monkeypatch.setattr(emulator._poplar_executor.PoplarExecutor, "compile", out_of_memory)
    for command in ("compile", "train"):
        assert main([command, *words]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "PopTorch failed while compiling the model for training" in said and "tiles only have 638976" in said
        assert remedies and remedies[0]["title"] in said
        assert all(word in said for word in remedies[0]["overrides"])
