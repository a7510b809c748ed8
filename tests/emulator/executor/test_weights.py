"""Weights exist twice: how reading, writing and running affect the copies on host and device."""

import copy
import io
import pickle

import pytest
import torch
from executor_models import Classifier, images, options
from torch import nn

import ipurun.emulator as poptorch


def _trained(lr=0.1, **kwargs):
    torch.manual_seed(0)
    model = Classifier(**kwargs)
    before = copy.deepcopy(model.state_dict())
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=lr))
    return model, executor, before


def _count_copies(executor):
    counts = []
    original = executor.copyWeightsToHost

    def counted():
        counts.append(1)
        original()

    executor.copyWeightsToHost = counted
    return counts


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model(images(4)[0]),
        lambda model: list(model.parameters()),
        lambda model: dict(model.named_parameters()),
        lambda model: model.state_dict(),
        lambda model: model.linear.weight.data,
        lambda model: torch.equal(model.linear.weight, model.linear.weight),
        lambda model: str(model.linear.bias),
        lambda model: model.linear.weight + 1,
    ],
    ids=["call", "parameters", "named", "state_dict", "data", "equal", "str", "arithmetic"],
)
def test_reading_the_model_after_training_copies_once(read):
    model, executor, before = _trained()
    executor(*images(4))
    counts = _count_copies(executor)
    read(model)
    read(model)
    assert len(counts) == 1
    assert not torch.equal(model.linear.weight, before["linear.weight"])


def test_weights_changed_on_the_host_are_used_only_after_copying():
    model, executor, _ = _trained(lr=0.0)
    x, labels = images(4)
    first, _ = executor(x, labels)
    with torch.no_grad():
        model.linear.bias.add_(1.0)
    assert torch.equal(executor(x, labels)[0], first)
    executor.copyWeightsToDevice()
    assert torch.allclose(executor(x, labels)[0], first + 1.0, atol=1e-6)


def test_copy_to_device_discards_weights_that_were_not_read():
    model, executor, before = _trained()
    executor(*images(4))
    executor.copyWeightsToDevice()
    assert torch.equal(model.linear.weight, before["linear.weight"])


def test_inference_follows_training_on_the_same_model():
    model, training, _ = _trained()
    inference = poptorch.inferenceModel(model)
    x, labels = images(4)
    before = inference(x)
    training(x, labels)
    after = inference(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(x).detach())


def test_inference_wrapped_before_training_is_not_linked():
    torch.manual_seed(0)
    model = Classifier()
    inference = poptorch.inferenceModel(model)
    x, labels = images(4)
    before = inference(x)
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))(x, labels)
    model.state_dict()
    assert torch.equal(inference(x), before)
    inference.copyWeightsToDevice()
    assert not torch.equal(inference(x), before)


class _Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.count += 1
        return self.count + 0 * x, poptorch.identity_loss((x * self.weight).sum(), reduction="none")


def test_buffers_of_inference_are_returned_only_when_copied():
    model = _Counter()
    executor = poptorch.inferenceModel(model)
    for expected in (1.0, 2.0, 3.0):
        assert float(executor(torch.ones(1))[0]) == expected
    assert float(model.count) == 0.0
    executor.copyWeightsToHost()
    assert float(model.count) == 3.0


def test_buffers_of_training_are_returned_when_read():
    model = _Counter()
    executor = poptorch.trainingModel(model, options(device_iterations=2, accumulation=3))
    executor(torch.ones(6))
    assert float(model.count) == 6.0


def test_only_named_buffers_are_uploaded():
    model = _Counter()
    executor = poptorch.inferenceModel(model, options(updatableNamedBuffers=["count"]))
    executor(torch.ones(1))
    with torch.no_grad():
        model.count.fill_(10.0)
    executor.copyNamedBuffersToDevice()
    assert float(executor(torch.ones(1))[0]) == 11.0


def test_named_buffers_need_the_option():
    executor = poptorch.inferenceModel(_Counter())
    with pytest.raises(poptorch.Error):
        executor.copyNamedBuffersToDevice()
    executor(torch.ones(1))
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        executor.copyNamedBuffersToDevice()


@pytest.mark.parametrize("name", ["cuont", "steps"])
def test_named_buffers_must_be_variables_of_the_device(name):
    model = _Counter()
    model.register_buffer("steps", torch.zeros(1, dtype=torch.int64))  # integers are constants of the program
    executor = poptorch.inferenceModel(model, options(updatableNamedBuffers=["count", name]))
    with pytest.raises(poptorch.Error, match=f"No Ir::Tensor with TensorId '{name}'.*has count"):
        executor(torch.ones(1))


