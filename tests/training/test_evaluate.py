"""Evaluation and prediction: exact for every sample, even if the last host call is not full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_harness import Folder, Recorder, built
from run_toys import Net, OwnLossNet, Points
from torch import nn

from ipurun.checkpoint import latest
from ipurun.errors import ConfigError, RunError
from ipurun.inspect.sampling import seeded
from ipurun.training.evaluate import evaluate, gathered, predict
from ipurun.training.loop import train
from ipurun.training.state import load_weights


def _expected(model_class: type = Net, samples: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    with seeded(0):
        model = model_class()
    data = Points(samples, offset=1000)
    with torch.no_grad():
        return model(data.x), data.y


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (10, {}),  # 4 + 4 + 2: half of the last micro-batch is padding
        (12, {}),
        (3, {}),  # less than one micro-batch
        (10, {"device_iterations": 2}),
        (10, {"devices": 2}),
        (7, {"device_iterations": 2, "devices": 2, "micro_batch_size": 1}),
        (10, {"inference__micro_batch_size": 3, "inference__device_iterations": 3}),
        (10, {"loader__workers": 1}),
    ],
)
def test_padding_is_left_out_of_loss_and_metrics(samples: int, sizes: Any) -> None:
    run = built(data={"_target_": "run_toys.pair", "evaluation": samples}, **sizes)
    result = evaluate(run, Recorder())
    outputs, targets = _expected(samples=samples)
    assert result.samples == samples
    assert result.metrics["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), abs=1e-5)
    assert result.metrics["accuracy"] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())


def test_sum_reduction_is_scaled_to_a_micro_batch() -> None:
    run = built(loss__args={"reduction": "sum"})
    outputs, targets = _expected()
    per_sample = nn.functional.cross_entropy(outputs, targets).item()
    assert evaluate(run, Recorder()).metrics["loss"] == pytest.approx(4 * per_sample, abs=1e-4)


def test_a_limit_of_samples() -> None:
    result = evaluate(built(eval__max_samples=6), Recorder())
    outputs, targets = _expected()
    assert result.samples == 6
    assert result.metrics["accuracy"] == pytest.approx((outputs.argmax(1) == targets)[:6].float().mean().item())


def test_a_stream_is_evaluated_to_its_end() -> None:
    run = built(data={"_target_": "run_toys.Stream", "length": 32, "_eval_": {"length": 10}})
    result = evaluate(run, Recorder())
    with seeded(0):
        model = Net()
    data = Points(10)
    assert result.samples == 10
    assert result.metrics["loss"] == pytest.approx(nn.functional.cross_entropy(model(data.x), data.y).item(), abs=1e-5)


def test_a_limit_on_a_stream() -> None:
    run = built(data={"_target_": "run_toys.Stream", "_eval_": {"length": 30}}, eval__max_samples=6)
    assert evaluate(run, Recorder()).samples == 6


@pytest.mark.parametrize("samples", [8, 10, 9])
def test_model_with_its_own_loss(samples: int) -> None:
    """A last micro-batch of 2 or 1 is repeated to fill 4 rows, which does not change its mean."""
    run = built(
        model={"_target_": "run_toys.OwnLossNet"},
        loss__name=None,
        data={"_target_": "run_toys.pair", "evaluation": samples},
    )
    with seeded(0):
        model = OwnLossNet()
    data = Points(samples, offset=1000)
    outputs, loss = model(data.x, data.y)
    result = evaluate(run, Recorder())
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert result.metrics["accuracy"] == pytest.approx((outputs.argmax(1) == data.y).float().mean().item())


def test_dropout_is_off_in_evaluation_and_on_again_in_training(tmp_path: Path) -> None:
    run = built(model={"_target_": "run_toys.Net", "dropout": 0.9}, eval__every_epochs=1)
    outputs, targets = _expected()
    assert evaluate(run, Recorder()).metrics["loss"] == pytest.approx(
        nn.functional.cross_entropy(outputs, targets).item(), abs=1e-5
    )
    recorder = Recorder()
    train(run, Folder(tmp_path), [recorder])
    with seeded(0):
        plain = Net()
    data = run.train_loader._data
    first = data.loaded[:4]
    without = nn.functional.cross_entropy(plain(data.x[first]), data.y[first]).item()
    assert abs(recorder.losses[0] - without) > 1e-4


def test_evaluation_sees_the_trained_weights(tmp_path: Path) -> None:
    run, recorder = built(epochs=4), Recorder()
    summary = train(run, Folder(tmp_path), [recorder])
    data = Points(10, offset=1000)
    with torch.no_grad():
        model = Net()
        model.load_state_dict(run.user_model.state_dict())
        expected = nn.functional.cross_entropy(model(data.x), data.y).item()
    assert summary.metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert len({event.metrics["loss"] for event in recorder.events["eval"]}) == 4


def test_the_test_split_by_name() -> None:
    run = built(data={"_target_": "run_toys.triple"})
    assert run.eval_split == "eval"
    assert evaluate(run, Recorder(), "test").samples == 6
    assert built(data={"_target_": "run_toys.triple"}, eval__split="test").eval_split == "test"


def test_an_unknown_split_is_reported() -> None:
    with pytest.raises(ConfigError, match="no split `tset`"):
        evaluate(built(), Recorder(), "tset")
    with pytest.raises(ConfigError, match=r"eval\.split=tset"):
        built(eval__split="tset")


def test_a_metric_that_fails_is_explained() -> None:
    run = built(metrics={"mse": {}})
    with pytest.raises(RunError, match="computing metrics"):
        evaluate(run, Recorder())


def test_predictions_are_in_the_order_of_the_data() -> None:
    for sizes in ({}, {"device_iterations": 2, "devices": 2}):
        run = built(**sizes)
        assert torch.allclose(gathered(predict(run, "eval", Recorder()))["output"], _expected()[0], atol=1e-6)


def test_predictions_of_models_with_their_own_loss() -> None:
    run = built(model={"_target_": "run_toys.OwnLossNet"}, loss__name=None)
    assert gathered(predict(run, "eval", Recorder()))["output"].shape == (10, 3)
    run = built(
        model={"_target_": "run_toys.NamedNet"}, data={"_target_": "run_toys.mapping", "named": True}, loss__name=None
    )
    found = gathered(predict(run, "eval", Recorder()))["output"]
    assert set(found) == {"logits"} and found["logits"].shape == (10, 3)


def test_weights_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    trained_run = built(epochs=1)
    train(trained_run, Folder(tmp_path), [])
    run = built()
    progress = load_weights(run.user_model, latest(tmp_path / "checkpoints"))
    assert progress.step == 8
    expected = Net()
    expected.load_state_dict(trained_run.user_model.state_dict())
    with torch.no_grad():
        wanted = expected(Points(10, offset=1000).x)
    assert torch.allclose(gathered(predict(run, "eval", Recorder()))["output"], wanted, atol=1e-6)


def test_half_precision_predicts_in_half() -> None:
    found = gathered(predict(built(precision="16.16"), "eval", Recorder()))["output"]
    assert found.dtype == torch.float16
    assert torch.allclose(found.float(), _expected()[0], atol=1e-2)


def test_the_progress_of_evaluations_is_reported() -> None:
    run, recorder = built(inference__device_iterations=1), Recorder()
    evaluate(run, recorder)
    assert recorder.events["eval_progress"] == [("eval", 4, 10), ("eval", 8, 10), ("eval", 10, 10)]
