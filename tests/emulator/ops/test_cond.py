"""poptorch.cond: a run computes only one body, without side effects of the other."""

import pytest
import torch

from ipurun import emulator as poptorch

YES, NO = torch.tensor([True]), torch.tensor([False])


class Counting(torch.nn.Module):
    """Counts in buffers how often each body ran."""

    def __init__(self):
        super().__init__()
        self.register_buffer("thens", torch.zeros(1))
        self.register_buffer("elses", torch.zeros(2, 1))

    def forward(self, condition, x):
        def then_body(y):
            self.thens.add_(1)
            return y * 2

        def else_body(y):
            self.elses[1] += 1
            return y - 1

        chosen = poptorch.cond(condition, then_body, [x], else_body, [x])[0]
        return chosen, self.thens * 1, self.elses * 1


def test_only_the_chosen_body_writes_to_buffers():
    executor = poptorch.inferenceModel(Counting())
    x = torch.tensor([5.0])
    for condition, value, thens, elses in [(YES, 10, 1, 0), (NO, 4, 1, 1), (NO, 4, 1, 2), (YES, 10, 2, 2)]:
        chosen, seen_thens, seen_elses = executor(condition, x)
        assert chosen.item() == value
        assert seen_thens.item() == thens
        assert seen_elses.tolist() == [[0.0], [elses]]
    executor.copyWeightsToHost()
    assert executor.thens.item() == 2
    assert executor.elses.tolist() == [[0.0], [2.0]]


def test_compiling_does_not_change_the_buffers():
    model = Counting()
    executor = poptorch.inferenceModel(model)
    executor.compile(YES, torch.tensor([5.0]))
    executor.copyWeightsToHost()
    assert model.thens.item() == 0
    assert model.elses.sum().item() == 0


def test_only_the_chosen_body_prints(capfd):
    class Model(torch.nn.Module):
        def forward(self, condition, x):
            return poptorch.cond(
                condition,
                lambda y: poptorch.ipu_print_tensor(y, "then") + 1,
                [x],
                lambda y: poptorch.ipu_print_tensor(y, "else") - 1,
                [x],
            )[0]

    executor = poptorch.inferenceModel(Model())
    x = torch.tensor([5.0])
    executor.compile(YES, x)
    capfd.readouterr()
    assert executor(YES, x).item() == 6
    printed = capfd.readouterr().err
    assert "then" in printed and "else" not in printed
    assert executor(NO, x).item() == 4
    printed = capfd.readouterr().err
    assert "else" in printed and "then" not in printed


def test_only_the_chosen_body_calls_the_host():
    called = []

    def host(x):
        called.append(float(x))
        return x + 1

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.host = poptorch.CPU(host, "host")

        def forward(self, condition, x):
            return poptorch.cond(condition, self.host, [x], lambda y: y, [x])[0]

    executor = poptorch.inferenceModel(Model())
    x = torch.tensor([5.0])
    executor.compile(NO, x)
    called.clear()
    assert executor(NO, x).item() == 5
    assert called == []
    assert executor(YES, x).item() == 6
    assert called == [5.0]


def test_the_chosen_body_writes_to_a_tensor_created_in_forward():
    class Model(torch.nn.Module):
        def forward(self, condition, x):
            total = torch.zeros(2)

            def then_body():
                total.add_(x)
                return x

            poptorch.cond(condition, then_body, [], lambda: x, [])
            return total + 1

    executor = poptorch.inferenceModel(Model())
    x = torch.tensor([1.0, 2.0])
    for _ in range(2):
        assert executor(YES, x).tolist() == [2.0, 3.0]
        assert executor(NO, x).tolist() == [1.0, 1.0]


def test_two_views_of_one_buffer_still_share_it_in_a_body():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(3))

        def forward(self, condition, x):
            first, rest = self.rows[:1], self.rows[1:]

            def then_body(y):
                self.rows.add_(y)
                rest.mul_(2)
                return first + rest.sum()

            return poptorch.cond(condition, then_body, [x], lambda y: y, [x])[0], self.rows + 0

    executor = poptorch.inferenceModel(Model())
    x = torch.tensor([3.0])
    out, rows = executor(YES, x)
    assert out.item() == 15.0
    assert rows.tolist() == [3.0, 6.0, 6.0]
    out, rows = executor(NO, x)
    assert out.item() == 3.0
    assert rows.tolist() == [3.0, 6.0, 6.0]