def test_replicas_that_change_buffers_need_broadcast_buffers_off():
    executor = poptorch.inferenceModel(_Counter(), options(replicas=2))
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers"):
        executor(torch.ones(2))


def test_each_replica_has_a_buffer_and_the_host_reads_the_first():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1, 2))

        def forward(self, x):
            self.total.add_(x)
            return self.total

    model = Adds()
    executor = poptorch.inferenceModel(model, options(replicas=2, broadcastBuffers=False))
    x = torch.tensor([[9.0], [2.0]])
    for _ in range(5):
        result = executor(x)
    assert result.tolist() == [[45.0, 45.0], [10.0, 10.0]]
    executor.copyWeightsToHost()
    assert model.total.tolist() == [[45.0, 45.0]]


def test_replicas_that_only_read_a_buffer_share_it():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset", torch.tensor([5.0]))

        def forward(self, x):
            return x + self.offset

    result = poptorch.inferenceModel(Reads(), options(replicas=2))(torch.tensor([1.0, 2.0]))
    assert result.tolist() == [6.0, 7.0]


@pytest.mark.parametrize("mode", ["Final", "All", "Sum"])
@pytest.mark.parametrize(("iterations", "accumulation"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("make", [nn.BatchNorm2d, nn.SyncBatchNorm, lambda size: nn.BatchNorm2d(size, affine=False)])
def test_batch_norm_trains_on_replicas_that_keep_their_own_statistics(make, iterations, accumulation, mode):
    torch.manual_seed(0)
    model = Classifier(make(4))
    reference = copy.deepcopy(model)
    opts = options(iterations, accumulation, replicas=2).outputMode(getattr(poptorch.OutputMode, mode))
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.0))
    calls = 2
    for call in range(calls):
        x, labels = images(4 * iterations * accumulation * 2, seed=call)
        executor(x, labels)
        for step in range(iterations * accumulation):
            reference(x[8 * step :][:4], labels[8 * step :][:4])  # what the first replica sees
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, reference.norm.running_var)
    assert int(model.norm.num_batches_tracked) == 0  # an integer buffer is a constant on the device


def test_uploading_gives_all_replicas_the_statistics_of_the_first():
    torch.manual_seed(0)
    model = Classifier(nn.BatchNorm2d(4, momentum=0.5))
    executor = poptorch.trainingModel(model, options(replicas=2), torch.optim.SGD(model.parameters(), lr=0.0))
    executor(*images(8))
    copies = executor._executable.weights.buffers["norm.running_mean"]
    assert not torch.equal(*copies)
    executor.detachFromDevice()
    executor.attachToDevice()
    assert torch.equal(*copies) and torch.equal(copies[0], model.norm.running_mean)


@pytest.mark.parametrize("training", [True, False])
def test_statistics_that_forward_writes_itself_are_refused_on_replicas(training):
    """Only batch norm's own update is different to PopTorch: instance norm copies its statistics."""

    class Writes(Classifier):
        def forward(self, x, labels):
            self.norm.running_mean.mul_(0.5)
            return super().forward(x, labels)

    for model in (Writes(nn.BatchNorm2d(4)), Classifier(nn.InstanceNorm2d(4, track_running_stats=True))):
        make = poptorch.trainingModel if training else poptorch.inferenceModel
        with pytest.raises(poptorch.Error, match=r"does not support broadcasting buffers.*norm\.running_mean"):
            make(model, options(replicas=2))(*images(8))


def test_a_cumulative_average_is_refused():
    """BatchNorm(momentum=None) reads num_batches_tracked as a Python number, which a tensor on an IPU does not give."""
    with pytest.raises(poptorch.Error, match="depends on its data"):
        poptorch.trainingModel(Classifier(nn.BatchNorm2d(4, momentum=None)))(*images(4))


def test_an_inference_model_does_not_update_running_statistics():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    x = torch.randn(4, 3) + 1
    expected = (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + norm.eps)
    executor = poptorch.inferenceModel(norm)
    for _ in range(2):
        torch.testing.assert_close(executor(x), expected)
    executor.copyWeightsToHost()
    assert norm.running_mean.tolist() == [0.0, 0.0, 0.0]
    assert norm.running_var.tolist() == [1.0, 1.0, 1.0]


def test_wrapping_changes_classes_and_destroy_restores_them():
    model, executor, _ = _trained(norm=nn.BatchNorm2d(4))
    assert type(model).__name__ == "PoptorchClassifier"
    assert isinstance(model, Classifier)
    assert type(model.linear.weight).__name__ == "PoptorchParameter"
    assert type(model.norm.running_mean).__name__ == "PoptorchBuffer"
    executor(*images(4))
    executor.destroy()
    assert type(model) is Classifier
    assert type(model.linear.weight) is nn.Parameter
    assert type(model.norm.running_mean) is torch.Tensor


