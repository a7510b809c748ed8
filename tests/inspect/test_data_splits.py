"""All forms of data that a config can name."""

from __future__ import annotations

from typing import Any

import pytest

from ipurun.errors import ConfigError
from ipurun.inspect.data import check_data, check_sample, length_of, make_splits, notes_of, split_for_eval

HERE = __name__


def a_list() -> list:
    return [(1.0, 2), (3.0, 4)]


def only_eval() -> dict:
    return {"validation": [1], "train": None}


def half_broken() -> dict:
    return {"train": [1], "eval": 7}


@pytest.mark.parametrize(
    ("node", "lengths"),
    [
        ({"_target_": "run_toys.Points", "length": 9}, {"train": 9}),
        ({"_target_": "run_toys.Points", "length": 9, "_eval_": {"length": 4}}, {"train": 9, "eval": 4}),
        (
            {"_target_": "run_toys.Points", "_eval_": {"offset": 5}, "_test_": {"length": 3}},
            {"train": 32, "eval": 32, "test": 3},
        ),
        ({"_target_": "run_toys.pair"}, {"train": 32, "eval": 10}),
        ({"_target_": "run_toys.triple"}, {"train": 32, "eval": 8, "test": 6}),
        ({"_target_": "run_toys.mapping"}, {"train": 32, "eval": 10}),
        ({"_target_": "run_toys.Stream"}, {"train": None}),
        ({"_target_": f"{HERE}.a_list"}, {"train": 2}),
    ],
)
def test_forms_of_data(node: Any, lengths: Any) -> None:
    assert check_data(node) == []
    assert {name: length_of(data) for name, data in make_splits(node).items()} == lengths


def test_the_eval_split_inherits_the_train_arguments() -> None:
    splits = make_splits({"_target_": "run_toys.Points", "jitter": 0.5, "_eval_": {"jitter": 0.0, "offset": 3}})
    assert splits["train"].jitter == 0.5 and splits["eval"].jitter == 0.0
    assert splits["eval"].x[0].equal(splits["train"].x[3])


def test_no_data_at_all() -> None:
    (problem,) = check_data({})
    assert "no data" in problem.what and "data=synthetic" in problem.fix


def test_wrong_arguments_of_the_eval_split() -> None:
    (problem,) = check_data({"_target_": "run_toys.Points", "_eval_": {"lenght": 3}})
    assert "`data._eval_.lenght`" in problem.what


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("run_toys.no_data", "did not return a data set for the split `train`"),
        (f"{HERE}.only_eval", "did not return the split `train`"),
        (f"{HERE}.half_broken", "did not return a data set for the split `eval`"),
    ],
)
def test_targets_that_do_not_return_data(target: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        make_splits({"_target_": target})


def test_which_split_is_evaluated() -> None:
    assert split_for_eval({"train": 1, "test": 2}, None) == "test"
    assert split_for_eval({"train": 1, "eval": 3, "test": 2}, None) == "eval"
    assert split_for_eval({"train": 1}, None) is None
    assert split_for_eval({"train": 1, "eval": 3}, "validation") == "eval"
    assert split_for_eval({"train": 1}, "train") == "train"


def test_notes_are_collected_once() -> None:
    class Noted:
        notes = ("a subset",)

    class Said:
        notes = "one line"

    assert notes_of(Noted(), Noted(), Said(), object()) == ("a subset", "one line")


@pytest.mark.parametrize("sample", [("a word", 1), {"text": "a word", "label": 1}, (b"raw", 1), ([1, ["deep"]], 1)])
def test_text_in_a_sample_is_refused(sample: Any) -> None:
    (problem,) = check_sample(sample)
    assert "takes only tensors" in problem.what
    assert "loader.collate" in problem.fix


@pytest.mark.parametrize("sample", [None, (1.0, 2), {"x": 1.0, "y": 3}, 4])
def test_samples_of_numbers_pass(sample: Any) -> None:
    assert check_sample(sample) == []
