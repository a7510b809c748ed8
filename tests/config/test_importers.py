"""`ipurun import` of what other tools are configured and started with."""

import json
import sys
import textwrap

import pytest
import yaml

from ipurun.cli.main import main


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recipe(*words, name="made"):
    assert main(["import", *words, "--quiet"]) == 0
    with open(f"conf/recipe/{name}.yaml", encoding="utf-8") as file:
        text = file.read()
    return yaml.safe_load(text), text


def write(name, text):
    with open(name, "w", encoding="utf-8") as file:
        file.write(textwrap.dedent(text))


def test_a_section_of_an_applications_configs(capsys):
    write(
        "configs.yml",
        """
        defaults: &all {replicas: 4, seed: 0}
        resnet50_mk2:
          <<: *all
          model: resnet50
          optimizer: sgd
          lr: 1.0
          micro-batch-size: 4
          gradient-accumulation: 16
          precision: "16.16"
          pipeline-splits: [layer1/0, layer2/2]
          half-partial: true
          lr-schedule: cosine
          mixup-alpha: 0.2
        """,
    )
    keys, text = recipe("configs.yml", "made", "--section", "resnet50_mk2")
    assert keys == {
        "defaults": [{"override /optimizer": "sgd"}, {"override /schedule": "cosine"}],
        "replication": {"factor": 4},
        "optimizer": {"lr": 1.0},
        "micro_batch_size": 4,
        "gradient_accumulation": 16,
        "precision": "16.16",
        "pipeline": {"split": ["layer1.0", "layer2.2"]},
        "partials": "half",
        "seed": 0,
    }
    assert "mixup-alpha: 0.2" in text
    assert main(["import", "configs.yml", "other", "--section", "resnet50"]) == 2
    assert "--section resnet50_mk2" in capsys.readouterr().err


def test_training_arguments_and_an_ipu_config(capsys):
    write("ipu_config.json", json.dumps({"layers_per_ipu": [3, 3], "ipus_per_replica": 2}))
    arguments = {"per_device_train_batch_size": 2, "learning_rate": 3e-5, "num_train_epochs": 3.0, "warmup_ratio": 0.1}
    write("training_args.json", json.dumps({**arguments, "adam_beta1": 0.9, "fp16": True, "push_to_hub": False}))
    keys, _ = recipe("ipu_config.json", "training_args.json", "made")
    assert keys["pipeline"] == {"layers_per_ipu": [3, 3]}
    assert (keys["micro_batch_size"], keys["epochs"], keys["precision"]) == (2, 3, "16-mixed")
    assert (keys["optimizer"]["lr"], keys["optimizer"]["weight_decay"]) == (3e-05, 0.0)
    assert keys["schedule"] == {"warmup_share": 0.1}
    assert keys["defaults"] == [{"override /optimizer": "adamw"}, {"override /schedule": "linear"}]


def test_the_command_of_an_example_script_wins_over_the_ipu_config():
    write("ipu_config.json", json.dumps({"gradient_accumulation_steps": 512, "ipus_per_replica": 2, "seed": 42}))
    command = """python examples/run_glue.py --model_name_or_path bert-base-cased --ipu_config_name Graphcore/bert
        --ipu_config_overrides "layers_per_ipu=[4 8]" --task_name sst2 --do_train --logging_strategy steps
        --gradient_accumulation_steps 16 --seed 0 --lamb_no_bias_correction --lr_schedule linear --num_train_epochs 2
        --dataloader_mode async_rebatched --config_overrides "layer_norm_eps=0.001" --source_prefix "summarize: " """
    keys, text = recipe("ipu_config.json", command.replace("\n", " "), "made")
    assert keys["model"] == {
        "_target_": "transformers.AutoModelForSequenceClassification.from_pretrained",
        "pretrained_model_name_or_path": "bert-base-cased",
        "layer_norm_eps": 0.001,
    }
    assert keys["loader"] == {"collate": "transformers.default_data_collator", "mode": "async_rebatched"}
    assert (keys["gradient_accumulation"], keys["seed"], keys["epochs"]) == (16, 0, 2)
    assert keys["pipeline"] == {"layers_per_ipu": [4, 8]}
    assert keys["defaults"] == [{"override /optimizer": "lamb"}, {"override /schedule": "linear"}]
    assert keys["optimizer"]["bias_correction"] is False
    assert "task_name: sst2: about the data" in text
    assert "source_prefix: summarize: : about" in text
    assert "ipu_config_name" not in text


