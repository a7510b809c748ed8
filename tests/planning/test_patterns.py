"""One grammar of names and patterns for all keys that take modules or parameters."""

from __future__ import annotations

from typing import List

import pytest

from ipurun.config.patterns import check_parameters, match_modules, match_parameters
from ipurun.errors import Findings

NAMES = (
    "encoder.0.bias",
    "encoder.0.attn.bias",
    "encoder.0.attn.weight",
    "encoder.0.norm1.weight",
    "encoder.1.norm1.bias",
    "head.bias",
    "bias",
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head.bias", ["head.bias"]),
        ("head/bias", ["head.bias"]),
        ("encoder.*.bias", ["encoder.0.bias"]),
        ("encoder.**.bias", ["encoder.0.bias", "encoder.0.attn.bias", "encoder.1.norm1.bias"]),
        ("*.bias", ["encoder.0.bias", "encoder.0.attn.bias", "encoder.1.norm1.bias", "head.bias"]),
        ("*bias", ["encoder.0.bias", "encoder.0.attn.bias", "encoder.1.norm1.bias", "head.bias", "bias"]),
        ("encoder.[0-3].attn.?eight", ["encoder.0.attn.weight"]),
        (r"re:encoder\.\d\.bias", ["encoder.0.bias"]),
    ],
)
def test_modules_and_parameters_are_matched_the_same_way(pattern: str, expected: List[str]) -> None:
    found = Findings()
    assert match_modules(pattern, "pipeline.split", NAMES, found) == expected
    assert match_parameters(pattern, NAMES) == expected
    assert found.problems == []


def test_a_parameter_pattern_that_ends_in_a_wildcard_matches_parameters_inside() -> None:
    assert match_parameters("*norm*", NAMES) == ["encoder.0.norm1.weight", "encoder.1.norm1.bias"]
    assert match_parameters("encoder.0.*", NAMES) == list(NAMES[:4])


def test_a_pattern_that_would_match_fewer_parameters_than_before_is_refused() -> None:
    found = Findings()
    check_parameters("encoder.*.bias", "optimizer.groups.0", NAMES, found)
    (problem,) = found.problems
    assert problem.key == "optimizer.groups.0"
    assert problem.seen.startswith("1 of 3 parameters match") and "encoder.0.attn.bias" in problem.seen
    wide, exact = "encoder.**.bias", r"re:encoder\.([^.]*)\.bias"
    assert f"`{wide}` for all 3" in problem.fix and f"`{exact}` for only the 1" in problem.fix
    assert len(match_parameters(wide, NAMES)) == 3 and match_parameters(exact, NAMES) == ["encoder.0.bias"]


@pytest.mark.parametrize("pattern", ["*bias", "*.bias", "*norm*", "encoder.*", "encoder.**.bias", "encoder.0.*"])
def test_common_patterns_keep_matching_what_they_matched(pattern: str) -> None:
    found = Findings()
    check_parameters(pattern, "optimizer.groups.0", NAMES, found)
    assert found.problems == []


def test_a_broken_expression_is_reported_for_parameters_as_for_modules() -> None:
    found = Findings()
    check_parameters("re:(", "optimizer.groups.0", NAMES, found)
    assert match_modules("re:(", "pipeline.split", NAMES, found) == []
    assert ["is not a regular expression" in problem.what for problem in found.problems] == [True, True]
