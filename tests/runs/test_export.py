"""`ipurun export`: weights as safetensors, read back here by the rules of the format and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import numpy
import pytest
import torch
from torch import nn
from user_project import enter_project

import ipurun
from ipurun.cli.main import main
from ipurun.errors import ConfigError
from ipurun.recipes.bert.model import BertForPretraining
from ipurun.recipes.gpt.model import GPT
from ipurun.runs.export import write_safetensors

CODE = """
def points(seed):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x.argmax(1) % 3)

def splits():
    return points(1), points(2)
"""
_KINDS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "BOOL": "?"}


def _read(path: Path) -> Tuple[Dict[str, Any], Dict[str, torch.Tensor]]:
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    metadata = header.pop("__metadata__")
    ends = sorted(entry["data_offsets"] for entry in header.values())
    # No gaps and no overlaps: readers refuse such files.
    assert [first for first, _ in ends] == [0, *(last for _, last in ends[:-1])] and begin + ends[-1][1] == len(content)
    assert begin % 8 == 0
    read = {}
    for name, entry in header.items():
        piece = content[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        array = numpy.frombuffer(piece, _KINDS[entry["dtype"]]).reshape(entry["shape"])
        read[name] = torch.from_numpy(array.copy())
    return metadata, read


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        enter_project(folder, patch, "exported_code", CODE, "epochs: 2\n")
        assert main(["train", "+recipe=tiny", "hydra.run.dir=run", "checkpoint.keep=0", "--quiet"]) == 0
        yield folder
    sys.modules.pop("exported_code", None)


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])


@pytest.mark.parametrize(("flags", "step"), [([], 12), (["--checkpoint", "step-00000006.pt"], 6)])
def test_weights_load_into_a_plain_model(capsys: Any, tmp_path: Path, flags: list, step: int) -> None:
    import exported_code

    file = tmp_path / "weights.safetensors"
    assert main(["export", "run", "--out", str(file), "--json", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    metadata, weights = _read(file)
    assert (shown["step"], shown["files"], shown["size"]) == (step, [str(file)], file.stat().st_size)
    assert metadata["format"] == "pt" and metadata["step"] == str(step)
    model = exported_code.Net()
    model.load_state_dict(weights)  # strict
    expected = torch.load(f"run/checkpoints/step-{step:08d}.pt")["model"]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_the_default_is_a_file_in_the_run_folder(capsys: Any) -> None:
    assert main(["export", "run", "--half"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("in run/model.safetensors")
    halves, whole = _read(Path("run/model.safetensors"))[1], ipurun.load("run").model.state_dict()
    assert all(torch.equal(value, whole[name].half()) for name, value in halves.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs the folder of a run"),
        (["nowhere"], "is not a run folder"),
        (["run", "--out", "weights.onnx"], "weights cannot be exported as `.onnx`"),
        (["run", "--out", "no/where/x.safetensors"], "cannot be written"),
        (["run", "--out", "folder"], "Net is not a model that transformers has"),
        (["run", "--checkpoint", "step-00000007.pt"], "has no checkpoint step-00000007.pt"),
    ],
)
def test_nonsense_is_refused_and_leaves_nothing(capsys: Any, words: list, message: str) -> None:
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("folder").exists()


def test_weights_too_large_for_half_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipurun.runs.reload.load_weights", _load_large)
    with pytest.raises(ipurun.RunError, match="too large for float16"):
        ipurun.export("run", tmp_path / "x.safetensors", half=True, quiet=True)
    assert not list(tmp_path.iterdir())


def _load_large(model: nn.Module, checkpoint: Any, *rest: Any) -> Any:
    from ipurun.training.state import load_weights

    progress = load_weights(model, checkpoint)
    with torch.no_grad():
        next(model.parameters()).mul_(1e9)
    return progress


def test_every_kind_of_tensor_is_written_as_it_is(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "turned": shared.t(),
        "shared": shared,
        "again": shared,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    _, read = _read(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with pytest.raises(ConfigError, match="no such type"):
        write_safetensors(tmp_path / "y.safetensors", {"c": torch.zeros(1, dtype=torch.complex64)}, {})


def test_names_for_transformers_are_complete() -> None:
    gpt = GPT(vocab_size=11, max_positions=8, hidden_size=16, num_layers=1, num_heads=4)
    config, weights = gpt.to_transformers()
    assert config["model_type"] == "gpt2" and len(weights) == len(gpt.state_dict())
    assert torch.equal(weights["transformer.h.0.mlp.c_fc.weight"], gpt.h[0].mlp.c_fc.weight.t())
    bert = BertForPretraining(20, 16, 8, 2, hidden_size=8, num_layers=1, num_heads=2)
    config, weights = bert.to_transformers()
    assert config["model_type"] == "bert" and len(weights) == len(bert.state_dict()) + 1
    assert "bert.encoder.layer.0.attention.output.LayerNorm.weight" in weights
