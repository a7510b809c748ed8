"""A run folder of the first edition, killed at step 8 of 12: what it was, it still is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import ipurun
from ipurun.cli.main import main
from ipurun.recipes.mnist.dataset import splits
from ipurun.runs.folder import RunFolder

STORED = Path(__file__).parent / "first_edition"
# The first edition's own numbers at step 12; other CPUs round differently.
TRAIN_LOSS, EVAL_LOSS, ACCURACY = 2.2832772731781006, 2.3164377212524414, 0.111


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    return Path(shutil.copytree(STORED, "runs/mnist/first"))


def test_it_resumes_to_the_numbers_of_the_first_edition(run: Path) -> None:
    assert RunFolder(run).schema == 1
    result = ipurun.train(resume=run, quiet=True)
    assert (result.folder, result.status, result.step, result.samples) == (run, "done", 12, 80)
    assert result.loss == pytest.approx(TRAIN_LOSS, rel=1e-3)
    assert result.metrics["loss"] == pytest.approx(EVAL_LOSS, rel=1e-3)
    assert result.metrics["accuracy"] == pytest.approx(ACCURACY, abs=5e-3)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["split"] == "train"] == list(range(1, 13))
    # From here on it is a run of this edition.
    assert RunFolder(run).schema == 2
    stored = (run / "config.yaml").read_text()
    assert "ipurun.metrics.Accuracy" in stored and "ipurun.schedules.cosine" in stored
    assert ipurun.load(run).step == 12


def test_resume_auto_finds_it(run: Path) -> None:
    words = ["+recipe=mnist", "devices=2", "model.channels=2", "model.hidden=8", "max_steps=9", "resume=auto"]
    assert ipurun.train(overrides=words, quiet=True).folder == run


def test_it_is_evaluated_and_predicts_as_its_weights_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    loaded = ipurun.load(run)
    assert (loaded.step, loaded.metrics, loaded.model.training) == (8, {}, False)
    images, labels = (torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*splits()["test"]))
    with torch.no_grad():
        outputs = loaded.model(images)

    assert main(["eval", str(run), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert (evaluated["step"], evaluated["split"], evaluated["samples"]) == (8, "test", 1000)
    assert evaluated["metrics"]["loss"] == pytest.approx(float(functional.cross_entropy(outputs, labels)), rel=1e-4)
    right = float((outputs.argmax(1) == labels).float().mean())
    assert evaluated["metrics"]["accuracy"] == pytest.approx(right, abs=5e-3)

    assert main(["predict", str(run), "--out", "outputs.pt", "--quiet"]) == 0
    assert torch.allclose(torch.load("outputs.pt"), outputs, atol=1e-4)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_folder_of_a_newer_version_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps({**environment, "schema": 3}))
    for words in (["eval", str(run)], ["train", f"resume={run}"], ["train", "+recipe=mnist", "resume=auto"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "written by a newer ipurun" in error and "schema 3" in error and "up to schema 2" in error
