"""Operations that are refused because a device does not support them, and some that work unexpectedly."""

import pytest
import torch

import ipurun.emulator as poptorch


def inference(function):
    model = torch.nn.Module()
    model.forward = function
    return poptorch.inferenceModel(model)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_selection_by_a_mask_is_refused(dtype):
    model = inference(lambda x, mask: x[mask] * 2)
    with pytest.raises(poptorch.Error, match="cannot support dynamic output shapes"):
        model(torch.randn(4), torch.tensor([1, 0, 1, 0], dtype=dtype))


def test_assignment_by_a_mask_works():
    def fill(x, mask):
        y = x + 0
        y[mask] = 0.0
        return y

    model = inference(fill)
    for mask in ([True, False, True], [False, False, True]):
        out = model(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(mask))
        assert out.tolist() == [0.0 if masked else value for masked, value in zip(mask, [1.0, 2.0, 3.0])]


def test_unsupported_op_on_constants_is_computed_on_the_host():
    model = inference(lambda x: x + torch.eye(2))
    assert model(torch.zeros(2, 2)).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_unsupported_op_on_an_input_is_refused():
    model = inference(lambda x: torch.lerp(x, x + 1, 0.5))
    with pytest.raises(poptorch.Error, match=r"\[aten::lerp\]"):
        model(torch.zeros(2, 2))


@pytest.mark.parametrize(("mode", "shape"), [("linear", (1, 2, 3)), ("trilinear", (1, 2, 3, 4, 5))])
def test_upsampling_modes_that_poptorch_refuses(mode, shape):
    model = poptorch.inferenceModel(torch.nn.Upsample(scale_factor=2, mode=mode))
    with pytest.raises(poptorch.Error, match="only 'nearest' is supported"):
        model(torch.randn(*shape))


def test_half_accumulator_of_several_micro_batches():
    model = torch.nn.Linear(2, 1)

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            out = self.layer(x)
            return out, poptorch.identity_loss(out, reduction="sum")

    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, accum_type=torch.half, use_combined_accum=False)
    before = model.bias.detach().clone()
    poptorch.trainingModel(WithLoss(), options, optimizer)(torch.ones(4, 2))
    torch.testing.assert_close(model.bias.detach(), before - 1.0)


def test_loading_optimizer_state_copies_the_weights_to_the_host_first():
    model = torch.nn.Linear(2, 1)

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x), reduction="sum")

    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(WithLoss(), optimizer=optimizer)
    training(torch.ones(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    copies = []
    training.copyWeightsToHost = lambda: copies.append("weights")
    training(torch.ones(1, 2))
    assert copies == ["weights"]


def test_compiles_and_runs_in_inference_mode():
    layer = torch.nn.Linear(2, 1)
    module = torch.nn.Module()
    module.layer = layer
    module.forward = lambda x, y: torch.nn.functional.mse_loss(layer(x), y)
    model = poptorch.inferenceModel(module)
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    with torch.inference_mode():
        first = model(x, y)
    expected = torch.nn.functional.mse_loss(layer(x), y).detach()
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(model(x, y), expected)


def test_seeding_in_forward_does_not_seed_the_device():
    def noise(x):
        torch.manual_seed(7)
        return torch.rand_like(x)

    torch.manual_seed(7)
    on_host = torch.rand(8)
    model = torch.nn.Module()
    model.forward = noise
    on_device = poptorch.inferenceModel(model, poptorch.Options().randomSeed(3))
    first, second = on_device(torch.zeros(8)), on_device(torch.zeros(8))
    assert not torch.equal(first, second)
    assert not torch.equal(first, on_host)
    torch.manual_seed(7)  # the original function is restored
    assert torch.equal(torch.rand(8), on_host)


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_trains_with_random_slopes(inplace):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((200,), -1.0))
            self.activation = torch.nn.RReLU(0.2, 0.4, inplace=inplace)

        def forward(self, x):
            out = self.activation(self.weight * x)
            return out, poptorch.identity_loss(out, reduction="sum")

    model = Model()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    out, _ = training(torch.ones(200))
    slopes = -out
    assert 0.2 <= float(slopes.min()) < 0.25
    assert 0.35 < float(slopes.max()) <= 0.4
    # The loss is the sum of slope * weight, so each weight moves by its slope.
    torch.testing.assert_close(model.weight.detach(), -1.0 - slopes)


@pytest.mark.parametrize(
    ("folder", "advice"),
    [("site-packages/masks.py", "an attention mask of four dimensions"), ("own/model.py", "torch.where")],
)
def test_the_advice_on_reading_a_value_depends_on_who_wrote_the_line(folder, advice):
    """The author of the line can change it; the user of a library needs an argument that avoids it."""
    names = {}
    exec(compile("def looks(x):\n    return x * 2 if x.all() else x", f"/somewhere/{folder}", "exec"), names)
    with pytest.raises(poptorch.Error, match=f"{folder}:2: its value is read back.*{advice}"):
        inference(names["looks"])(torch.ones(3))


def test_a_tensor_that_starts_empty_and_grows_is_explained():
    def grown(x):
        cache = torch.tensor([])
        return torch.cat([cache, x])

    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported.*use_cache=False"):
        inference(grown)(torch.ones(3))