def test_a_file_with_both_kinds_of_arguments():
    values = {"per_device_train_batch_size": 2, "num_train_epochs": 300, "warmup_epochs": 30, "pod_type": "pod16"}
    ipus = {"layers_per_ipu": [2, 2], "replication_factor": {"pod16": 8, "default": 1}, "fp32": True}
    write("both.json", json.dumps({**values, **ipus, "smoothing": 0.1, "model_name_or_path": "facebook/convnext"}))
    keys, text = recipe("both.json", "made")
    assert keys["pipeline"] == {"layers_per_ipu": [2, 2]}
    assert keys["replication"] == {"factor": 8}
    assert (keys["devices"], keys["precision"], keys["schedule"]) == (16, "32.32", {"warmup_share": 0.1})
    assert "pretrained_model_name_or_path: facebook/convnext" in text
    assert "loss.args.label_smoothing=0.1" in text


def test_a_command_line_of_poprun():
    command = (
        "poprun --num-replicas=4 --ipus-per-replica 2 --num-instances 2 python train.py --learning-rate 1e-3 --odd 1"
    )
    keys, text = recipe(command, "made")
    assert keys["replication"] == {"factor": 4}
    assert keys["pipeline"] == {"ipus": 2}
    assert keys["optimizer"] == {"lr": 0.001}
    assert "--odd: 1: has no counterpart" in text