def test_a_branch_in_a_loop_chooses_in_each_iteration():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("odd", torch.zeros(1))

        def forward(self, x):
            def halve(y):
                return torch.div(y, 2, rounding_mode="trunc")

            def triple(y):
                self.odd.add_(1)
                return y * 3 + 1

            def trip(y):
                return poptorch.cond(y % 2 == 0, halve, [y], triple, [y])[0]

            return poptorch.for_loop(8, trip, [x])[0], self.odd + 0

    value, odd = poptorch.inferenceModel(Model())(torch.tensor([6.0]))
    assert value.item() == 1.0  # 6 3 10 5 16 8 4 2 1
    assert odd.item() == 2.0


def test_random_numbers_in_a_body_depend_on_the_seed():
    class Model(torch.nn.Module):
        def forward(self, condition, x):
            return poptorch.cond(condition, lambda y: y + torch.rand_like(y), [x], lambda y: y, [x])[0]

    def draw():
        executor = poptorch.inferenceModel(Model(), poptorch.Options().randomSeed(3))
        return executor(YES, torch.zeros(4)), executor(YES, torch.zeros(4))

    first, second = draw(), draw()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_floating_point_exceptions_of_the_other_body_are_not_raised():
    class Model(torch.nn.Module):
        def forward(self, condition, x):
            return poptorch.cond(condition, lambda y: 1 / y, [x], lambda y: y + 1, [x])[0]

    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.inferenceModel(Model(), options)
    assert executor(NO, torch.zeros(1)).item() == 1.0
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        executor(YES, torch.zeros(1))


def test_a_branch_is_one_op_of_the_graph():
    executor = poptorch.inferenceModel(Counting())
    executor(YES, torch.tensor([5.0]))
    assert '"type":"If"' in executor._debugGetPopartIR().replace(" ", "")


def test_each_micro_batch_chooses_separately():
    class Model(torch.nn.Module):
        def forward(self, x):
            return poptorch.cond(x.sum() > 0, lambda y: y * 2, [x], lambda y: y - 1, [x])[0]

    executor = poptorch.inferenceModel(Model(), poptorch.Options().deviceIterations(3))
    assert executor(torch.tensor([[1.0], [-1.0], [4.0]])).tolist() == [[2.0], [-2.0], [8.0]]


def test_bodies_with_different_shapes_are_refused():
    class Model(torch.nn.Module):
        def forward(self, condition, x):
            return poptorch.cond(condition, lambda y: y, [x], lambda y: y[:1], [x])[0]

    with pytest.raises(poptorch.Error, match="both bodies must return"):
        poptorch.inferenceModel(Model())(YES, torch.zeros(2))


def test_a_branch_inside_a_loop_draws_in_every_iteration():
    """Every iteration is random, so no two may be computed together or share random numbers."""

    class Model(torch.nn.Module):
        def forward(self, x):
            def trip(value, total):
                drawn = poptorch.cond(value.sum() > 0, lambda v: v + torch.rand_like(v), [value], torch.neg, [value])[0]
                return value, total + drawn

            return poptorch.for_loop(3, trip, [x, torch.zeros_like(x)])[1]

    executor = poptorch.inferenceModel(Model(), poptorch.Options().deviceIterations(2).randomSeed(3))
    first, second = executor(torch.ones(2, 8)).split(1)
    assert not torch.equal(first, second)
    assert bool((first > 3).all() and (first < 6).all())
    assert [node.is_random for node in executor._executable.graph.nodes if node.name == "cond"] == [True] * 3


def test_random_numbers_of_a_body_without_inputs_differ_between_runs():
    class Model(torch.nn.Module):
        def forward(self, x):
            drawn = poptorch.cond(torch.tensor([True]), lambda: torch.rand(2), [], lambda: torch.zeros(2), [])[0]
            return x, drawn

    executor = poptorch.inferenceModel(Model(), poptorch.Options().deviceIterations(3).randomSeed(1))
    drawn = executor(torch.ones(3, 1))[1]
    assert drawn.shape == (6,)
    assert len(set(drawn.tolist())) == 6
