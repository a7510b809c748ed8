"""Metrics against values computed by hand or by plain PyTorch."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from ipurun import metrics
from ipurun.inspect.metrics import check_metrics, check_monitor, make_metrics, monitored

SCORES = torch.tensor([[9.0, 1.0, 0.0], [0.0, 2.0, 3.0], [5.0, 4.0, 0.0], [0.0, 1.0, 7.0]])
CLASSES = torch.tensor([0, 1, 1, 2])


def _value(metric: Any, outputs: torch.Tensor, targets: torch.Tensor, parts: int = 1) -> float:
    metric.reset()
    for out, target in zip(outputs.chunk(parts), targets.chunk(parts)):
        metric.update(out, target)
    return float(metric.compute())


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accuracy(parts: int) -> None:
    assert _value(metrics.Accuracy(), SCORES, CLASSES, parts) == 0.5
    assert _value(metrics.TopKAccuracy(k=2), SCORES, CLASSES, parts) == 1.0
    assert _value(metrics.TopKAccuracy(k=1), SCORES, CLASSES, parts) == 0.5


def test_top_k_larger_than_the_classes() -> None:
    assert _value(metrics.TopKAccuracy(k=50), SCORES, CLASSES) == 1.0


def test_accuracy_of_sequences_in_both_layouts() -> None:
    scores = torch.zeros(2, 5, 3)  # batch, positions, classes
    targets = torch.randint(0, 3, (2, 5), generator=torch.Generator().manual_seed(1))
    scores.scatter_(2, targets.unsqueeze(2), 1.0)
    scores[0, 0] = torch.roll(scores[0, 0], 1)
    assert _value(metrics.Accuracy(), scores, targets) == pytest.approx(0.9)
    assert _value(metrics.Accuracy(), scores.transpose(1, 2), targets) == pytest.approx(0.9)


def test_ignored_targets_do_not_count() -> None:
    targets = torch.tensor([0, -100, 1, 2])
    assert _value(metrics.Accuracy(ignore_index=-100), SCORES, targets) == pytest.approx(2 / 3)


def test_accuracy_of_class_probabilities() -> None:
    targets = torch.nn.functional.one_hot(CLASSES, 3).float()
    assert _value(metrics.Accuracy(), SCORES, targets) == 0.5


def test_binary_accuracy() -> None:
    outputs, targets = torch.tensor([[0.3], [-2.0], [4.0], [-0.1]]), torch.tensor([1, 0, 0, 0])
    assert _value(metrics.BinaryAccuracy(), outputs, targets) == 0.75
    assert _value(metrics.BinaryAccuracy(threshold=0.5), outputs, targets) == 0.5


@pytest.mark.parametrize("parts", [1, 3])
def test_errors(parts: int) -> None:
    outputs, targets = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 4.0, 1.0])
    assert _value(metrics.MeanSquaredError(), outputs, targets, parts) == pytest.approx(20 / 3)
    assert _value(metrics.RootMeanSquaredError(), outputs, targets, parts) == pytest.approx(math.sqrt(20 / 3))
    assert _value(metrics.MeanAbsoluteError(), outputs, targets, parts) == pytest.approx(2.0)


def test_errors_of_a_column_do_not_broadcast() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 4.0, 1.0])
    assert _value(metrics.MeanAbsoluteError(), outputs, targets) == pytest.approx(2.0)


def test_perplexity() -> None:
    expected = math.exp(torch.nn.functional.cross_entropy(SCORES, CLASSES).item())
    assert _value(metrics.Perplexity(), SCORES, CLASSES, 2) == pytest.approx(expected)
    assert _value(metrics.Perplexity(), torch.zeros(4, 3), CLASSES) == pytest.approx(3.0)


def test_f1_is_the_mean_over_classes() -> None:
    # predicted 0 2 0 2, true 0 1 1 2: class 0 and 2 have precision 1/2 and recall 1, class 1 is never hit
    assert _value(metrics.F1(), SCORES, CLASSES, 2) == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)


def test_mismatched_shapes_are_reported() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        _value(metrics.Accuracy(), torch.zeros(4, 3), torch.zeros(5, dtype=torch.long))


def test_no_samples_give_nan() -> None:
    assert math.isnan(metrics.Accuracy().compute())


def test_declared_in_a_config() -> None:
    nodes = {
        "accuracy": {"_target_": "ipurun.metrics.Accuracy"},
        "perplexity": {True: ["train"]},  # YAML reads a bare `on` as true
        "top5": {"k": 2, "on": "eval"},
        "spread": {"_target_": "run_toys.spread", "on": ["train", "eval"], "higher_is_better": False},
    }
    assert check_metrics(nodes) == []
    during, after = make_metrics(nodes, "train"), make_metrics(nodes, "eval")
    after.update(SCORES.half(), CLASSES)
    during.update(SCORES, CLASSES)
    assert set(during.compute()) == {"perplexity", "spread"}
    assert after.compute() == {"accuracy": 0.5, "top5": 1.0, "spread": 9.0}
    assert [after.higher_is_better(name) for name in ("accuracy", "spread", "loss")] == [True, False, False]


def test_a_function_is_averaged_by_rows() -> None:
    made = make_metrics({"spread": {"_target_": "run_toys.spread"}}, "eval")
    made.update(SCORES[:3], CLASSES[:3])
    made.update(SCORES[3:], CLASSES[3:])
    assert made.compute()["spread"] == pytest.approx((3 * 9.0 + 7.0) / 4)


def test_objects_with_the_interface_of_torchmetrics() -> None:
    made = make_metrics({"parts": {"_target_": f"{__name__}.Parts"}}, "eval")
    made.update(SCORES, CLASSES)
    assert made.compute() == {"parts/rows": 4.0}


class Parts:
    """Has the interface of a torchmetrics collection."""

    def __init__(self) -> None:
        self.rows = 0

    def reset(self) -> None:
        self.rows = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.rows += len(outputs)

    def compute(self) -> dict:
        return {"rows": torch.tensor(self.rows)}


def test_monitor_is_the_first_metric_or_the_loss() -> None:
    assert monitored(None, {}) == "loss"
    assert monitored(None, {"a": {"on": ["train"]}, "accuracy": {}}) == "accuracy"
    assert monitored("loss", {"accuracy": {}}) == "loss"
    assert check_monitor("monitor", "accuracy", {"accuracy": {}}) == []
    (problem,) = check_monitor("monitor", "acuracy", {"accuracy": {}})
    assert problem.fix == "monitor=accuracy"


@pytest.mark.parametrize(
    ("nodes", "part"),
    [
        ({"sharpness": {}}, "`metrics.sharpness` has no `_target_`"),
        ({"accuracy": {"ignore_indx": 3}}, "ignore_indx"),
        ({"accuracy": {"on": ["test"]}}, "`test` is not a phase"),
        ({"m": {"_target_": "ipurun.metrics.Acuracy"}}, "Acuracy"),
        ({"m": {"_target_": "run_toys.spread", "wide": 1}}, "wide"),
        ({"m": {"_target_": "ipurun.metrics.TopKAccuracy", "kk": 1}}, "kk"),
    ],
)
def test_wrong_declarations(nodes: Any, part: str) -> None:
    (problem,) = check_metrics(nodes)
    assert part in problem.what


def test_a_confusion_matrix_counts_what_was_taken_for_what() -> None:
    found = make_metrics({"confusion_matrix": {}, "f1": {"average": "none"}, "accuracy": None}, "eval")
    found.update(SCORES[:3], CLASSES[:3])
    found.update(SCORES[3:], CLASSES[3:])
    values = found.compute()
    assert found.matrices == {"confusion_matrix": [[1, 0, 0], [1, 0, 1], [0, 0, 1]]}
    # 2 * hits / (predicted + actual) of each class, by hand.
    assert values == pytest.approx({"f1/0": 2 / 3, "f1/1": 0.0, "f1/2": 2 / 3, "f1": 4 / 9, "accuracy": 0.5})
    found.reset()
    found.update(SCORES[:1], CLASSES[:1])
    found.compute()
    assert found.matrices == {"confusion_matrix": [[1, 0, 0], [0, 0, 0], [0, 0, 0]]}


@pytest.mark.parametrize(
    ("value", "kind"), [((torch.ones(3), torch.ones(3)), "tuple"), (torch.ones(2, 2, 2), r"shape \(2, 2, 2\)")]
)
def test_a_metric_that_is_not_a_number_is_named(value: Any, kind: str) -> None:
    class Curve(metrics.Accuracy):
        def compute(self) -> Any:
            return value

    with pytest.raises(ValueError, match=rf"`metrics.roc` is not a number, .* \({kind}\)"):
        metrics.MetricSet({"roc": Curve()}).compute()


def test_a_matrix_does_not_select_the_best_checkpoint() -> None:
    assert monitored(None, {"confusion_matrix": {}, "accuracy": {}}) == "accuracy"
    assert monitored(None, {"table": {"_target_": "torchmetrics.ConfusionMatrix"}}) == "loss"


class AUROCLike:
    """A look-alike of a class of torchmetrics."""

    higher_is_better = True

    def __init__(self, task: str) -> None:
        self.task = task

    def reset(self) -> None:
        pass

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        pass

    def compute(self) -> torch.Tensor:
        return torch.tensor(0.25)


@pytest.mark.parametrize("name", ["AUROC", "auroc"])
def test_metrics_of_torchmetrics_are_known_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchmetrics")
    module.AUROC = AUROCLike  # type: ignore[attr-defined]  # a fake package
    monkeypatch.setitem(sys.modules, "torchmetrics", module)
    assert make_metrics({name: {"task": "binary"}}, "eval").compute() == {name: 0.25}
    assert "no argument `tusk`" in str(check_metrics({name: {"tusk": "binary"}})[0])


def test_an_unknown_metric_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert "pip install 'ipurun[metrics]'" in str(check_metrics({"auroc": {"task": "binary"}})[0])
