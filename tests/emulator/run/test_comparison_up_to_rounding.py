"""Comparing two ways to compute a gradient: rounding errors are accepted, wrong values are not."""

import pytest
import torch

from ipurun.emulator._run.chunks import alike, largest


def test_a_gradient_that_cancels_may_be_any_rounding_of_its_terms():
    # A bias before a norm: values from a model that was wrongly refused on one machine.
    expected, got = torch.tensor([7.9e-7, -1e-7]), torch.tensor([7.4e-7, -1e-7])
    assert alike(expected, got, among=0.44)
    assert not alike(expected, got, among=0.0)


def test_a_long_sum_may_be_rounded_more_than_a_result():
    expected = torch.tensor([0.3, -0.1])
    assert alike(expected, expected * (1 + 5e-4), among=0.3)
    assert not alike(expected, expected * (1 + 5e-4))


@pytest.mark.parametrize("wrong", [1e-3, -1e-3])
def test_a_wrong_small_gradient_is_detected_next_to_large_ones(wrong):
    expected = torch.tensor([1e-3, 2e-4])
    assert alike(expected, expected * (1 + 1e-5), among=0.44)
    assert not alike(expected, expected * (1 + 10 * wrong), among=0.44)


def test_shapes_types_and_whole_numbers_must_be_equal():
    ones = torch.ones(2)
    assert not alike(ones, torch.ones(1, 2))
    assert not alike(ones, ones.half())
    assert alike(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not alike(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_nan_equals_nan_and_has_no_magnitude():
    nan = torch.tensor([float("nan"), 2.0])
    assert alike(nan, nan.clone())
    assert largest([nan, torch.tensor([-3.0]), torch.tensor([7])]) == 3.0
    assert largest([]) == 0.0
