"""`ipurun eval` and `ipurun predict`: a run's weights on a split, the last partial batch included."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import numpy
import pytest
import torch
from user_project import enter_project

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.log.predictions import COLUMNS
from ipurun.runs.folder import RunFolder

CODE = """
def points(samples, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=random)
    return torch.utils.data.TensorDataset(x, x.argmax(1) % 3)

def splits(test=10):
    made = {"train": points(24, 1), "eval": points(6, 2)}
    if test:
        made["test"] = points(test, 3)
    return made
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one trained run in it."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        enter_project(folder, patch, "evaluated_code", CODE, "epochs: 2\n")
        assert main(["train", "+recipe=tiny", "hydra.run.dir=run", "checkpoint.keep=0"]) == 0
        yield folder
    sys.modules.pop("evaluated_code", None)


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    capsys.readouterr()


def _expected(split: str, step: int = 12) -> Any:
    """Outputs and targets of plain torch with the checkpoint's weights."""
    import evaluated_code

    state = load(Path(f"run/checkpoints/step-{step:08d}.pt"))
    model = evaluated_code.Net()
    model.load_state_dict(state["model"])
    x, y = evaluated_code.splits()[split].tensors
    with torch.no_grad():
        return model(x), y


def _json(capsys: Any, *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("extra", [[], ["device_iterations=2"], ["devices=2"]])
def test_eval_takes_the_test_split_to_its_last_sample(capsys: Any, extra: list) -> None:
    result = _json(capsys, "eval", "run", *extra)
    outputs, targets = _expected("test")
    assert (result["split"], result["samples"], result["step"]) == ("test", 10, 12)
    assert result["metrics"]["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert result["metrics"]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)))


@pytest.mark.parametrize(
    ("words", "split", "samples"),
    [(["--split", "train"], "train", 24), (["eval.split=eval"], "eval", 6), (["+data.test=0"], "eval", 6)],
)
def test_another_split_can_be_asked_for(capsys: Any, words: list, split: str, samples: int) -> None:
    result = _json(capsys, "eval", "run", *words)
    assert (result["split"], result["samples"]) == (split, samples)


def test_an_older_checkpoint_can_be_asked_for(capsys: Any) -> None:
    result = _json(capsys, "eval", "run", "--checkpoint", "step-00000006.pt")
    outputs, targets = _expected("test", step=6)
    assert result["step"] == 6
    assert result["metrics"]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)))


