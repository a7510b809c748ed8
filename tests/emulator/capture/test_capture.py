"""Values and operations that a capture freezes, refuses or records."""

import pytest
import torch
from executor_models import Classifier, Double, images, options
from torch import nn

import ipurun.emulator as poptorch


def test_python_runs_once_and_its_values_are_frozen():
    prints = []

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = 0
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.steps += 1
            self.count += 1
            prints.append(poptorch.isRunningOnIpu())
            return x + self.steps, self.count

    model = Counter()
    executor = poptorch.inferenceModel(model)
    results = [executor(torch.zeros(1)) for _ in range(3)]
    assert [float(frozen) for frozen, _ in results] == [1.0, 1.0, 1.0]
    assert [float(count) for _, count in results] == [1.0, 2.0, 3.0]
    assert prints == [True]
    assert model.steps == 0


def test_training_flags_are_frozen_when_compiled():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    executor = poptorch.inferenceModel(model.eval())
    x = torch.randn(2, 4)
    before = executor(x)
    model.train()
    assert torch.equal(executor(x), before)


def test_plain_tensors_are_constants_and_their_changes_are_undone():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(2)

        def forward(self, x):
            self.total += x
            return self.total * 1

    model = Plain()
    executor = poptorch.inferenceModel(model)
    for _ in range(3):
        assert executor(torch.ones(2)).tolist() == [1.0, 1.0]
    assert model.total.tolist() == [0.0, 0.0]


