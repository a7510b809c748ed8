"""Weights to start from: every kind of file, what is loaded and what is not, and files that do not fit."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any, Dict, Mapping

import pytest
import torch
from run_harness import Folder, built, config, trained
from run_toys import Net
from torch import nn

from ipurun import checkpoint
from ipurun.config.compose import Point
from ipurun.errors import ConfigError
from ipurun.runs.prepare import prepare
from ipurun.training.loop import train
from ipurun.weights import load_initial_weights


def _source() -> Net:
    torch.manual_seed(5)
    return Net()


def _load(model: nn.Module, path: Path, **init: Any) -> Any:
    changes = {f"init__{name}": value for name, value in init.items()}
    return load_initial_weights(config(init_from=str(path), **changes), model)


def _assert_same(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the format from its description: the header's length, the header in JSON, the bytes of the tensors."""
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        flat = value.detach().contiguous().reshape(-1)
        raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
        header[name] = {
            "dtype": kinds[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_state_dictionary_and_one_inside_a_mapping(tmp_path: Path) -> None:
    source = _source()
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    torch.save({"epoch": 3, "model_state_dict": source.state_dict(), "optimizer": {}}, tmp_path / "script.pt")
    for name in ("plain.pt", "script.pt"):
        model = Net()
        found = _load(model, tmp_path / name)
        _assert_same(model, source.state_dict())
        assert len(found.loaded) == 4 and not found.not_loaded and not found.left_over


def test_a_lightning_checkpoint_loses_the_prefix_of_its_module(tmp_path: Path) -> None:
    inner = {f"model.{name}": value for name, value in _source().state_dict().items()}
    content = {"pytorch-lightning_version": "2.1", "global_step": 80, "state_dict": inner, "loops": {"fit": [1, None]}}
    torch.save(content, tmp_path / "a.ckpt")
    model = Net()
    found = _load(model, tmp_path / "a.ckpt")
    _assert_same(model, _source().state_dict())
    assert found.kind == "Lightning checkpoint of step 80, without the prefix `model.`"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: value.to(dtype) for name, value in _source().state_dict().items()}
    _write_safetensors(tmp_path / "a.safetensors", tensors)
    model = Net()
    _load(model, tmp_path / "a.safetensors")
    _assert_same(model, {name: value.float() for name, value in tensors.items()})


def test_a_folder_of_safetensors_is_read_as_one(tmp_path: Path) -> None:
    tensors = _source().state_dict()
    for number, part in enumerate(("first", "second")):
        inside = {name: value for name, value in tensors.items() if name.startswith(part)}
        _write_safetensors(tmp_path / f"model-{number}-of-2.safetensors", inside)
    model = Net()
    assert _load(model, tmp_path).kind == "2 safetensors files"
    _assert_same(model, tensors)


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lambda data: data[:-4], "outside the file"),
        (lambda data: data[:5], "longer than the file"),
        (lambda data: struct.pack("<Q", 1 << 60) + data[8:], "longer than the file"),
        (lambda data: data.replace(b'"shape": [8]', b'"shape": [9]'), "not its shape"),
        (lambda data: data.replace(b'"dtype": "F32"', b'"dtype": "X99"', 1), "X99"),
        (lambda data: data.replace(b"{", b"[", 1), "Error"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, damage: Any, seen: str) -> None:
    file = tmp_path / "a.safetensors"
    _write_safetensors(file, _source().state_dict())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match="is not a safetensors file") as caught:
        _load(Net(), file)
    assert seen in caught.value.problems[0].seen


