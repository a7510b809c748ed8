import json
import sys
from pathlib import Path

import pytest

from ipurun.cli.main import main
from ipurun.config.importers.optimum import import_config
from ipurun.errors import ConfigError

BERT = {
    "replication_factor": 4,
    "gradient_accumulation_steps": 512,
    "layers_per_ipu": [0, 7, 7, 10],
    "ipus_per_replica": 4,
    "optimizer_state_offchip": True,
    "replicated_tensor_sharding": True,
    "matmul_proportion": [0.1, 0.15, 0.15, 0.15],
    "enable_half_partials": True,
    "embedding_serialization_factor": 2,
    "projection_serialization_factor": 1,
    "recompute_checkpoint_every_layer": True,
    "device_iterations": 2,
    "inference_device_iterations": 4,
    "inference_replication_factor": 2,
    "output_mode": "final",
    "seed": 42,
    "auto_loss_scaling": True,
    "executable_cache_dir": "./exe_cache",
    "explicit_ir_inference": True,
    "optimum_version": "1.6.1",
}

TRAINER = {  # what Optimum's trainer does, whatever the file says
    "defaults": ["override /optimizer: adamw"],
    "optimizer": {
        "accum_type": "float16",
        "bias_correction": False,
        "first_order_momentum_accum_type": "float16",
    },
    "precision": "16.16",
    "stochastic_rounding": True,
}


def imported(values, layers=None):
    return import_config(json.dumps(values), layers)


def test_every_key_is_mapped_or_noted():
    result = imported(BERT, "bert.encoder.layer")
    assert result.keys == {
        "replication": {"factor": 4, "tensor_sharding": True},
        "gradient_accumulation": 512,
        "memory": {
            "optimizer_state": {"on_chip": False},
            "available_proportion": {"IPU0": 0.1, "IPU1": 0.15, "IPU2": 0.15, "IPU3": 0.15},
            "serialize": {"input_embeddings": 2},
        },
        "partials": "half",
        "device_iterations": 2,
        "inference": {
            "device_iterations": 4,
            "replicas": 2,
            "options": {"setExecutionStrategy": "ShardedExecution"},
        },
        "output": {"mode": "final"},
        "seed": 42,
        "loss_scaling": "auto",
        **TRAINER,
        "cache": {"dir": "./exe_cache"},
        "pipeline": {"layers_per_ipu": [0, 7, 7, 10], "layers": "bert.encoder.layer"},
        "recompute": {"every": "block"},
    }
    noted = " ".join(result.notes)
    assert "explicit_ir_inference" in noted
    assert "serialization" not in noted  # 1 means: not serialised
    assert result.versions == ["optimum_version 1.6.1"]


def test_without_a_name_the_layers_are_found_in_the_model():
    assert imported(BERT).keys["pipeline"] == {"layers_per_ipu": [0, 7, 7, 10]}


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"layers_per_ipu": [-1], "ipus_per_replica": 4}, [-1, -1, -1, -1]),
        ({"ipus_per_replica": 2}, [-1, -1]),
        ({"layers_per_ipu": [2, -1]}, [2, -1]),
        ({"layers_per_ipu": [6, 6], "training_layers_per_ipu": [0, 12]}, [0, 12]),
    ],
)
def test_layers_per_ipu(values, counts):
    assert imported(values).keys["pipeline"]["layers_per_ipu"] == counts


def test_defaults_of_optimum_are_kept():
    assert imported({}).keys == {
        **TRAINER,
        "partials": "half",
        "memory": {"available_proportion": 0.2},
        "inference": {"device_iterations": 1},
    }
    assert "partials" not in imported({"enable_half_partials": False}).keys


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"layers_per_ipu": [2, 3], "ipus_per_replica": 4}, "does not fit 4 IPUs"),
        ({"inference_projection_serialization_factor": 5}, "memory.serialize is for training and inference"),
        ({"gradient_accumulation_steps": {"pod16": 8, "default": 4}}, "depends on the pod"),
        ({"something_new": 3}, "something_new: 3"),
        ({"output_mode": "odd"}, "output_mode"),
    ],
)
def test_keys_that_cannot_be_mapped_are_noted(values, word):
    assert any(word in note for note in imported(values, "layers").notes)


