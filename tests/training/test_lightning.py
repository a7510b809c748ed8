"""LightningModules and LightningDataModules as model and data, recognised by their methods."""

import json
import math
from pathlib import Path

import pytest
import torch
from lightning_duck import Count, Lit, Loaders
from torch.nn import functional

import ipurun
from ipurun.cli.main import main


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(model="Lit", data="Loaders", words=(), **keys):
    """Train; return the logged lines of the run, and the run."""
    done = ipurun.train(
        model={"_target_": f"lightning_duck.{model}", **keys.pop("arguments", {})},
        data={"_target_": f"lightning_duck.{data}"},
        cache={"enabled": False},
        overrides=["hydra.run.dir=run", *words],
        quiet=True,
        **keys,
    )
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines, done


def refusal(capsys, *words):
    assert main(["validate", "data._target_=lightning_duck.Loaders", *words]) == 2
    return capsys.readouterr().err


def by_hand(epochs, accumulation=1, replicas=1, samples=64):
    """Train in plain torch what Lightning would; return the values of each epoch, and the model."""
    torch.manual_seed(0)
    model, data = Lit(), Loaders(samples=samples)
    data.setup("fit")
    made = model.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    found = []
    for _ in range(epochs):
        losses, right = [], 0
        batches = list(data.train_dataloader())
        size = accumulation * replicas
        for first in range(0, len(batches) - size + 1, size):
            optimizer.zero_grad()
            for inputs, target in batches[first : first + size]:
                scores = model(inputs)
                loss = functional.cross_entropy(scores, target)
                (loss / size).backward()
                losses.append(loss.item())
                right += int((scores.argmax(dim=1) == target).sum())
            optimizer.step()
        scheduler.step()
        count, total, rows = Count(), 0.0, 0
        with torch.no_grad():
            for inputs, target in data.val_dataloader():
                total += functional.cross_entropy(model(inputs), target).item() * len(target)
                rows += len(target)
                count.update(model(inputs), target)
        found.append(
            {
                "train_loss_epoch": sum(losses) / len(losses),
                "right": right,
                "val_loss": total / rows,
                "val_acc": float(count.compute()),
            }
        )
    return found, model


def values_by_epoch(lines):
    epochs = [{**line} for line in lines if "train_loss_epoch" in line]
    evals = [line for line in lines if "val_loss" in line]
    return [{**first, **second} for first, second in zip(epochs, evals)]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"gradient_accumulation": 2},
        {"device_iterations": 2},
        {"devices": 2, "gradient_accumulation": 2, "device_iterations": 2, "inference": {"device_iterations": 1}},
    ],
    ids=str,
)
def test_numbers_are_those_of_a_plain_loop(sizes):
    lines, _ = run(epochs=3, **sizes)
    expected, model = by_hand(3, sizes.get("gradient_accumulation", 1), sizes.get("devices", 1))
    found = values_by_epoch(lines)
    assert len(found) == 3
    for ours, theirs in zip(found, expected):
        for name, value in theirs.items():
            assert math.isclose(ours[name], value, rel_tol=1e-4), name
    weights = ipurun.load("run").model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4)


def test_values_between_log_lines_are_reported_under_their_own_name():
    lines, _ = run(epochs=1, log_every_steps=4)
    steps = [line for line in lines if "train_loss_step" in line]
    assert [line["step"] for line in steps] == [4, 8]
    assert steps[0]["train_loss_step"] == pytest.approx(steps[0]["loss"], rel=1e-5)


def test_maxima_and_metric_objects_take_every_micro_batch():
    lines, _ = run("Peaks", epochs=1, device_iterations=2, gradient_accumulation=2, log_every_steps=2)
    data = Loaders()
    data.setup("fit")
    assert lines_with(lines, "peak")[-1]["peak"] == pytest.approx(float(data.train.tensors[0].max()))
    steps = [line["acc_step"] for line in lines_with(lines, "acc_step")]
    assert lines_with(lines, "acc_epoch")[-1]["acc_epoch"] == pytest.approx(sum(steps) / len(steps))


