"""Overlapped IO: no effect on results, and PopTorch's rules for using it."""

import pytest
import torch

import ipurun.emulator as poptorch

LOOP = poptorch.OverlapMode.OverlapAccumulationLoop


def overlap_options(strategy=poptorch.ShardedExecution, tiles=32, mode=None):
    options = poptorch.Options()
    options.setExecutionStrategy(strategy())
    if tiles:
        options.TensorLocations.numIOTiles(tiles)
    if mode is not None:
        options.outputMode(mode)
    return options


def run(forward, options):
    class Model(torch.nn.Module):
        def forward(self, x):
            return forward(x)

    return poptorch.inferenceModel(Model(), options)(torch.tensor([1.0]))


def both_marked(x):
    x = poptorch.set_overlap_for_input(x, LOOP)
    return poptorch.set_overlap_for_output(x + 1, LOOP)


def input_used_twice(x):
    y = x + 1
    return y, poptorch.set_overlap_for_input(x, LOOP)


def mark_on_no_input(x):
    y = x + 1
    return y, poptorch.set_overlap_for_input(y, LOOP)


def returned_twice(x):
    y = x + 1
    return y, poptorch.set_overlap_for_output(y, LOOP)


def mark_on_no_output(x):
    return poptorch.set_overlap_for_output(x, LOOP) + 1


def reused_before(x):
    y = x + 1
    return poptorch.set_overlap_for_output(y, LOOP), y + 1


def reused_after(x):
    y = poptorch.set_overlap_for_output(x + 1, LOOP)
    return y, y + 1


def test_results_are_the_same_without_overlap():
    assert run(both_marked, overlap_options()).item() == 2.0
    assert [t.item() for t in run(reused_before, overlap_options())] == [2.0, 3.0]
    assert [t.item() for t in run(reused_after, overlap_options())] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (input_used_twice, r"must be the only op applied to an input\. .*input x to the model"),
        (mark_on_no_input, "set_overlap_for_input applied on a node which is not a tensor input to the model"),
        (returned_twice, "set_overlap_for_output cannot be used with a tensor that is returned twice"),
        (mark_on_no_output, "set_overlap_for_output applied on a node which is not a tensor output"),
    ],
)
def test_misplaced_marks_are_refused(forward, message):
    with pytest.raises(poptorch.Error, match=message):
        run(forward, overlap_options())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: overlap_options(poptorch.PipelinedExecution), "not supported with poptorch.PipelinedExecution"),
        (lambda: overlap_options(tiles=0), "No IO tiles allocated"),
        (lambda: overlap_options(mode=poptorch.OutputMode.Final), "output mode"),
    ],
)
def test_incompatible_options_are_refused(options, message):
    with pytest.raises(poptorch.Error, match=message):
        run(both_marked, options())


def test_no_overlap_needs_no_settings():
    def forward(x):
        x = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap)
        return poptorch.set_overlap_for_output(x * 3, poptorch.OverlapMode.NoOverlap)

    assert run(forward, poptorch.Options()).item() == 3.0
