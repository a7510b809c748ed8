"""Comparing two runs: what counts as a difference."""

import math

import pytest
import torch

from ipurun.selftest.compare import Numbers, compare, tensor_sides, tolerances
from ipurun.selftest.outcome import Outcome
from ipurun.selftest.report import document_of, row

BEFORE = {"w": torch.zeros(4), "b": torch.zeros(2)}
FLOAT32 = tolerances("32.32", "cpu")


def numbers(loss=1.0, w=1.0, b=1.0, **others):
    return Numbers([loss], {"w": torch.full((4,), w), "b": torch.full((2,), b)}, **others)


def wrong(found, expected):
    return [item.what for item in compare(found, expected, BEFORE, FLOAT32) if not item.agrees]


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (numbers(), []),
        (numbers(loss=1.001), ["training loss"]),
        (numbers(loss=math.nan), ["training loss"]),
        (Numbers([1.0, 1.0], numbers().weights), ["training loss"]),
        (numbers(w=1.001), ["change of w"]),
        (numbers(b=math.nan), ["change of b"]),
        (Numbers([1.0], {"w": torch.ones(4)}), ["change of b"]),
        (Numbers([1.0], {"w": torch.ones(4), "b": torch.ones(3)}), ["change of b"]),
    ],
)
def test_a_difference_is_named(found, what):
    assert wrong(found, numbers()) == what


def test_a_parameter_that_hardly_changes_may_differ_by_noise():
    assert wrong(numbers(b=2e-8), numbers(b=1e-8)) == []
    assert wrong(numbers(b=2e-3), numbers(b=1e-3)) == ["change of b"]


def test_buffers_and_predictions_are_compared():
    expected = numbers(buffers={"mean": torch.ones(3), "count": torch.tensor(1)}, outputs=[torch.ones(2, 2)])
    found = numbers(buffers={"mean": torch.ones(3) * 2, "count": torch.tensor(0)}, outputs=[torch.ones(2, 3)])
    assert wrong(found, expected) == ["buffer mean", "prediction 0"]
    assert wrong(numbers(), expected) == ["buffer mean", "prediction 0"]
    assert wrong(expected, expected) == []


def test_the_values_that_differ_most_come_first():
    sides = tensor_sides(torch.tensor([1.0, 5.0, math.nan]), torch.tensor([1.0, 2.0, 3.0]))
    assert [item["index"] for item in sides["values_that_differ_most"]] == [2, 1, 0]
    assert sides["found"]["not_finite"] == 1


def test_a_device_has_wider_tolerances_and_float16_the_widest():
    order = [tolerances("32.32", "cpu"), tolerances("32.32", "ipu"), tolerances("16.32", "ipu")]
    assert order == sorted(order, key=lambda item: item.weights)
    assert tolerances("16.16", "cpu") == tolerances("16.32", "ipu")


def test_a_row_fits_a_narrow_terminal():
    outcome = Outcome("sgd", "failed", "RuntimeError: a message that takes\ntwo lines and is far too long for a row")
    line = row(outcome, ["sgd", "replicated"], 60)
    assert len(line) == 60 and line.endswith("...") and "\n" not in line


def test_a_document_is_strict_json_without_secrets():
    document = document_of({}, {"environment": {"POPLAR_TOKEN": "s3cret"}}, ["wandb.api_key=abc"], value=math.inf)
    assert document["value"] == "inf"
    assert document["versions"]["environment"] == {"POPLAR_TOKEN": "(left out)"}
    assert document["command"][-1] == "wandb.api_key=(left out)"