class _CountsCaptures(nn.Module):
    """Adds one to a plain tensor, which is not an input of the graph."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, x=None):
        self.count += 1
        if x is None:
            return self.count
        return x.reshape(3) * self.count


def test_operations_on_plain_tensors_alone_run_once_on_the_host():
    model = _CountsCaptures()
    executor = poptorch.inferenceModel(model)
    assert [executor().tolist() for _ in range(3)] == [[1.0], [1.0], [1.0]]
    assert model.count.tolist() == [1.0]
    executor.destroy()
    assert poptorch.inferenceModel(model)(torch.full((3,), 5.0)).tolist() == [10.0, 10.0, 10.0]
    assert model.count.tolist() == [2.0]


def test_a_failed_compile_leaves_plain_tensors_as_they_were():
    model = _CountsCaptures()
    with pytest.raises(RuntimeError, match="shape"):
        poptorch.inferenceModel(model)(torch.zeros(2))
    assert model.count.tolist() == [0.0]


@pytest.mark.parametrize(
    ("use", "explained"),
    [
        (lambda x: x * float(x.sum()), "read back to Python"),
        (lambda x: x if x.sum() > 0 else -x, "read back to Python"),
        (lambda x: x * x.sum().item(), "read back to Python"),
        (lambda x: torch.nonzero(x), "nonzero"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: x * x.detach().numpy().max(), "numpy"),
    ],
    ids=["float", "branch", "item", "nonzero", "masked_select", "numpy"],
)
def test_data_dependence_is_explained_with_its_line(use, explained):
    class Model(nn.Module):
        def forward(self, x):
            return use(x)

    with pytest.raises(poptorch.Error, match=explained) as error:
        poptorch.inferenceModel(Model())(torch.randn(3))
    assert "test_capture.py:" in str(error.value)


def test_shapes_and_constants_may_be_read():
    class Model(nn.Module):
        def forward(self, x):
            scale = torch.tensor(3.0).item()
            return x.reshape(int(x.shape[0]) * x.shape[1]) * scale

    assert poptorch.inferenceModel(Model())(torch.ones(2, 2)).tolist() == [3.0] * 4


def test_operations_that_cannot_be_lowered_are_refused_with_their_line(monkeypatch, caplog):
    class Model(nn.Module):
        def forward(self, x):
            return torch.linalg.qr(x)[0]

    with pytest.raises(poptorch.Error, match="Unsupported ops found in compiled model") as error:
        poptorch.inferenceModel(Model())(torch.randn(3, 3))
    assert "test_capture.py:" in str(error.value)
    monkeypatch.setenv("POPTORCH_EMULATOR_STRICT", "0")
    assert poptorch.inferenceModel(Model())(torch.randn(3, 3)).shape == (3, 3)


class _Reassigns(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.register_buffer("y", torch.tensor([2.0]))
        self.change = change

    def forward(self, x):
        self.change(self, x)
        return x + 1


def _replace(model, x):
    model.y = x


def _remove(model, x):
    del model._buffers["y"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_replace, "Buffer y is reassigned within the model when calling the forward method"),
        (_remove, "Buffer y is removed from the model when calling the forward method"),
    ],
)
def test_buffers_must_be_changed_in_place(change, text):
    model = _Reassigns(change)
    with pytest.raises(poptorch.Error, match=text):
        poptorch.inferenceModel(model)(torch.ones(1))
    assert model.y.tolist() == [2.0]


def test_zero_sized_tensors_are_refused():
    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported \(Got shape \[0, 2\]\)"):
        poptorch.inferenceModel(Double())(torch.randn(0, 2))


def test_tensors_may_be_created_on_the_device():
    class Model(nn.Module):
        def forward(self, x):
            return x + torch.ones(2, device="ipu") + torch.zeros(2).to("ipu")

    assert poptorch.inferenceModel(Model())(torch.ones(2)).tolist() == [2.0, 2.0]


def test_inputs_changed_in_place_are_written_back():
    class Adds(nn.Module):
        def forward(self, x):
            x += 1
            return x * 10

    x = torch.arange(4.0)
    result = poptorch.inferenceModel(Adds(), options(device_iterations=2))(x)
    assert result.tolist() == [10.0, 20.0, 30.0, 40.0]
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_placement_of_every_operation_can_be_read():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)

        def forward(self, x):
            with poptorch.Block("A", ipu_id=0):
                x = self.first(x)
            with poptorch.Block("B", ipu_id=1):
                return self.second(x)

    executor = poptorch.inferenceModel(Blocks(), options(device_iterations=2))
    executor(torch.ones(2, 2))
    placed = {(op, where.block_id, where.ipu_id) for op, where, _ in executor.placements()}
    assert ("addmm", "A", 0) in placed
    assert ("addmm", "B", 1) in placed
    assert all("test_capture.py:" in line for _, _, line in executor.placements())


def _dropout(seed=None, **kwargs):
    opts = options(**kwargs)
    if seed is not None:
        opts.randomSeed(seed)
    return poptorch.inferenceModel(nn.Dropout(0.5).train(), opts)


def test_random_streams_depend_on_the_seed_not_on_the_number_of_calls():
    x = torch.ones(8, 16)
    at_once = _dropout(3, device_iterations=8)(x)
    one = _dropout(3)
    by_call = torch.cat([one(row[None]) for row in x])
    assert torch.equal(at_once, by_call)
    assert not torch.equal(at_once, _dropout(4, device_iterations=8)(x))
    assert len({tuple(row.tolist()) for row in at_once}) > 1


def test_replicas_draw_from_separate_streams():
    rows = _dropout(3, replicas=4)(torch.ones(4, 32))
    assert len({tuple(row.tolist()) for row in rows}) == 4


def test_the_hosts_generator_is_not_changed():
    executor = _dropout()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    executor(torch.ones(1, 4))
    assert torch.equal(torch.rand(3), expected)


def test_rng_state_continues_a_stream():
    executor = _dropout(3)
    executor.compile(torch.ones(1, 16))
    assert executor.rng_state == [3]
    executor(torch.ones(1, 16))
    state = executor.rng_state
    assert len(state) > 1
    expected = executor(torch.ones(1, 16))
    executor.rng_state = state
    assert torch.equal(executor(torch.ones(1, 16)), expected)
    without_seed = _dropout()
    without_seed.compile(torch.ones(1, 16))
    assert without_seed.rng_state is None


@pytest.mark.parametrize("norm", [None, nn.BatchNorm2d(4)])
def test_many_micro_batches_equal_one_at_a_time(norm):
    """The first call is compared with the second: the second may compute micro-batches at once."""
    torch.manual_seed(0)
    model = Classifier(norm)
    executor = poptorch.trainingModel(
        model, options(accumulation=8, outputMode=poptorch.OutputMode.All), torch.optim.SGD(model.parameters(), lr=0.0)
    )
    x, labels = images(32)
    first, second = executor(x, labels), executor(x, labels)
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    expected = [model(x[i : i + 4], labels[i : i + 4]) for i in range(0, 32, 4)]
    torch.testing.assert_close(second[1], torch.stack([loss for _, loss in expected]).detach())


class _ChangesWhatBackwardNeeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0]))
        self.register_buffer("factor", torch.tensor([2.0]))

    def forward(self, x):
        scaled = self.weight * x * self.factor
        self.factor += 1.0
        activated = torch.sigmoid(scaled)
        activated.mul_(3.0)
        return poptorch.identity_loss(activated, reduction="sum")


@pytest.mark.parametrize("accumulation", [1, 3])
def test_values_that_backward_needs_may_be_changed_in_place(accumulation):
    model = _ChangesWhatBackwardNeeds()
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(accumulation)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    x = torch.randn(2 * accumulation)
    expected = model.weight.detach().clone().requires_grad_()
    loss = sum(
        (3.0 * torch.sigmoid(expected * micro * (2.0 + step))).sum() for step, micro in enumerate(x.chunk(accumulation))
    )
    loss.backward()
    poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=1.0))(x)
    assert torch.allclose(model.weight.detach(), expected.detach() - expected.grad)
    assert float(model.factor) == 2.0 + accumulation


def test_one_hot_needs_only_the_number_of_classes():
    labels = torch.tensor([[0, 2], [3, 1]])
    found = poptorch.inferenceModel(_Function(lambda x: nn.functional.one_hot(x, num_classes=5)))(labels)
    assert torch.equal(found.long(), nn.functional.one_hot(labels, num_classes=5))
    with pytest.raises(poptorch.Error, match="OneHot num classes must be specified"):
        poptorch.inferenceModel(_Function(nn.functional.one_hot))(labels)


class _Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_transformer_accepts_its_mask_as_an_input():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, dim_feedforward=8, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    masks = torch.triu(torch.full((3, 3), float("-inf")), diagonal=1), torch.zeros(3, 3)
    expected = model(source, target, *masks)
    assert torch.allclose(poptorch.inferenceModel(model)(source, target, *masks), expected, atol=1e-5)
    assert torch.allclose(model(source, target, *masks), expected)


class _Clips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1.0, 1.0)


def _clip_by_hook(x):
    x.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
    return x


@pytest.mark.parametrize("clip", [_Clips.apply, _clip_by_hook], ids=["function", "hook"])
def test_user_defined_gradients_are_exact_for_every_micro_batch(clip):
    """Clipping has no effect in the first call; a re-derived backward pass would have none in the second."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return poptorch.identity_loss((clip(self.weight * 1) * x).sum(), reduction="none")

    model = Model()
    executor = poptorch.trainingModel(model, options(accumulation=4), torch.optim.SGD(model.parameters(), lr=1.0))
    executor(torch.full((4,), 0.5))
    assert float(model.weight) == pytest.approx(0.5)
    executor(torch.full((4,), 100.0))
    assert float(model.weight) == pytest.approx(-0.5)


def test_attention_is_decomposed_even_if_the_model_requests_a_fused_kernel():
    attention = pytest.importorskip("torch.nn.attention")

    class Fused(nn.Module):
        def forward(self, x):
            with attention.sdpa_kernel([attention.SDPBackend.FLASH_ATTENTION, attention.SDPBackend.MATH]):
                return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    scores = (x @ x.transpose(-1, -2) / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(poptorch.inferenceModel(Fused())(x), scores.softmax(-1) @ x)
