"""Files written by a compile if options or environment request them."""

import json

import pytest
import torch
from executor_models import Double

import ipurun.emulator as poptorch


def compiled(options=None):
    poptorch.inferenceModel(Double(), options).compile(torch.ones(2))


@pytest.mark.parametrize(
    ("value", "written"), [("folder/net.proto", "folder/net.proto"), ("folder", "folder/model.proto")]
)
def test_the_model_is_exported_to_the_path_in_the_environment(tmp_path, monkeypatch, value, written):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / value))
    compiled()
    assert "Mul" in [op["type"] for op in json.loads((tmp_path / written).read_text())["maingraph"]]


@pytest.mark.parametrize("from_environment", [False, True])
def test_no_profile_is_written_and_this_is_said_once(tmp_path, monkeypatch, capfd, from_environment):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ipurun.emulator._logging._warned", set())
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)
    if from_environment:
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all":"true"}')
    for name in ("first", "second"):
        options = poptorch.Options().modelName(name)
        compiled(options if from_environment else options.enableProfiling(str(tmp_path)))
    assert list(tmp_path.rglob("*")) == []
    assert capfd.readouterr().err.count("no profile.pop is written") == 1


def test_nothing_is_written_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POPTORCH_EXPORT_PROTO_FILE", raising=False)
    compiled()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "word"), [(torch.float16, "half"), (torch.float32, "float")])
def test_the_traced_program_contains_the_type_of_partials(capfd, dtype, word):
    options = poptorch.Options()
    options.Precision.setPartialsType(dtype)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv1d(3, 3, 1))
    poptorch.setLogLevel("TRACE")
    try:
        poptorch.inferenceModel(model, options).compile(torch.ones(1, 3, 2))
    finally:
        poptorch.setLogLevel("WARN")
    log = capfd.readouterr().err
    assert f'"partialsType":"MatMulPartialsType::{word.upper()}"' in log
    assert f'"partialsType[0]":"{word}"' in log