def lines_with(lines, name):
    return [line for line in lines if name in line]


def test_lists_and_epoch_ends_are_kept_on_the_host():
    lines, _ = run("Lists", epochs=1)
    found = lines_with(lines, "kept_loss")[-1]
    assert found["rows"] == 21
    assert found["kept_loss"] > 0


def accuracy_by_batch(model, size=8):
    data = Loaders(size)
    data.setup("fit")
    with torch.no_grad():
        return [
            float((model(inputs).argmax(dim=1) == target).float().mean()) for inputs, target in data.val_dataloader()
        ]


def test_what_the_steps_of_an_epoch_return_is_reduced_at_its_end():
    lines, done = run("Ends", epochs=2, device_iterations=2, log_every_steps=2)
    ends = lines_with(lines, "returned")
    losses = [line["loss"] for line in lines_with(lines, "lr")]
    assert [line["updates"] for line in ends] == [8, 16]
    assert ends[1]["returned"] == pytest.approx(sum(losses[4:]) / 4, rel=1e-5)
    evals = lines_with(lines, "hits")
    assert [line["epoch_index"] for line in evals] == [0, 1]
    right = accuracy_by_batch(ipurun.load("run").model)
    assert evals[1]["hits"] == pytest.approx(sum(right) / len(right))  # the last batch has 5 samples, not 8
    assert "loss" not in evals[1]  # an accuracy is not a loss
    assert json.loads(Path("run/summary.json").read_text(encoding="utf-8"))["monitor"] == "hits"
    assert done.metrics["hits"] == evals[1]["hits"]


def test_rows_that_steps_return_come_without_padding():
    lines, _ = run("EndsWithRows", epochs=1, inference={"device_iterations": 2}, monitor="losses")
    found = lines_with(lines, "rows")[-1]
    assert found["rows"] == 21
    model, data = ipurun.load("run").model, Loaders()
    data.setup("fit")
    with torch.no_grad():
        losses = [float(functional.cross_entropy(model(inputs), target)) for inputs, target in data.val_dataloader()]
    assert found["losses"] == pytest.approx(sum(losses), rel=1e-5)
    assert lines_with(lines, "ended")


def test_the_host_computes_with_the_value_of_a_metric_object():
    lines, _ = run("Root", epochs=1)
    found = lines_with(lines, "root")[-1]
    right, rows = accuracy_by_batch(ipurun.load("run").model), [8, 8, 5]
    assert found["root"] == pytest.approx(sum(n * share**0.5 for share, n in zip(right, rows)) / 21, rel=1e-5)
    assert found["missed"] == pytest.approx(100 - 100 * found["acc"], rel=1e-5)
    assert found["seen"] == pytest.approx(found["val_loss"])


def test_the_micro_batch_of_a_poptorch_loader_is_its_own(capsys):
    assert main(["plan", "model._target_=lightning_duck.Lit", "data._target_=lightning_duck.PopTorchLoaders"]) == 0
    shown = capsys.readouterr().out
    assert "micro-batch 8 x device_iterations 1 " in shown
    assert "device_iterations=4 replication.factor=2" in shown


def test_the_trainer_has_the_data_module():
    lines, _ = run("Reads", epochs=1, log_every_steps=1)
    assert lines_with(lines, "lr")[0]["lr"] == pytest.approx(0.8)