def test_eval_for_people_ends_with_the_result(capsys: Any) -> None:
    assert main(["eval", "run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("step 12 on test: loss ") and "accuracy" in last and "[10 samples" in last


def test_eval_changes_nothing_in_the_run(capsys: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    assert main(["eval", "run", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


def test_predictions_have_a_row_for_each_sample(capsys: Any, tmp_path: Path) -> None:
    result = _json(capsys, "predict", "run")
    outputs, _ = _expected("test")
    assert result["file"] == "run/predictions_test.pt" and result["outputs"] == "10 x 3 float32"
    torch.testing.assert_close(torch.load(result["file"]), outputs)


def test_predictions_as_one_array(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "outputs.npy"
    assert main(["predict", "run", "--split", "train", "--out", str(file)]) == 0
    outputs, _ = _expected("train")
    numpy.testing.assert_allclose(numpy.load(file), outputs.numpy(), rtol=1e-5, atol=1e-6)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == f"step 12 on train: 24 x 3 float32 in {file}"
    assert "predicting 24/24 samples" in shown


def _rows(file: Path) -> Dict[str, Any]:
    """Read a table by its standard reader: column -> array."""
    if file.suffix == ".csv":
        with file.open(newline="") as stream:
            header, *rows = list(csv.reader(stream))
        numbers = {name: numpy.array([float(row[place]) for row in rows]) for place, name in enumerate(header)}
        grouped = {name: [label for label in header if label.rpartition("_")[0] == name] for name in COLUMNS}
        return {
            name: numpy.stack([numbers[label] for label in labels], 1) if labels else numbers[name]
            for name, labels in grouped.items()
            if labels or name in header
        }
    if file.suffix == ".jsonl":
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return {name: numpy.array([record[name] for record in records]) for name in records[0]}
    read = numpy.load(file, allow_pickle=False)
    return {name: read[name] for name in (read.files if file.suffix == ".npz" else read.dtype.names)}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "npz", "npy"])
@pytest.mark.parametrize("extra", [["device_iterations=2", "devices=2"], []])
def test_tables_have_index_input_target_and_output(tmp_path: Path, suffix: str, extra: list) -> None:
    import evaluated_code

    file = tmp_path / f"table.{suffix}"
    assert main(["predict", "run", *extra, "--quiet", "--out", str(file), "--columns", ",".join(COLUMNS)]) == 0
    outputs, targets = _expected("test")
    read = _rows(file)
    assert list(read) == list(COLUMNS)
    assert read["index"].tolist() == list(range(10)) and read["target"].tolist() == targets.tolist()
    numpy.testing.assert_allclose(read["input"], evaluated_code.splits()["test"].tensors[0].numpy(), rtol=1e-6)
    numpy.testing.assert_allclose(read["output"], outputs.numpy(), rtol=1e-5, atol=1e-6)


def test_a_csv_has_a_header_and_no_inputs_unless_asked_for(tmp_path: Path) -> None:
    assert main(["predict", "run", "--quiet", "--out", str(tmp_path / "x.csv")]) == 0
    assert (tmp_path / "x.csv").read_text().splitlines()[0] == "index,target,output_0,output_1,output_2"


def test_a_column_that_does_not_exist_is_found_first(capsys: Any) -> None:
    assert main(["predict", "run", "--out", "x.csv", "--columns", "index,label"]) == 2
    assert "index, input, target, output" in capsys.readouterr().err


def test_parquet_names_its_extra(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["predict", "run", "--out", "x.parquet"]) == 2
    assert "pip install 'ipurun[parquet]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "predict"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs the folder of a run"),
        (["nowhere"], "is not a run folder"),
        (["conf"], "is not a run folder"),
        (["run", "--split", "holdout"], "holdout"),
        (["run", "--checkpoint", "step-00000007.pt"], "has no checkpoint step-00000007.pt"),
        (["run", "device=2"], "unknown key `device`"),
        (["run", "+recipe=tiny"], "no recipe and no sweep"),
    ],
)
def test_bad_input_is_a_config_error(capsys: Any, command: str, words: list, message: str) -> None:
    assert main([command, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"), [("x.xlsx", ".pt, .npy, .csv, .jsonl, .parquet, .npz"), ("no/where/x.pt", "cannot be written")]
)
def test_an_output_that_cannot_be_written_is_found_first(capsys: Any, file: str, message: str) -> None:
    assert main(["predict", "run", "--out", file]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_a_config_error(capsys: Any, tmp_path: Path) -> None:
    shutil.copytree("run", str(tmp_path / "damaged"))
    checkpoint = latest(RunFolder(tmp_path / "damaged"))
    assert checkpoint is not None
    content = bytearray(checkpoint.path.read_bytes())
    content[len(content) // 2] ^= 255
    checkpoint.path.write_bytes(bytes(content))
    assert main(["eval", str(tmp_path / "damaged")]) == 1
    assert "checksum" in capsys.readouterr().err


def test_a_checkpoint_that_was_cut_off_is_named(capsys: Any, tmp_path: Path) -> None:
    shutil.copytree("run", str(tmp_path / "cut"))
    names = sorted(file.name for file in (tmp_path / "cut/checkpoints").glob("*.pt"))
    for name in names:
        (tmp_path / "cut/checkpoints" / name).write_bytes(b"cut")
    assert main(["eval", str(tmp_path / "cut")]) == 2
    message = capsys.readouterr().err
    assert "has no checkpoint" in message
    assert all(name in message for name in names)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_predictions_on_a_full_disk(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "out.pt.partial").symlink_to("/dev/full")
    assert main(["predict", "run", "--out", str(tmp_path / "out.pt")]) == 1
    message = capsys.readouterr().err
    assert "the predictions could not be written" in message
    assert "No space left" in message
    assert list(tmp_path.iterdir()) == []