def test_a_config_of_lightnings_cli_is_planned_at_once(capsys):
    write(
        "cli.yaml",
        """
        seed_everything: 3
        trainer:
          accelerator: ipu
          devices: 2
          max_epochs: 2
          precision: 16-mixed
          limit_train_batches: 0.5
          callbacks:
            - class_path: lightning.pytorch.callbacks.EarlyStopping
              init_args: {monitor: val_loss, patience: 3, mode: min}
        model: {class_path: lightning_duck.Lit, init_args: {lr: 0.02}}
        data: {class_path: lightning_duck.Loaders}
        """,
    )
    assert main(["import", "cli.yaml", "made", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [note.partition(":")[0] for note in document["notes"]] == ["trainer.limit_train_batches"]
    calls = next(int(line.split()[1]) for line in document["plan"] if line.startswith("epoch"))
    assert f"limit.train_calls={calls // 2} is 0.5 of an epoch" in document["plan"]
    assert any(line.startswith("devices    2 IPUs = 2 replicas") for line in document["plan"])
    assert main(["train", "+recipe=made", "--quiet"]) == 0


def test_a_config_of_lightnings_cli_is_read_as_lightning_reads_it():
    write(
        "cli.yaml",
        """
        fit:
          trainer:
            accelerator: gpu
            devices: "0,1"
            precision: bf16-mixed
            max_epochs: -1
            enable_checkpointing: true
            limit_train_batches: 0.1
            logger:
              - {class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: mine}}
              - {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
            strategy:
              class_path: lightning.pytorch.strategies.IPUStrategy
              init_args: {device_iterations: 4, autoreport: true, training_opts: null}
            callbacks:
              - {class_path: lightning.pytorch.callbacks.StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}
          model:
            class_path: my.Lit
            init_args: {lr: 2e-4, layers: [{class_path: torch.nn.Linear, init_args: {in_features: 8}}]}
          data: {batch_size: 4}
        """,
    )
    keys, text = recipe("cli.yaml", "made")
    assert keys["model"] == {
        "_target_": "my.Lit",
        "lr": 0.0002,
        "layers": [{"_target_": "torch.nn.Linear", "in_features": 8}],
    }
    assert keys["data"] == {"batch_size": 4}
    assert (keys["devices"], keys["precision"], keys["device_iterations"]) == (2, "16-mixed", 4)
    assert (keys["logger"], keys["profile"]) == ({"wandb": {"project": "mine"}}, {"kind": "graph"})
    assert keys["averaging"] == {"kind": "tail"}
    assert "0.1 x the host calls of an epoch" in text
    assert "write data._target_" in text
    assert "no bfloat16" in text
    assert "enable_checkpointing" not in text


def test_several_processes_of_lightning_become_replicas():
    write("cli.yaml", "{trainer: {strategy: lightning.pytorch.strategies.DDPStrategy}, model: {class_path: a.B}}")
    _, text = recipe("cli.yaml", "made")
    assert "devices=N makes N replicas" in text


SCRIPT = """
    import sys, torch, poptorch

    class Net(torch.nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.width = width
            self.first = torch.nn.Linear(4, width)
            self.last = poptorch.BeginBlock(torch.nn.Linear(width, 3), ipu_id=1)

        def forward(self, inputs, target):
            scores = self.last(self.first(inputs))
            return scores, torch.nn.functional.cross_entropy(scores, target)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.ones(4) * index, torch.tensor(index % 3)

    if __name__ == "__main__":
        options = poptorch.Options()
        options.deviceIterations(2)
        options.Training.gradientAccumulation(8)
        options.TensorLocations.numIOTiles(32)
        loader = poptorch.DataLoader(options, Data(), batch_size=2)
        net = Net(int(sys.argv[1]))
        model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        for batch in loader:
            model(*batch)
        raise SystemExit("it went on")
"""


def test_a_script_is_run_up_to_its_first_model(capsys):
    write("tool_of_old.py", SCRIPT)
    assert main(["import", "tool_of_old.py", "made", "--json", "--", "16"]) == 0
    document = json.loads(capsys.readouterr().out)
    with open("conf/recipe/made.yaml", encoding="utf-8") as file:
        keys = yaml.safe_load(file)
    assert keys["model"] == {"_target_": "tool_of_old.Net", "width": 16}
    assert keys["data"] == {"_target_": "tool_of_old.Data"}
    assert (keys["micro_batch_size"], keys["device_iterations"], keys["gradient_accumulation"]) == (2, 2, 8)
    assert keys["optimizer"] == {"_target_": "poptorch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    assert any("last on IPU 1" in note for note in document["notes"])


PIPELINE = """
    import torch, poptorch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

        def forward(self, inputs):
            with poptorch.Block("B1"):
                inputs = self.first(inputs)
            with poptorch.Block("B2"):
                return self.last(inputs)

    class WithLoss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, inputs, target):
            scores = self.model(inputs)
            with poptorch.Block("B2"):
                return scores, torch.nn.functional.cross_entropy(scores, target)

    class Scale:
        def __init__(self, mean, std=(1.0,)):
            self.mean, self.std = mean, std

        def __call__(self, value):
            return (value - self.mean[0]) / self.std[0]

    class Data(torch.utils.data.Dataset):
        def __init__(self, root, transforms=None):
            self.root, self.transforms = root, transforms

        def __len__(self):
            return 64

        def __getitem__(self, index):
            assert len(self.transforms) == 1
            return self.transforms[0](torch.ones(4) * index), torch.tensor(index % 3)

    GUARD
        options = poptorch.Options()
        options._Popart.set("defaultPrefetchBufferingDepth", 3)
        options._Popart.set("enableOutlining", False)
        options.Training.gradientAccumulation(4)
        options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
        stages = [poptorch.Stage("B1").ipu(0), poptorch.Stage("B2").ipu(1)]
        options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
        loader = poptorch.DataLoader(options, Data("here", [Scale((2.0,), (3.0,))]), batch_size=2)
        net = Net()
        model = poptorch.trainingModel(WithLoss(net), options, poptorch.optim.AdamW(net.parameters(), lr=0.1))
        model(*next(iter(loader)))
"""


def test_a_script_with_nested_objects_and_stages_becomes_a_recipe_that_runs(capsys):
    write("tool_of_stages.py", PIPELINE.replace("GUARD", 'if __name__ == "__main__":'))
    keys, text = recipe("tool_of_stages.py", "made")
    assert keys["model"] == {"_target_": "tool_of_stages.WithLoss", "model": {"_target_": "tool_of_stages.Net"}}
    scale = {"_target_": "tool_of_stages.Scale", "mean": [2.0], "std": [3.0]}
    assert keys["data"] == {"_target_": "tool_of_stages.Data", "root": "here", "transforms": [scale]}
    assert keys["pipeline"] == {
        "strategy": "pipelined",
        "stages": [{"blocks": ["B1"], "ipu": 0}, {"blocks": ["B2"], "ipu": 1}],
    }
    assert keys["options"] == {
        "_Popart": {"set": {"defaultPrefetchBufferingDepth": 3, "enableOutlining": False}},
        "TensorLocations": {"setOptimizerLocation": {"useOnChipStorage": False}},
    }
    assert "by hand" not in text
    assert main(["train", "+recipe=made", "max_steps=2", "--quiet"]) == 0


def test_a_script_in_half_precision_becomes_a_recipe_that_runs():
    half = PIPELINE.replace("GUARD", 'if __name__ == "__main__":').replace("net = Net()", "net = Net().half()")
    half = half.replace('Data("here", ', "Data(torch.float16, ").replace("lr=0.1", "lr=0.1, accum_type=torch.float16")
    half = half.replace("torch.ones(4) * index", "torch.ones(4).to(self.root) * index")
    half = half.replace("def __len__", "def transform(self): ...\n\n        def __len__")
    half = half.replace("transforms=None", "transforms=None, transform=None")
    write("tool_of_halves.py", half)
    keys, text = recipe("tool_of_halves.py", "made")
    assert keys["precision"] == "16.16"
    assert keys["optimizer"]["accum_type"] == "float16"
    assert keys["data"]["root"] == {"_target_": "hydra.utils.get_object", "path": "torch.float16"}
    assert "transform" not in keys["data"]  # a method of that name is not the argument
    assert "by hand" not in text
    assert main(["train", "+recipe=made", "max_steps=1", "--quiet"]) == 0


def test_a_script_that_trains_when_imported_is_noted(capsys):
    write("tool_without_guard.py", PIPELINE.replace("GUARD", "if True:"))
    _, text = recipe("tool_without_guard.py", "made")
    assert "tool_without_guard.py trains when it is imported" in text
    ends = PIPELINE.replace("GUARD", "if True:").replace(
        "options = ", "assert len(sys.argv) == 2 or sys.exit(2)\n        options = ", 1
    )
    write("tool_that_ends.py", ends.replace("import torch, poptorch", "import sys, torch, poptorch"))
    capsys.readouterr()
    assert main(["import", "tool_that_ends.py", "ends", "--", "word"]) == 0
    said = capsys.readouterr().out
    assert "trains when it is imported" in said
    assert "SystemExit: 2" in said  # planning imports its classes without the arguments
    assert main(["validate", "+recipe=ends"]) == 2
    assert '__name__ == "__main__"' in capsys.readouterr().err


def test_a_recipe_that_cannot_be_planned_yet_is_made(capsys):
    code = PIPELINE.replace("GUARD", 'if __name__ == "__main__":').replace("transforms=None", "*transforms")
    code = code.replace("[Scale((2.0,), (3.0,))]", "Scale((2.0,), (3.0,))").replace(
        "return 64", "return self.transforms[0] and 64"
    )
    write("tool_of_roots.py", code)
    assert main(["import", "tool_of_roots.py", "made"]) == 0
    said = capsys.readouterr().out
    assert "write by hand" in said
    assert "not yet: IndexError" in said


def test_a_script_that_trains_with_lightning_gets_its_command(capsys):
    write(
        "tool_of_lightning.py",
        """
        import lightning as L

        class Data(L.LightningDataModule): ...
        class Lit(L.LightningModule): ...

        L.Trainer(accelerator="ipu", devices=8, max_epochs=3, gradient_clip_val=1.0, precision="16-mixed", logger=False,
                  callbacks=[]).fit(Lit(), Data())
        """,
    )
    assert main(["import", "tool_of_lightning.py", "made"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "model._target_=tool_of_lightning.Lit data._target_=tool_of_lightning.Data engine=ipu devices=8" in said
    assert "epochs=3 optimizer.max_grad_norm=1.0 precision=16-mixed;" in said
    own = textwrap.dedent(SCRIPT).replace(
        "if __name__", "class Trainer: ...  # like that of lightning\n\nTrainer()\nif __name__"
    )
    write("tool_of_both.py", own)
    assert main(["import", "tool_of_both.py", "made", "--", "16"]) == 0  # it compiles a model with PopTorch


def test_a_script_that_fails_or_compiles_nothing_is_reported(capsys):
    write("broken.py", "import poptorch\nraise ValueError('no data')\n")
    write("idle.py", "import poptorch\n")
    assert main(["import", "broken.py", "made"]) == 2
    said = capsys.readouterr().err
    assert "broken.py:2" in said
    assert "ValueError: no data" in said
    own = sys.modules["__main__"]
    assert main(["import", "idle.py", "made"]) == 2
    assert sys.modules["__main__"] is own  # loaders of later runs start processes from its file
    assert "without compiling a model" in capsys.readouterr().err


def test_keys_of_applications_that_depend_on_each_other():
    write(
        "configs.yml",
        """
        resnet: {model: resnet50, optimizer: sgd_combined, lr: 6e-2, epoch: 100, warmup_epoch: 5, lr_schedule: cosine,
                 label_smoothing: 0.1, recompute_mode: manual, pipeline_splits: [],
                 recompute_checkpoints: [add_1, layer4/0/conv1, layer4/0/downsample_0]}
        bert: {optimizer: LAMBNoBiasCorrection, auto_loss_scaling: true, loss_scaling: 1.0, custom_ops: true,
               random_seed: 5, dataloader_workers: 64, num_epochs: 3, momentum: 0.9, attention_probs_dropout_prob: 0.0,
               first_order_type: fp16, embedding_serialization_factor: 2, executable_cache_dir: $CACHE/x}
        """,
    )
    keys, text = recipe("configs.yml", "made", "--section", "resnet")
    assert keys["optimizer"] == {"use_combined_accum": True, "lr": 0.06}
    assert keys["loss"] == {"name": "CrossEntropyLoss", "args": {"label_smoothing": 0.1}}
    assert keys["schedule"] == {"warmup_share": 0.05}
    assert keys["recompute"] == {"checkpoints": ["layer4.0.conv1", "layer4.0.downsample.0"]}
    assert "pipeline" not in keys
    assert "recompute_checkpoints: add_1" in text
    keys, text = recipe("configs.yml", "second", "--section", "bert", name="second")
    assert keys["loss_scaling"] == "auto"
    assert keys["optimizer"] == {
        "accum_type": "float16",
        "first_order_momentum_accum_type": "float16",
        "bias_correction": False,
    }
    assert (keys["seed"], keys["epochs"], keys["loader"]) == (5, 3, {"workers": 64})
    assert keys["cache"] == {"dir": "${oc.env:CACHE}/x"}
    for note in ("momentum: 0.9", "attention_probs_dropout_prob: 0.0", "custom_ops"):
        assert note in text
    assert keys["memory"] == {"serialize": {"output_embeddings": 2}}


def test_the_command_of_an_application_wins_over_its_file():
    write("configs.yml", "resnet: {epoch: 100, warmup_epoch: 5, lr: 2.0, replicas: 16, lr_schedule: cosine}")
    command = "poprun -vv --num-replicas=8 python3 train.py --config resnet --epoch 2 --warmup-epoch 0"
    keys, _ = recipe("configs.yml", command, "made", "--section", "resnet")
    assert keys["epochs"] == 2
    assert keys["replication"] == {"factor": 8}
    assert "schedule" not in keys


def test_flags_of_a_command_take_several_values():
    command = "python train_gpt2.py --layers-per-ipu 0 4 4 4 --matmul-proportion 0.15 0.15 0.2 0.2 --batch-size 1"
    keys, _ = recipe(f"{command} --pipeline-splits layer1/0 layer2/0", "made")
    assert keys["pipeline"] == {"layers_per_ipu": [0, 4, 4, 4], "split": ["layer1.0", "layer2.0"]}
    assert keys["memory"]["available_proportion"] == {"IPU0": 0.15, "IPU1": 0.15, "IPU2": 0.2, "IPU3": 0.2}
    assert keys["micro_batch_size"] == 1


def test_what_the_programs_of_applications_do_whatever_their_file_says():
    write(
        "configs.yml",
        """
        bert: {mask_tokens: 20, optimizer: AdamW, weight_decay: 0.01, learning_rate: 0.001, wandb_project_name: none}
        cnn: {optimizer: rmsprop_tf, lr: 0.1, weight_decay: 0.0, wandb: true, wandb_project_name: mine}
        """,
    )
    keys, _ = recipe("configs.yml", "made", "--section", "bert")
    assert (keys["precision"], keys["stochastic_rounding"]) == ("16.16", True)
    decays = {"weight_decay": 0.01, "no_decay": "norms_and_biases"}
    assert keys["optimizer"] == {
        "lr": 0.001,
        "accum_type": "float16",
        "eps": 1e-06,
        "bias_correction": False,
        **decays,
    }
    keys, _ = recipe("configs.yml", "cnn", "--section", "cnn", name="cnn")
    assert keys["optimizer"] == {"lr": 0.1, "weight_decay": 0.0, "use_tf_variant": True}
    assert keys["logger"] == {"wandb": {"project": "mine"}}
    assert "precision" not in keys


def test_a_benchmark_is_its_command():
    long = "".join(f"\n      -x VARIABLE_NUMBER_{number}" for number in range(30))
    command = f'poprun --num-replicas 16 --vipu-cluster=c --mpi-local-args="{long}" python3 a.py --training-steps 10'
    write("benchmarks.yml", yaml.safe_dump({"one": {"cmd": command, "env": {"A": 1}, "output": [["a", "b"]]}}))
    keys, text = recipe("benchmarks.yml", "made", "--section", "one")
    assert keys == {"replication": {"factor": 16}, "max_steps": 10}
    assert "env: A=1" in text
    assert recipe(command, "line", name="line")[0] == keys  # longer than a file name may be


def test_what_the_trainer_of_transformers_takes_by_default():
    keys, _ = recipe("python run_glue.py --num_train_epochs 2 --per_device_train_batch_size 4", "made")
    assert keys["optimizer"] == {"lr": 5e-05, "weight_decay": 0.0, "max_grad_norm": 1.0}
    keys, _ = recipe("python run_glue.py --warmup_ratio 0.1 --learning_rate 3e-5", "other", name="other")
    assert (keys["micro_batch_size"], keys["epochs"], keys["optimizer"]["lr"]) == (8, 3, 3e-05)
    keys, _ = recipe("python run_glue.py --num_train_epochs 2 --max_grad_norm 0 --warmup_steps 0.2", "no", name="no")
    assert "max_grad_norm" not in keys["optimizer"]
    assert keys["schedule"] == {"warmup_share": 0.2}  # transformers 5 takes a share of the steps, too


def test_what_the_trainer_of_optimum_takes_by_default():
    write("ipu_config.json", json.dumps({"layers_per_ipu": [0, 4, 4, 4]}))
    keys, _ = recipe("ipu_config.json", "python run_clm.py --num_train_epochs 2 --weight_decay 0.01", "made")
    assert keys["micro_batch_size"] == 1
    assert keys["optimizer"]["no_decay"] == "norms_and_biases"
    assert "max_grad_norm" not in keys["optimizer"]  # it never clips
    write("training_args.json", json.dumps({"num_train_epochs": 2, "max_grad_norm": 1.0, "lamb": True}))
    keys, _ = recipe("ipu_config.json", "training_args.json", "other", name="other")
    assert "max_grad_norm" not in keys["optimizer"]
    assert keys["optimizer"]["bias_correction"] is True


def test_training_arguments_that_cannot_be_read(capsys):
    write("ipu_config.json", json.dumps({"layers_per_ipu": [0, 4, 4, 4]}))
    assert main(["import", "ipu_config.json", "missing.json", "made"]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert "No such file" in said


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"embedding_serialization_factor": 2, "projection_serialization_factor": 4}, {"i": 2, "o": 4}),
        (
            {"serialized_embedding_splits_per_ipu": [4, 4, 0, 0], "projection_serialization_factor": 1},
            {"i": [4, 4, 0, 0]},
        ),
        ({"embedding_serialization_factor": 0, "serialized_projection_splits_per_ipu": None}, None),
    ],
)
def test_tables_of_optimum_need_no_module_names(theirs, ours):
    write("ipu_config.json", json.dumps({"layers_per_ipu": [0, 8, 8, 0], **theirs}))
    keys, text = recipe("ipu_config.json", "made")
    found = keys["memory"].get("serialize")
    assert found == (ours and {{"i": "input_embeddings", "o": "output_embeddings"}[key]: ours[key] for key in ours})
    assert "serializ" not in text.partition("defaults:")[0]


def test_intervals_of_training_arguments_count_with_their_strategy():
    """TrainingArguments.to_json_string writes all values, also those that another one switches off."""
    arguments = {"num_train_epochs": 2, "save_strategy": "epoch", "save_steps": 500, "eval_strategy": "steps"}
    arguments.update({"eval_steps": 200, "logging_strategy": "steps", "logging_steps": 20, "log_on_each_node": True})
    arguments.update({"eval_do_concat_batches": True, "dataloader_in_order": True, "project": "huggingface"})
    write("training_args.json", json.dumps(arguments))
    keys, text = recipe("training_args.json", "made")
    assert keys["checkpoint"] == {"every_epochs": 1}
    assert (keys["eval"], keys["log_every_steps"]) == ({"every_steps": 200}, 20)
    assert "Not imported" not in text
    write("other.json", json.dumps({**arguments, "save_strategy": "no", "eval_strategy": "no"}))
    keys, _ = recipe("other.json", "second", name="second")
    assert "every_steps" not in keys.get("checkpoint", {})
    assert "every_steps" not in keys.get("eval", {})


@pytest.mark.parametrize(
    ("word", "says"), [("num_train_epochs=2.5", "max_steps=N"), ("rdzv_backend=c10d", "devices=N")]
)
def test_words_without_a_counterpart_are_explained(word, says, capsys):
    assert main(["validate", "+recipe=mnist", word]) == 2
    assert says in capsys.readouterr().err