def test_the_arguments_choose_the_pod_and_override_the_file():
    values = {"replication_factor": {"pod4": 1, "pod16": 4, "default": 2}, "ipus_per_replica": 4}
    assert imported(values).keys["replication"] == {"factor": 2}
    overrides = "device_iterations=3,matmul_proportion=[0.08 0.2 0.25 0.25],optimizer_state_offchip=true"
    arguments = {"pod_type": "pod16", "ipu_config_overrides": overrides, "fp32": True}
    result = import_config(json.dumps(values), arguments=arguments)
    assert result.keys["replication"] == {"factor": 4}
    assert result.keys["device_iterations"] == 3
    assert result.keys["memory"]["available_proportion"]["IPU3"] == 0.25
    assert result.keys["memory"]["optimizer_state"] == {"on_chip": False}
    assert "precision" not in result.keys
    assert result.notes == []


@pytest.mark.parametrize(
    ("values", "key", "made"),
    [
        ({"matmul_proportion": [0.25], "ipus_per_replica": 4}, "memory", {"available_proportion": 0.25}),
        ({"executable_cache_dir": "disabled"}, "cache", {"enabled": False}),
        ({"async_dataloader": True, "dataloader_workers": 64}, "loader", {"mode": "async", "workers": 64}),
        ({"lr_schedule": "linear", "lr_warmup": 0.1}, "schedule", {"warmup_share": 0.1}),
        ({"embedding_serialization_factor": 0, "loss_scaling": 64.0}, "loss_scaling", 64.0),
    ],
)
def test_keys_of_older_files(values, key, made):
    result = imported(values)
    assert result.keys[key] == made
    assert result.notes == []


def test_separate_inference_placement():
    values = {"layers_per_ipu": [6, 6], "inference_layers_per_ipu": [12], "inference_matmul_proportion": [0.3]}
    result = imported(values, "layer")
    assert result.keys["pipeline"] == {"layers_per_ipu": [6, 6], "layers": "layer"}
    assert result.keys["inference"]["split"] == []
    assert result.keys["inference"]["options"] == {"setAvailableMemoryProportion": {"IPU0": 0.3}}


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_text_that_is_not_a_config(text):
    with pytest.raises(ConfigError, match=r"ipu_config\.json"):
        import_config(text)


class TestCommand:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        Path("ipu_config.json").write_text(json.dumps(BERT))

    def test_writes_a_recipe_that_composes(self, capsys):
        assert main(["import", "ipu_config.json", "my_bert", "--layers", "bert.encoder.layer"]) == 0
        shown = capsys.readouterr().out
        assert "made  conf/recipe/my_bert.yaml" in shown
        assert "note  explicit_ir_inference" in shown
        text = Path("conf/recipe/my_bert.yaml").read_text()
        assert text.startswith("# @package _global_\n")
        assert "# - explicit_ir_inference: true" in text

        from ipurun.config.compose import one

        config = one(["+recipe=my_bert"]).config
        assert config.gradient_accumulation == 512
        assert config.pipeline.layers_per_ipu == [0, 7, 7, 10]
        assert config.recompute.every == "block"
        assert config.optimizer["accum_type"] == "float16"
        assert config.memory.available_proportion["IPU3"] == 0.15
        assert config.memory.serialize == {"input_embeddings": 2}

    def test_never_overwrites(self, capsys):
        assert main(["import", "ipu_config.json", "my_bert"]) == 0
        before = Path("conf/recipe/my_bert.yaml").read_text()
        Path("ipu_config.json").write_text("{}")
        assert main(["import", "ipu_config.json", "my_bert"]) == 2
        assert "there already" in capsys.readouterr().err
        assert Path("conf/recipe/my_bert.yaml").read_text() == before

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "takes a file"),
            (["none.json"], "cannot be read"),
            (["ipu_config.json", "mnist"], "built-in"),
            (["ipu_config.json", "../up"], "cannot name a recipe"),
        ],
    )
    def test_bad_arguments(self, capsys, words, said):
        assert main(["import", *words]) == 2
        assert said in capsys.readouterr().err
        assert not Path("conf").exists()
