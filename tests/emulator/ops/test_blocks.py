"""Block annotations: where the ops of a model are placed, and what is refused."""

import copy
import pickle

import pytest
import torch

import ipurun.emulator as poptorch


class Times(torch.nn.Module):
    """Multiplies, so that each layer is one op."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Layers(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList([Times() for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def plus_one(x):
    return x + 1


def compiled(model, strategy=None, device_iterations=8):
    options = poptorch.Options().deviceIterations(device_iterations)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    executor = poptorch.inferenceModel(model, options)
    executor.compile(torch.ones(device_iterations, 2))
    return executor


def places(executor, what):
    """Return an attribute of the placement of every multiplication in the compiled model, in order."""
    return [getattr(placement, what) for op, placement, _ in executor.placements() if op == "mul"]


def increment():
    return poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)


def test_ops_before_the_first_block_are_on_ipu_0():
    model = Layers(3)
    poptorch.BeginBlock(model.layers[1], ipu_id=1)
    executor = compiled(model)
    assert places(executor, "ipu_id") == [0, 1, 1]
    assert places(executor, "stage_id") == [0, 1, 1]


def test_auto_increment_counts_blocks_and_keeps_the_block_ipu():
    model = Layers(4)
    for index, ipu in ((1, 1), (2, 2), (3, 1)):
        poptorch.BeginBlock(model.layers[index], ipu_id=ipu)
    executor = compiled(model, increment())
    assert places(executor, "stage_id") == [0, 1, 2, 3]
    assert places(executor, "ipu_id") == [0, 1, 2, 1]


def test_inline_blocks_and_their_automatic_names():
    def forward(x):
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = x * 2
        with poptorch.Block("named", ipu_id=1):
            x = x * 3
        with poptorch.Block(ipu_id=1):
            return x * 4

    executor = compiled(Calls(forward))
    assert places(executor, "block_id") == ["0", "named", "1"]
    assert places(executor, "ipu_id") == [0, 1, 1]


def test_block_start_lasts_until_the_next_block():
    def forward(x):
        poptorch.Block.start("a", ipu_id=0)
        x = x * 2 * 3
        poptorch.Block.start("b", ipu_id=1)
        return x * 4

    assert places(compiled(Calls(forward)), "block_id") == ["a", "a", "b"]


def test_ops_after_a_block_ended_are_refused():
    def forward(x):
        with poptorch.Block("a", ipu_id=0):
            x = x * 4
        return x * 4

    with pytest.raises(poptorch.Error, match="No active Block"):
        compiled(Calls(forward))


def test_block_function_places_the_ops_of_the_function():
    class Model(torch.nn.Module):
        @poptorch.BlockFunction("first", ipu_id=0)
        def first(self, x, plus):
            return x * 2 + plus

        @poptorch.BlockFunction("second", ipu_id=1)
        def second(self, x):
            return x * 3

        def forward(self, x):
            return self.second(self.first(x, plus=1))

    model = Model()
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 9.0))
    executor = compiled(model)
    assert places(executor, "block_id") == ["first", "second"]
    assert model.first.__name__ == "first"


def test_listed_stages_determine_stage_and_ipu():
    def forward(x):
        for name in "ABCDE":
            with poptorch.Block(name):
                x = x * 2
        return x

    strategy = poptorch.PipelinedExecution("A", poptorch.Stage("B", "C"), ["D", "E"])
    strategy.stage("D").ipu(3)
    executor = compiled(Calls(forward), strategy)
    assert places(executor, "stage_id") == [0, 1, 1, 2, 2]
    assert places(executor, "ipu_id") == [0, 1, 1, 3, 3]
    with pytest.raises(AssertionError, match="Unknown Block"):
        compiled(Calls(forward), poptorch.ShardedExecution("A", "B"))


def returning(reads_the_later_stage):
    """Return a model whose second use of block "a" follows block "b", as the decoder embedding of BART does."""

    def forward(x):
        with poptorch.Block("a", ipu_id=0):
            first = x * 2
        with poptorch.Block("b", ipu_id=1):
            second = first + 1
        with poptorch.Block("a", ipu_id=0):
            third = (second if reads_the_later_stage else x) * 3
        with poptorch.Block("c", ipu_id=1):
            return second + third

    return Calls(forward)


def test_a_block_may_be_used_again_but_not_read_a_later_stage():
    strategy = poptorch.PipelinedExecution("a", "b", "c")
    assert places(compiled(returning(False), strategy), "stage_id") == [0, 0]
    with pytest.raises(poptorch.Error, match=r"block 'a' in stage 0 reads a result of block 'b' in stage 1"):
        compiled(returning(True), strategy)


def test_phases():
    def forward(x):
        for phase, ipu in (("0", 0), ("1", 1), ("2", 0)):
            with poptorch.Block(phase, ipu_id=ipu):
                x = x * 2
        return x

    executor = compiled(Calls(forward), poptorch.ParallelPhasedExecution("0", "1", "2"), 1)
    assert places(executor, "phase_id") == [0, 1, 2]
    assert places(executor, "ipu_id") == [0, 1, 0]


def test_same_as_ipu_needs_an_ipu():
    model = Layers(2)
    poptorch.BeginBlock(model.layers[1], "no_ipu")
    with pytest.raises(AssertionError, match="no_ipu"):
        compiled(model)


def test_begin_block_returns_the_module_and_refuses_a_second_block():
    layer = Times()
    assert poptorch.BeginBlock(layer, "a", ipu_id=0) is layer
    with pytest.raises(poptorch.Error, match="already been assigned to a block"):
        poptorch.BeginBlock(layer, "b", ipu_id=1)


def test_begin_block_wraps_a_function():
    wrapped = poptorch.BeginBlock(lambda x, plus=0: x * 3 + plus, "f", ipu_id=1)
    assert isinstance(wrapped, torch.nn.Module)
    assert torch.equal(wrapped(torch.ones(2), plus=1), torch.full((2,), 4.0))
    executor = compiled(Calls(lambda x: wrapped(x * 2)))
    assert places(executor, "ipu_id") == [0, 1]


def test_wrapped_function_keeps_its_ids_and_can_be_pickled():
    wrapped = poptorch.BeginBlock(plus_one, "one", 2)
    twin = pickle.loads(pickle.dumps(wrapped))
    assert (twin._user_id, twin._ipu_id) == ("one", 2)
    assert torch.equal(twin(torch.zeros(1)), torch.ones(1))


def test_begin_block_does_not_change_names_and_results():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    x = torch.randn(3, 2)
    before, keys = model(x), list(model.state_dict())
    poptorch.BeginBlock(model[1], ipu_id=1)
    assert torch.equal(model(x), before)
    assert list(model.state_dict()) == keys


def test_begin_block_keeps_the_automatic_name_of_its_first_capture():
    model = Layers(2)
    for layer in model.layers:
        poptorch.BeginBlock(layer)
    strategy = increment()
    assert places(compiled(model, strategy), "block_id") == ["0", "1"]
    assert places(compiled(model, strategy), "block_id") == ["0", "1"]


def test_remove_blocks():
    model = Layers(2)
    poptorch.BeginBlock(model.layers[1], ipu_id=1)
    calls = []
    model.layers[1].register_forward_pre_hook(lambda module, inputs: calls.append(1))
    poptorch.removeBlocks(model)
    assert places(compiled(model), "ipu_id") == [0, 0]
    assert calls
    poptorch.BeginBlock(model.layers[1], ipu_id=1)
    with pytest.raises(AssertionError):
        poptorch.removeBlocks("model")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_blocks_survive_copying_and_pickling(duplicate):
    model = Layers(2)
    poptorch.BeginBlock(model.layers[1], "second", ipu_id=1)
    twin = duplicate(model)
    assert places(compiled(twin), "ipu_id") == [0, 1]
    with pytest.raises(poptorch.Error, match="already been assigned"):
        poptorch.BeginBlock(twin.layers[1])


def test_pre_hook_registered_before_begin_block_belongs_to_the_previous_block():
    model = Layers(2)
    model.layers[1].register_forward_pre_hook(lambda module, inputs: inputs[0] * 5)
    poptorch.BeginBlock(model.layers[1], ipu_id=1)
    model.layers[1].register_forward_pre_hook(lambda module, inputs: inputs[0] * 7)
    assert places(compiled(model), "ipu_id") == [0, 0, 1, 1]


def test_hooks_appear_in_the_repr():
    model = Layers(2)
    poptorch.BeginBlock(model.layers[1], ipu_id=1)
    assert "BeginBlock(user_id=None, ipu_id=1)" in poptorch.module_repr(model)
