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


def fill(x, mask):
    y = x + 0
    y[mask] = 0.0
    return y


# uint8 masks are those of torch 2.0.1; newer torch refuses them on the CPU.
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize(
    "function",
    [
        fill,
        lambda x, mask: x.masked_fill(mask, 0.0),
        lambda x, mask: torch.masked_fill(x, mask=mask, value=0.0),
        lambda x, mask: (x + 0).masked_fill_(mask, 0.0),
        lambda x, mask: x.index_put((mask,), torch.tensor(0.0)),
        lambda x, mask: torch.where(mask, torch.zeros_like(x), x),
    ],
    ids=["assign", "masked_fill", "keyword", "in place", "index_put", "where"],
)
def test_filling_by_a_mask_works(function, dtype, recwarn):
    model = inference(function)
    for mask in ([2, 0, 1], [0, 0, 1]):
        out = model(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(mask).to(dtype))
        assert out.tolist() == [0.0 if masked else value for masked, value in zip(mask, [1.0, 2.0, 3.0])]
    assert [str(warning.message) for warning in recwarn if "uint8" in str(warning.message)] == []


def test_uint8_values_are_not_taken_for_masks():
    model = inference(lambda x, mask: x.masked_fill(mask, torch.tensor(7, dtype=torch.uint8)))
    x = torch.tensor([1, 2], dtype=torch.uint8)
    assert model(x, torch.tensor([True, False])).tolist() == [7, 2]


@pytest.mark.parametrize("count", [torch.bincount, torch.Tensor.bincount])
def test_bincount_needs_the_number_of_bins(count):
    with pytest.raises(poptorch.Error, match=r"without minlength .* cannot support dynamic output shapes"):
        inference(lambda x: count(x))(torch.tensor([1, 3]))
    model = inference(lambda x: count(x, minlength=3))
    for values, expected in (([1, 0, 1, 2], [1, 2, 1]), ([2, 2, 7, 9], [0, 0, 2])):
        assert model(torch.tensor(values)).tolist() == expected
    weighted = inference(lambda x, w: count(x, w, 2))
    assert weighted(torch.tensor([1, 0, 1]), torch.tensor([0.5, 2.0, 1.0])).tolist() == [2.0, 1.5]


def test_bincount_of_constants_is_computed_on_the_host():
    values = torch.tensor([1, 3])
    model = inference(lambda x: x + float(torch.bincount(values).sum()))
    assert model(torch.zeros(1)).tolist() == [2.0]


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
