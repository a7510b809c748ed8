"""Run recipes through the command line, and the same training in plain torch."""

import json
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import default_collate

from ipurun import engine
from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.config.compose import one
from ipurun.datasets.synthetic import parse_sample
from ipurun.inspect.model_and_data import inspect

# Plain SGD with a constant learning rate, on samples in their order.
PLAIN = ["optimizer=default", "optimizer.lr=0.1", "schedule=constant", "loader.shuffle=false", "eval.at_end=false"]


def trained(words):
    """Train in the working folder; return the losses of all steps and the final weights."""
    assert main(["train", *words, "cache=off", "runs_dir=trained", "--quiet"]) == 0
    [folder] = Path("trained").rglob("summary.json")
    lines = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    return losses, load(latest(folder.parent / "checkpoints"))["model"]


def plainly_trained(words, loss_of, steps):
    """Return what `trained` should: train in plain torch, unsplit, with the mean gradient of all micro-batches.

    Args:
        words: A recipe and overrides that contain `PLAIN`.
        loss_of: Takes the model and a micro-batch.
        steps: Number of weight updates.
    """
    config = one(words).config
    made = inspect(config, engine.load("cpu"))
    model, data = made.model.train(), made.splits["train"]
    size, accumulation = config.micro_batch_size, config.gradient_accumulation
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer["lr"])
    losses, begin = [], 0
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for _ in range(accumulation):
            loss = loss_of(model, default_collate([data[begin + row] for row in range(size)])) / accumulation
            loss.backward()
            losses[-1] += loss.item()
            begin += size
        optimizer.step()
    return losses, model.state_dict()


def assert_same_training(words, loss_of, steps=2):
    """Check that a run has the losses and weights of plain torch."""
    words = [*words, *PLAIN]
    losses, weights = trained([*words, f"max_steps={steps}"])
    expected_losses, expected_weights = plainly_trained(words, loss_of, steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-4, atol=1e-5)
    assert set(weights) == set(expected_weights)
    for name, weight in weights.items():
        if name.endswith("num_batches_tracked"):
            assert weight == 0  # an integer buffer is a constant on an IPU
            continue
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=2e-5, msg=name)


def assert_learns(words, steps, falls_by):
    """Check that the loss falls by more than `falls_by` from the first steps to the last."""
    losses, _ = trained([*words, f"max_steps={steps}", "eval.at_end=false"])
    assert sum(losses[:3]) / 3 - sum(losses[-3:]) / 3 > falls_by


def parameters_of(option):
    """Return the number of parameters of an option of the group `model`, made without memory."""
    config = one([f"model={option}"]).config.model
    arguments = {name: value for name, value in config.items() if name != "_target_"}
    module, _, name = config["_target_"].rpartition(".")
    with torch.device("meta"):
        model = getattr(__import__(module, fromlist=[name]), name)(**arguments)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    return sum(parameter.numel() for parameter in model.parameters())


def cross_entropy_of(model, batch):
    """Return the loss of a classifier on a micro-batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def checked_sample(config, real):
    """Check that the declared sample of a config has the names, shapes and types of a real one, and return it."""
    declared = parse_sample(config.sample)
    values = list(real.values()) if isinstance(real, dict) else list(real)
    assert [item.name for item in declared] == (list(real) if isinstance(real, dict) else [None] * len(values))
    assert [(item.shape, item.dtype) for item in declared] == [(tuple(v.shape), v.dtype) for v in values]
    return declared