def test_destroy_before_compile_leaves_the_model_wrapped():
    model, executor, _ = _trained()
    executor.destroy()
    assert type(model).__name__ == "PoptorchClassifier"


def test_a_wrapped_model_cannot_be_wrapped_again():
    model, _, _ = _trained()
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model)


def test_destroy_copies_the_weights_to_the_host_and_the_executor_compiles_again():
    model, executor, before = _trained()
    x, labels = images(4)
    executor(x, labels)
    executor.destroy()
    assert not executor.isCompiled()
    assert not torch.equal(model.linear.weight, before["linear.weight"])
    _, first = executor(x, labels)
    assert torch.isfinite(first)
    assert type(model).__name__ == "PoptorchClassifier"


def test_copies_and_pickles_of_a_wrapped_model():
    model, executor, _ = _trained()
    executor(*images(4))
    expected = model.linear.weight.detach().clone()
    deep = copy.deepcopy(model)
    assert type(deep).__name__ == "PoptorchClassifier"
    assert torch.equal(deep.linear.weight, expected)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert type(loaded) is Classifier
    assert type(loaded.linear.weight) is nn.Parameter
    assert torch.equal(loaded.linear.weight, expected)
    assert type(pickle.loads(pickle.dumps(model))) is Classifier


def test_state_dict_contains_plain_tensors_and_loads_into_the_executor():
    _, executor, before = _trained()
    x, labels = images(4)
    _, first = executor(x, labels)
    state = executor.state_dict()
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    assert executor.load_state_dict(before).missing_keys == []
    _, again = executor(x, labels)
    assert torch.equal(first, again)


def test_float64_on_the_host_is_float32_on_the_device():
    model = nn.Linear(2, 1).double()
    executor = poptorch.inferenceModel(model)
    x = torch.randn(3, 2)
    result = executor(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, model(x.double()).float().detach())
    assert model.weight.dtype == torch.float64


@pytest.mark.parametrize("orthogonal_input", [True, False])
def test_parameters_that_differ_between_groups_of_replicas(orthogonal_input):
    """A matrix split over four groups of two replicas trains like the whole matrix."""
    tensor_shards, data_shards = 4, 2
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    whole = nn.Parameter(torch.randn(5, 8) * 0.3)

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            parts = whole.detach().reshape(5, tensor_shards, 2).transpose(0, 1).contiguous()
            self.weight = nn.Parameter(parts)

        def forward(self, x):
            product = x @ self.weight
            return product, poptorch.identity_loss(product**2, reduction="mean")

    consecutive, orthogonal = poptorch.CommGroupType.Consecutive, poptorch.CommGroupType.Orthogonal
    input_groups, weight_groups = (orthogonal, consecutive) if orthogonal_input else (consecutive, orthogonal)
    model = Part()
    opts = poptorch.Options().replicationFactor(tensor_shards * data_shards)
    opts.inputReplicaGrouping(tensor_shards, input_groups)
    opts.outputMode(poptorch.OutputMode.All)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    executor.weight.replicaGrouping(weight_groups, data_shards, poptorch.VariableRetrievalMode.OnePerGroup)

    optimizer = torch.optim.SGD([whole], lr=0.1)
    for _ in range(3):
        _, loss = executor(x.reshape(data_shards, 3, 5))
        optimizer.zero_grad()
        expected = ((x @ whole) ** 2).mean()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss.mean(), expected.detach())
    got = model.weight.detach().transpose(0, 1).reshape(5, 8)
    torch.testing.assert_close(got, whole.detach())


