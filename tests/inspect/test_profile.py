"""The profile of a model: products, kept bytes, parameters and names, against arithmetic and plain torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ipurun.emulator as emulator
from ipurun.config.compose import one
from ipurun.config.schema import RunConfig
from ipurun.emulator.graph import capture
from ipurun.errors import ConfigError
from ipurun.inspect.loss import ModelWithLoss, make_loss
from ipurun.inspect.trace import trace_model
from ipurun.inspect.traced_model import TracedModel, TracedOp


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.second = nn.Linear(30, 10, bias=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(data)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.depthwise(torch.relu(self.norm(self.conv(data)))).mean((2, 3))


class InPlace(Mlp):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu_(self.first(data)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)).flatten(0, 1)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class LooksAtValues(nn.Module):
    """Makes its rates as timm does: from a tensor, which has no values on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.linear = nn.Linear(20, 10)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.linear(data * self.rates[1])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 10)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result = self.linear(data)
        if result.sum() > 0:  # the line that the message names
            return result
        return -result


class WithDropout(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.linear(self.dropout(data * 2))


class SkipsLayers(Mlp):
    """Draws a number in training and skips its first layer for it, as encoders with LayerDrop do."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand([]) < 0.0:
            return self.second(data)
        return super().forward(data)


class WithBlocks(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first = emulator.BeginBlock(self.first, ipu_id=0)
        self.second = emulator.BeginBlock(self.second, ipu_id=1)


def config_of(model: type, shape: Any = (20,), target: Any = (), **changes: Any) -> RunConfig:
    config = RunConfig(
        micro_batch_size=changes.pop("micro_batch_size", 4),
        precision=changes.pop("precision", "32.32"),
        model={"_target_": f"{__name__}.{model.__name__}", **changes},
        sample=[{"shape": list(shape)}, {"shape": list(target), "dtype": "int64", "high": 10}],
    )
    config.loss.name = "CrossEntropyLoss"
    return config


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def products(profile: TracedModel) -> list:
    return [op for op in profile.ops if op.dims]


def op_of(profile: TracedModel, name: str) -> TracedOp:
    return next(op for op in profile.ops if op.name == name)


def test_products_of_linear_layers() -> None:
    profile = trace_model(config_of(Mlp))
    first, second = products(profile)
    assert (first.dims, second.dims) == ((1, 4, 30, 20, 1), (1, 4, 10, 30, 1))
    assert (first.module, second.module) == ("first", "second")
    assert first.flops_forward == 2 * 4 * 30 * 20
    # The data of the first layer wants no gradient, that of the second does.
    assert (first.gradients, second.gradients) == (1, 2)
    assert profile.flops_per_sample == pytest.approx(2 * (600 * 2 + 300 * 3), rel=0.2)


def test_parameters_are_the_users() -> None:
    profile = trace_model(config_of(Mlp))
    model = Mlp()
    assert {p.name: p.elements for p in profile.parameters} == {n: p.numel() for n, p in model.named_parameters()}
    assert all(parameter.trainable and parameter.element_bytes == 4 for parameter in profile.parameters)


def test_kept_bytes_are_what_the_backward_pass_reads() -> None:
    profile = trace_model(config_of(Mlp))
    # Relu's backward pass and the second layer's weight gradient read the same tensor, relu's result.
    assert op_of(profile, "relu").saved_bytes == 4 * 30 * 4
    assert products(profile)[0].saved_bytes == 0


def test_frozen_layers_get_no_gradient() -> None:
    profile = trace_model(config_of(Frozen))
    first, second = products(profile)
    assert (first.gradients, second.gradients) == (0, 1)
    assert first.flops_backward == 0
    assert [p.name for p in profile.parameters if not p.trainable] == ["first.weight", "first.bias"]


def test_convolutions_and_their_groups() -> None:
    profile = trace_model(config_of(ConvNet, (3, 10, 10)))
    full, depthwise = products(profile)
    assert full.dims == (1, 4 * 100, 8, 3, 9)
    assert depthwise.dims == (8, 4 * 64, 1, 1, 9)
    assert profile.buffers_bytes == 8 * 4 + 8 * 4 + 4  # statistics, and a counter
    assert op_of(profile, "native_batch_norm").kind == "norm"


def test_tied_weights_are_one_parameter_with_two_readers() -> None:
    config = config_of(Tied, (6,), (6,))
    config.sample[0]["dtype"] = "int64"
    config.loss.name = "ipurun.recipes.gpt.loss.next_token_loss"
    profile = trace_model(config)
    (weight,) = profile.parameters
    assert weight.elements == 50 * 16
    assert {profile.ops[index].module for index in weight.ops} == {"embedding", "head"}


def test_half_precision_halves_weights_inputs_and_activations() -> None:
    single, half = (trace_model(config_of(Mlp, precision=word)) for word in ("32.32", "16.16"))
    assert {p.element_bytes for p in half.parameters} == {2}
    assert op_of(half, "relu").output_bytes * 2 == op_of(single, "relu").output_bytes
    assert single.input_bytes - half.input_bytes == 4 * 20 * 2  # the target stays as it is


def test_half_operations_on_single_weights() -> None:
    profile = trace_model(config_of(Mlp, precision="16.32"))
    assert {p.element_bytes for p in profile.parameters} == {4}
    assert products(profile)[0].element_bytes == 2


def test_dropout_masks_are_not_kept() -> None:
    with_mask = trace_model(config_of(WithDropout, dropout=0.5))
    without = trace_model(config_of(WithDropout, dropout=0.0))
    assert sum(op.saved_bytes for op in with_mask.ops) == sum(op.saved_bytes for op in without.ops)


def test_data_flow_looks_through_views() -> None:
    profile = trace_model(config_of(Mlp))
    first, second = products(profile)
    assert second.inputs == (op_of(profile, "relu").index,)
    assert op_of(profile, "relu").inputs == (first.index,)


def test_an_operation_in_place_owns_its_result() -> None:
    profile = trace_model(config_of(InPlace))
    relu, (_, second) = op_of(profile, "relu_"), products(profile)
    assert second.inputs == (relu.index,)
    assert relu.output_bytes == relu.saved_bytes == 4 * 30 * 4


def test_equal_layers_have_equal_signatures() -> None:
    profile = trace_model(one(["+recipe=gpt", "precision=16.16"]).config)
    layers = [op.signature for op in profile.ops if op.module.endswith("mlp.c_fc") and op.dims]
    assert len(layers) > 1
    assert len(set(layers)) == 1


def test_blocks_of_the_models_own_code_are_kept() -> None:
    profile = trace_model(config_of(WithBlocks))
    first, second = products(profile)
    assert (first.ipu, second.ipu) == (0, 1)
    assert all(op.ipu is None for op in trace_model(config_of(Mlp)).ops)


def test_the_backward_products_are_those_that_torch_does() -> None:
    """The share that each operation is said to have of the backward pass, against products that were recorded."""
    config = config_of(ConvNet, (3, 10, 10))
    step = ModelWithLoss(ConvNet(), make_loss(config.loss, emulator), config.loss, returns_output=False)
    batch = [torch.randn(4, 3, 10, 10), torch.zeros(4, dtype=torch.int64)]
    graph = capture(
        lambda: step(*batch),
        parameters=dict(step.named_parameters()),
        buffers=dict(step.named_buffers()),
        inputs=batch,
        training=True,
        options=emulator.Options(),
    ).graph
    wanted = [node.args[-1] for node in graph.nodes if node.name == "convolution_backward"]
    gradients = sorted(sum(bool(flag) for flag in mask[:2]) for mask in wanted)
    assert sorted(op.gradients for op in products(trace_model(config))) == gradients


def test_a_sample_of_the_data_takes_the_place_of_the_declaration() -> None:
    config = config_of(Mlp)
    config.sample = []
    profile = trace_model(config, sample=(torch.zeros(20), torch.tensor(3)))
    assert products(profile)[0].dims == (1, 4, 30, 20, 1)


def test_inference_keeps_nothing() -> None:
    profile = trace_model(config_of(Mlp), training=False)
    assert not any(op.saved_bytes or op.gradients for op in profile.ops)
    assert profile.output_bytes == 4 * 10 * 4 + 4  # the output, and the loss


def test_a_constructor_that_looks_at_values_is_no_obstacle() -> None:
    (linear,) = products(trace_model(config_of(LooksAtValues)))
    assert linear.dims == (1, 4, 10, 20, 1)


def test_a_model_that_branches_on_its_data_is_one_clear_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        trace_model(config_of(Branches))
    (problem,) = caught.value.problems
    assert problem.what.startswith("the model cannot be traced")
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "the line that the message names" in text)
    assert f"test_profile.py:{line}" in problem.where


def test_a_model_that_only_training_mode_forbids_is_planned_as_in_evaluation() -> None:
    profile = trace_model(config_of(SkipsLayers))
    assert profile.training and [op.dims for op in products(profile)] == [(1, 4, 30, 20, 1), (1, 4, 10, 30, 1)]
    assert "depends on its data" in profile.refused and "test_profile.py" in profile.refused
    assert trace_model(config_of(Mlp)).refused == ""


def test_a_wrong_shape_names_the_operation() -> None:
    with pytest.raises(ConfigError) as caught:
        trace_model(config_of(Mlp, (21,)))
    (problem,) = caught.value.problems
    assert "test_profile.py" in problem.where
    assert "addmm" in problem.where


def test_a_model_of_175_billion_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = one(["+recipe=gpt", "model=gpt3_175b", "precision=16.16"]).config
    profile = trace_model(config)
    assert profile.num_parameters == pytest.approx(175e9, rel=0.01)
    # Six operations per parameter and token, and attention.
    tokens = config.model["max_positions"]
    assert profile.flops_per_sample == pytest.approx(6 * 174.6e9 * tokens, rel=0.1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_500_000  # kilobytes