def test_a_module_that_does_not_keep_its_trainer_alive():
    lines, _ = run("Weak", epochs=2, log_every_steps=1)
    assert lines_with(lines, "lr")[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("model", "says"),
    [("Mixes", "cannot be combined with other tensors"), ("Rate", "reports the learning rate itself")],
)
def test_what_a_step_cannot_know_is_explained(capsys, model, says):
    words = [f"model._target_=lightning_duck.{model}", "data._target_=lightning_duck.Loaders", "max_steps=8"]
    assert main(["train", *words, "hydra.run.dir=run", "--quiet"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert says in said
    assert "lightning_duck.py:" in said


def test_batches_by_name_with_their_own_collate_function_and_sampler():
    _, done = run("Named", "NamedLoaders", epochs=1)
    assert done.step == 4
    torch.manual_seed(0)
    start, end = Lit(), ipurun.load("run").model
    assert torch.equal(start.body.weight, end.body.weight)
    assert not torch.equal(start.head.weight, end.head.weight)


@pytest.mark.parametrize(
    ("interval", "frequency", "accumulation", "expected"),
    [
        ("epoch", 1, 1, [0.1, 0.05, 0.025]),
        ("epoch", 2, 1, [0.1, 0.1, 0.05]),
        ("step", 8, 1, [0.1, 0.05, 0.025]),
        ("step", 3, 1, [0.1 / 2**2, 0.1 / 2**4, 0.1 / 2**6]),  # after batches 3 and 6 of the 8 of an epoch
        ("step", 4, 2, [0.1 / 2**1, 0.1 / 2**3, 0.1 / 2**5]),  # after batches 4 and 8, which are updates 2 and 4
    ],
)
def test_schedulers_step_as_their_interval_and_frequency_say(interval, frequency, accumulation, expected):
    sizes = {"gradient_accumulation": accumulation, "log_every_steps": 8 // accumulation}
    lines, _ = run(epochs=3, arguments={"interval": interval, "frequency": frequency}, **sizes)
    assert [line["lr"] for line in lines_with(lines, "lr")] == pytest.approx(expected)


def test_a_schedule_knows_the_length_of_the_run_and_moves_betas():
    lines, _ = run("OneCycle", max_steps=10, log_every_steps=1)
    rates = [line["lr"] for line in lines_with(lines, "lr")]
    assert rates[0] == pytest.approx(0.1 / 25)
    assert max(rates) == pytest.approx(0.1, rel=0.05)
    assert rates[-1] < 0.01


def test_an_optimizer_of_the_parameters_that_the_trainer_has():
    run("OfTrainer", max_steps=3)
    found = ipurun.load("run").model.state_dict()
    run("Lit", max_steps=3, words=["optimizer=adamw", "optimizer.lr=0.1", "hydra.run.dir=other"])
    for name, value in ipurun.load("other").model.state_dict().items():
        torch.testing.assert_close(value, found[name])


def test_a_step_that_reads_a_value_is_refused_without_advice_on_memory(capsys):
    words = ["model._target_=lightning_duck.Skips", "data._target_=lightning_duck.Loaders", "max_steps=1"]
    assert main(["train", *words, "hydra.run.dir=run", "--quiet"]) != 0
    said = capsys.readouterr().err
    assert "lightning_duck.py:" in said
    assert "planner estimates" not in said


def test_a_plateau_waits_for_the_value_that_it_names():
    lines, _ = run("Plateau", epochs=4, log_every_epochs=1)
    assert lines_with(lines, "lr")[-1]["lr"] < 0.1  # val_loss falls, which mode=max takes for no progress


def test_a_run_resumes_in_its_schedule():
    run(epochs=3)
    whole = ipurun.load("run").model.state_dict()
    ipurun.train(
        model={"_target_": "lightning_duck.Lit"},
        data={"_target_": "lightning_duck.Loaders"},
        epochs=1,
        overrides=["hydra.run.dir=part"],
        quiet=True,
    )
    assert main(["train", "resume=part", "epochs=3", "--quiet"]) == 0
    for name, value in ipurun.load("part").model.state_dict().items():
        torch.testing.assert_close(value, whole[name], atol=1e-6, rtol=1e-5)


def test_a_run_resumes_in_a_schedule_of_numpy():
    run("Numpy", epochs=2)
    whole = ipurun.load("run").model.state_dict()
    run("Numpy", epochs=1, words=["hydra.run.dir=part"])
    assert main(["train", "resume=part", "epochs=2", "--quiet"]) == 0
    for name, value in ipurun.load("part").model.state_dict().items():
        torch.testing.assert_close(value, whole[name], atol=0, rtol=0)


def test_the_config_may_replace_the_optimizer(capsys):
    words = ["model._target_=lightning_duck.Lit", "data._target_=lightning_duck.Loaders"]
    assert main(["plan", *words, "optimizer=adam", "optimizer.lr=0.5"]) == 0
    shown = capsys.readouterr().out
    assert "poptorch.optim.Adam(" in shown
    assert "not that of configure_optimizers" in shown
    assert main(["plan", *words, "micro_batch_size=4"]) == 0
    assert "micro-batch 4 " in capsys.readouterr().out
    assert main(["validate", *words, "optimizer.lr=0.5"]) == 2
    assert "whose scheduler changes it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("Returns", "training_step must return a loss"),
        ("Manual", "manual optimization"),
        ("Two", "several optimizers"),
        ("Clips", "optimizer.max_grad_norm"),
        ("Alternates", "depending on batch_idx"),
    ],
)
def test_what_cannot_be_compiled_is_refused(capsys, model, says):
    said = refusal(capsys, f"model._target_=lightning_duck.{model}")
    assert says in said
    assert "Traceback" not in said


def test_a_decision_on_batch_idx_names_its_line(capsys):
    assert "lightning_duck.py:" in refusal(capsys, "model._target_=lightning_duck.Alternates")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("Watches", "on_train_batch_end is not called"),
        ("Watches", "PopTorch moves batches itself"),
        ("Watches", "on_epoch_end is not called"),
        ("Watches", "on_validation_model_eval is not called"),
        ("Shows", "happens once"),
        ("Epochs", "reads current_epoch"),
    ],
)
def test_what_is_ignored_is_reported(capsys, model, says):
    words = [f"model._target_=lightning_duck.{model}", "data._target_=lightning_duck.Loaders"]
    assert main(["plan", *words]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_a_loss_metrics_and_an_unknown_monitor_are_refused(capsys):
    lit = "model._target_=lightning_duck.Lit"
    assert "training_step returns the loss" in refusal(capsys, lit, "loss.name=MSELoss")
    assert "self.log" in refusal(capsys, lit, "+metrics.accuracy={}")
    said = refusal(capsys, lit, "monitor=val_los")
    assert "try    monitor=val_loss" in said


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_an_operation_that_poptorch_lacks_is_refused_at_its_line(capsys, precision):
    words = ["model._target_=lightning_duck.Infinite", "data._target_=lightning_duck.Loaders", "max_steps=8"]
    assert main(["train", *words, f"precision={precision}", "hydra.run.dir=run", "--quiet"]) != 0
    said = capsys.readouterr().err
    assert "aten::isinf" in said
    assert "lightning_duck.py:" in said.partition("  seen")[0]
    assert "planner estimates" not in said  # no other sizes would help


def test_weights_are_exported_as_a_lightning_checkpoint(capsys):
    run(max_steps=2)
    assert main(["export", "run", "--lightning"]) == 0
    content = torch.load("run/model.ckpt", weights_only=True)
    assert content["global_step"] == 2
    assert "loops" not in content  # Lightning would look for the state of each loop in it
    assert torch.equal(content["state_dict"]["head.weight"], ipurun.load("run").model.head.weight)
    words = ["model._target_=lightning_duck.Lit", "data._target_=lightning_duck.Loaders", "init_from=run/model.ckpt"]
    assert main(["plan", *words]) == 0
    assert "Lightning checkpoint of step 2" in capsys.readouterr().out
    assert main(["export", "run", "--lightning", "--out", "weights.safetensors"]) == 2