class _Touches:
    """Writes a file when it is unpickled, as a malicious checkpoint would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_no_code_of_a_torch_file_is_run(tmp_path: Path) -> None:
    torch.save({"state_dict": _source().state_dict(), "hyper": _Touches(tmp_path / "ran")}, tmp_path / "a.ckpt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(_Touches(tmp_path / "ran")))
    for name in ("a.ckpt", "plain.pkl"):
        with pytest.raises(ConfigError) as caught:
            _load(Net(), tmp_path / name)
        assert caught.value.problems[0].key == "init_from"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not torch", {"epoch": 3}, [1, 2]])
def test_other_files_are_refused(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(ConfigError, match=r"not a torch file|no state dictionary|more than tensors"):
        _load(Net(), file)
    with pytest.raises(ConfigError, match="no file or folder"):
        _load(Net(), tmp_path / "b.pt")
    with pytest.raises(ConfigError, match="no run with a checkpoint"):
        _load(Net(), tmp_path)


def test_strict_names_what_is_missing_left_over_and_of_another_shape(tmp_path: Path) -> None:
    state = {**Net(width=6).state_dict(), "head.weight": torch.ones(2)}
    del state["first.bias"]
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ConfigError) as caught:
        _load(Net(), tmp_path / "a.pt")
    text = str(caught.value)
    for part in ("1 weights of the model are not in the file", "first.bias", "head.weight", "first.weight [8, 4]"):
        assert part in text, part
    model = _source()
    found = _load(model, tmp_path / "a.pt", strict=False)
    assert list(found.loaded) == ["second.bias"]
    assert found.not_loaded["first.bias"] == "not in the file" and "[6, 4]" in found.not_loaded["first.weight"]
    assert found.left_over["head.weight"] == "not in the model"
    assert torch.equal(model.second.bias, state["second.bias"])


def test_include_and_exclude_by_pattern(tmp_path: Path) -> None:
    torch.save({**_source().state_dict(), "head.weight": torch.ones(2)}, tmp_path / "a.pt")
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = _load(model, tmp_path / "a.pt", include=["first"])
    assert list(found.loaded) == ["first.weight", "first.bias"]
    assert torch.equal(model.second.weight, before["second.weight"])
    found = _load(model, tmp_path / "a.pt", exclude=["*.bias", "head"])
    assert list(found.loaded) == ["first.weight", "second.weight"]
    with pytest.raises(ConfigError, match="names `heat`"):
        _load(model, tmp_path / "a.pt", exclude=["heat"])


@pytest.mark.parametrize(
    "rename",
    [
        {"net.layers.0": "first", "net.layers.1": "second"},
        {"net": {"layers": {"0": "first", "1": "second"}}},
        {"re:net\\.layers\\.0\\.(.*)": "first.\\1", "*.1": "second"},
    ],
)
def test_a_rename_map(tmp_path: Path, rename: Any) -> None:
    places = {"first": "net.layers.0", "second": "net.layers.1"}
    source = _source().state_dict()
    renamed = {
        name.replace(part, place): value
        for name, value in source.items()
        for part, place in places.items()
        if name.startswith(part)
    }
    torch.save(renamed, tmp_path / "a.pt")
    model = Net()
    found = _load(model, tmp_path / "a.pt", rename=rename)
    _assert_same(model, source)
    assert found.loaded["first.bias"] == "net.layers.0.bias"


def test_wildcards_of_a_rename_map_and_mistakes_in_it(tmp_path: Path) -> None:
    torch.save({f"outer.{name}_x": value for name, value in _source().state_dict().items()}, tmp_path / "a.pt")
    model = Net()
    _load(model, tmp_path / "a.pt", rename={"outer.*.*_x": "*.*"})
    _assert_same(model, _source().state_dict())
    with pytest.raises(ConfigError, match="the file has no such weight"):
        _load(model, tmp_path / "a.pt", rename={"autor": "first"})
    with pytest.raises(ConfigError, match="gives several weights the name"):
        _load(model, tmp_path / "a.pt", rename={"re:.*": "first.weight"})
    torch.save(_source().state_dict(), tmp_path / "b.pt")
    with pytest.raises(ConfigError) as caught:
        _load(model, tmp_path / "b.pt", rename={"first": "other"})
    left = caught.value.problems[1]
    assert "other.weight (in the file first.weight)" in left.seen and "init.exclude=[other]" in left.fix


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


def test_a_tied_weight_may_be_in_the_file_once(tmp_path: Path) -> None:
    source = _Tied()
    state = source.state_dict()
    del state["second.weight"]
    torch.save(state, tmp_path / "a.pt")
    model = _Tied()
    assert not _load(model, tmp_path / "a.pt").not_loaded
    assert torch.equal(model.second.weight, source.first.weight)


def test_a_run_starts_from_another_runs_checkpoint_and_a_resumed_one_does_not(tmp_path: Path) -> None:
    first, _, _ = trained(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "config.yaml").write_text("name: one\n")
    for place in (
        tmp_path / "runs" / "one",
        tmp_path / "runs",
        checkpoint.latest(Folder(tmp_path / "runs" / "one")).path,
    ):
        settings = config(init_from=str(place), seed=3)
        prepared = prepare(Point(settings))
        _assert_same(prepared.inspected.model, first.user_model.state_dict())
        assert "checkpoint of step 16" in prepared.plan.initial_weights.kind
    fresh = prepare(Point(settings), has_checkpoint=True)
    assert fresh.plan.initial_weights is None
    assert not torch.equal(fresh.inspected.model.first.weight, first.user_model.first.weight)


def test_a_rollback_to_the_beginning_returns_to_the_initial_weights(tmp_path: Path) -> None:
    torch.save(_source().state_dict(), tmp_path / "a.pt")
    settings = config(init_from=str(tmp_path / "a.pt"))
    prepared = prepare(Point(settings))
    run = built(settings)
    run.plan = prepared.plan
    run.rebuild()
    _assert_same(run.user_model, _source().state_dict())


def test_training_from_a_file_equals_training_the_model_itself(tmp_path: Path) -> None:
    torch.save(_source().state_dict(), tmp_path / "a.pt")
    changes: Dict[str, Any] = {"devices": 2, "device_iterations": 2, "precision": "16.16"}
    run = built(**changes)
    load_initial_weights(config(init_from=str(tmp_path / "a.pt")), run.user_model)
    other = built(**changes)
    other.user_model.load_state_dict(_source().state_dict())
    for number, made in enumerate((run, other)):
        train(made, Folder(tmp_path / str(number)), [])
    _assert_same(run.user_model, other.user_model.state_dict())