class Scaled(nn.Module):
    """The loss is the weight times the input, so the gradient of the weight is the input."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return poptorch.identity_loss(self.weight * x, reduction="sum")


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (poptorch.CommGroupType.Consecutive, [[0, 1], [2, 3]]),
        (poptorch.CommGroupType.Orthogonal, [[0, 2], [1, 3]]),
        (poptorch.CommGroupType.NoGrouping, [[0], [1], [2], [3]]),
        (poptorch.CommGroupType.All, [[0, 1, 2, 3]]),
    ],
)
def test_all_replicas_keeps_one_value_per_replica(kind, groups):
    start = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    model = Scaled(start.clone())
    opts = options(replicas=4).outputMode(poptorch.OutputMode.All)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.5))
    executor.weight.replicaGrouping(kind, 2, poptorch.VariableRetrievalMode.AllReplicas)
    x = torch.tensor([10.0, 20.0, 40.0, 80.0])

    loss = executor(x)
    assert torch.equal(loss.reshape(4), start.reshape(4) * x)
    executor.copyWeightsToHost()
    expected = start.clone()
    for members in groups:
        expected[members] -= 0.5 * x[members].sum()
    assert torch.equal(model.weight.detach(), expected)


def test_all_replicas_has_optimizer_state_per_replica():
    model = Scaled(torch.ones(4, 1))
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(replicas=4), optimizer)
    executor.weight.replicaGrouping(poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.AllReplicas)
    executor(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert {tensor.shape[0] for tensor in optimizer.state_dict()["ipu_state"].values()} == {4}


def test_all_replicas_needs_a_leading_dimension_for_the_replicas():
    model = Scaled(torch.ones(2, 1))
    executor = poptorch.inferenceModel(model, options(replicas=4))
    executor.weight.replicaGrouping(poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.AllReplicas)
    with pytest.raises(poptorch.Error, match="leading dimension of 4"):
        executor(torch.ones(4))


@pytest.mark.parametrize("retrieval", list(poptorch.VariableRetrievalMode))
def test_lamb_scales_each_group_by_its_norm(retrieval):
    """A group is updated as a separate parameter, however large the others are."""
    parts = torch.tensor([[[3.0, 4.0]], [[30.0, 40.0]]])
    gradients = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    model = Scaled(parts.clone())
    opts = options(replicas=2)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    optimizer = poptorch.optim.LAMB(model.parameters(), lr=0.1, weight_decay=0.01)
    executor = poptorch.trainingModel(model, opts, optimizer)
    executor.weight.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, retrieval)
    executor(gradients)

    for got, part, gradient in zip(model.weight.detach(), parts, gradients):
        # After one step the corrected moments are the gradient and its square.
        direction = gradient / (gradient.abs() + 1e-8) + 0.01 * part
        torch.testing.assert_close(got, part - 0.1 * part.norm() / direction.norm() * direction)


@pytest.mark.parametrize("retrieval", list(poptorch.VariableRetrievalMode))
def test_each_replica_clips_by_its_norm(retrieval):
    """A replica clips by its own values: a large gradient elsewhere does not shrink its step."""

    class TwoWeights(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.zeros(2, 2))
            self.shared = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return poptorch.identity_loss((x * (self.own + self.shared)).sum(), reduction="sum")

    gradients = torch.tensor([[3.0, 0.0], [0.0, 40.0]])
    model = TwoWeights()
    opts = options(replicas=2)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, max_grad_norm=10.0, use_combined_accum=False)
    executor = poptorch.trainingModel(model, opts, optimizer)
    executor.own.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, retrieval)
    executor(gradients)

    shared = gradients.sum(dim=0)
    factors = 10.0 / torch.sqrt((gradients**2).sum(dim=1) + (shared**2).sum())
    torch.testing.assert_close(model.own.detach(), -gradients * factors.unsqueeze(1))
    torch.testing.assert_close(model.shared.detach(), -shared * factors[0])


def test_groups_of_replicas_need_a_leading_dimension_for_the_groups():
    model = nn.Linear(2, 3)
    executor = poptorch.inferenceModel(model, options(replicas=2))
    executor.weight.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="leading dimension of 2"):
        executor(torch.ones(2, 2))


def test_optimizer_state_of_parameters_that_differ_has_a_leading_dimension():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            product = x @ self.weight
            return product, poptorch.identity_loss(product**2, reduction="mean")

    model = Product()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(replicas=4), optimizer)
    executor.weight.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup)
    x = torch.randn(4, 6)
    executor(x)
    state = optimizer.state_dict()
    assert all(tensor.shape[0] == 4 for tensor in state["ipu_state"].values())
    weights = model.weight.detach().clone()
    expected = executor(x)[1], model.weight.detach().clone()
    optimizer.load_state_dict(state)
    executor.load_state_dict({"weight": weights})
    assert torch.equal(executor(x)[1], expected[0])
    assert torch.equal(model.weight.detach(), expected[1])


def test_a_model_can_be_unwrapped_and_rewrapped_as_optimum_does():
    from ipurun.emulator._impl import rewrapModelIfNecessary, unwrapModelIfNecessary

    model, executor, before = _trained()
    wrapped = type(model.linear.weight)
    executor(*images(4))
    unwrapModelIfNecessary(model)
    assert type(model.linear.weight) is nn.Parameter
    assert not torch.equal(model.linear.weight, before["linear.weight"]), "the trained weights were not copied"
    copied = pickle.loads(pickle.dumps(model.linear.weight))
    assert torch.equal(copied, model.linear.weight)
    rewrapModelIfNecessary(model)
    assert type(model.linear.weight) is wrapped
    executor(*images(4))
    assert not torch.equal(model.linear.weight, copied), "reading a rewrapped weight must copy it from the device"
    rewrapModelIfNecessary(model)
    unwrapModelIfNecessary(nn.Linear(1, 1))
