"""Traced models: products, saved bytes, parameters and names, against arithmetic and plain torch."""

from __future__ import annotations

import dataclasses
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
from ipurun.emulator.graph import capture, values_in
from ipurun.errors import ConfigError
from ipurun.inspect import trace
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


class ReadsValues(nn.Module):
    """Reads its rates from a tensor, as timm does; on the meta device it has no values."""

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
    """Skips its first layer at random in training, as encoders with LayerDrop do."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand([]) < 0.0:
            return self.second(data)
        return super().forward(data)


class Recurrent(nn.Module):
    def __init__(self, kind: str = "LSTM", layers: int = 1) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 16, layers, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(data)[0][:, -1])


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


def products(traced: TracedModel) -> list:
    return [op for op in traced.ops if op.dims]


def op_of(traced: TracedModel, name: str) -> TracedOp:
    return next(op for op in traced.ops if op.name == name)


def test_products_of_linear_layers() -> None:
    traced = trace_model(config_of(Mlp))
    first, second = products(traced)
    assert (first.dims, second.dims) == ((1, 4, 30, 20, 1), (1, 4, 10, 30, 1))
    assert (first.module, second.module) == ("first", "second")
    assert first.flops_forward == 2 * 4 * 30 * 20
    # The input of the first layer needs no gradient, that of the second does.
    assert (first.gradients, second.gradients) == (1, 2)
    assert traced.flops_per_sample == pytest.approx(2 * (600 * 2 + 300 * 3), rel=0.2)


def test_parameters_have_the_users_names() -> None:
    traced = trace_model(config_of(Mlp))
    model = Mlp()
    assert {p.name: p.elements for p in traced.parameters} == {n: p.numel() for n, p in model.named_parameters()}
    assert all(parameter.trainable and parameter.element_bytes == 4 for parameter in traced.parameters)


def test_saved_bytes_are_what_the_backward_pass_reads() -> None:
    traced = trace_model(config_of(Mlp))
    # Relu's backward pass and the second layer's weight gradient read the same tensor, relu's result.
    assert op_of(traced, "relu").saved_bytes == 4 * 30 * 4
    assert products(traced)[0].saved_bytes == 0


def test_frozen_layers_get_no_gradient() -> None:
    traced = trace_model(config_of(Frozen))
    first, second = products(traced)
    assert (first.gradients, second.gradients) == (0, 1)
    assert first.flops_backward == 0
    assert [p.name for p in traced.parameters if not p.trainable] == ["first.weight", "first.bias"]


def test_convolutions_and_their_groups() -> None:
    traced = trace_model(config_of(ConvNet, (3, 10, 10)))
    full, depthwise = products(traced)
    assert full.dims == (1, 4 * 100, 8, 3, 9)
    assert depthwise.dims == (8, 4 * 64, 1, 1, 9)
    assert traced.buffers_bytes == 8 * 4 + 8 * 4 + 4  # statistics, and a counter
    assert op_of(traced, "native_batch_norm").kind == "norm"


def test_tied_weights_are_one_parameter_with_two_readers() -> None:
    config = config_of(Tied, (6,), (6,))
    config.sample[0]["dtype"] = "int64"
    config.loss.name = "ipurun.recipes.gpt.loss.next_token_loss"
    traced = trace_model(config)
    (weight,) = traced.parameters
    assert weight.elements == 50 * 16
    assert {traced.ops[index].module for index in weight.ops} == {"embedding", "head"}


def test_half_precision_halves_weights_inputs_and_activations() -> None:
    single, half = (trace_model(config_of(Mlp, precision=word)) for word in ("32.32", "16.16"))
    assert {p.element_bytes for p in half.parameters} == {2}
    assert op_of(half, "relu").output_bytes * 2 == op_of(single, "relu").output_bytes
    assert single.input_bytes - half.input_bytes == 4 * 20 * 2  # the target is not cast


def test_half_precision_operations_with_float32_weights() -> None:
    traced = trace_model(config_of(Mlp, precision="16.32"))
    assert {p.element_bytes for p in traced.parameters} == {4}
    assert products(traced)[0].element_bytes == 2


def test_dropout_masks_are_not_kept() -> None:
    with_mask = trace_model(config_of(WithDropout, dropout=0.5))
    without = trace_model(config_of(WithDropout, dropout=0.0))
    assert sum(op.saved_bytes for op in with_mask.ops) == sum(op.saved_bytes for op in without.ops)


@pytest.mark.parametrize("precision", ["32.32", "16.16"])
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_the_steps_of_a_recurrent_layer_are_a_loop(kind: str, gates: int, precision: str) -> None:
    """One kernel for a whole layer, which torch has for a CPU, would hide its products."""
    few, many = (trace_model(config_of(Recurrent, (steps, 8), kind=kind, precision=precision)) for steps in (5, 50))
    each = 2.0 * 4 * gates * 16 * (8 + 16)  # products of one step of four sequences
    head = 2.0 * 4 * 16 * 10
    for traced, steps in ((few, 5), (many, 50)):
        assert sum(op.flops_forward for op in products(traced)) == steps * each + head
        assert max(op.repeats for op in traced.ops) >= steps - 1
        assert all(producer < op.index for op in traced.ops for producer in op.inputs)
        assert [op.index for op in traced.ops] == list(range(len(traced.ops)))
    assert len(few.ops) == len(many.ops)
    saved = [sum(op.saved_bytes for op in traced.ops if op.module == "rnn") for traced in (few, many)]
    assert 9 < saved[1] / saved[0] < 11


def test_layers_of_a_recurrent_module_have_loops_apart() -> None:
    traced = trace_model(config_of(Recurrent, (7, 8), layers=2, precision="16.16"))
    by_weight = {name: op.repeats for op in products(traced) for name in op.parameters if "weight_ih" in name}
    assert by_weight == {"rnn.weight_ih_l0": 7, "rnn.weight_ih_l1": 7}


def test_inputs_are_found_through_views() -> None:
    traced = trace_model(config_of(Mlp))
    first, second = products(traced)
    assert second.inputs == (op_of(traced, "relu").index,)
    assert op_of(traced, "relu").inputs == (first.index,)


def test_an_in_place_operation_owns_its_result() -> None:
    traced = trace_model(config_of(InPlace))
    relu, (_, second) = op_of(traced, "relu_"), products(traced)
    assert second.inputs == (relu.index,)
    assert relu.output_bytes == relu.saved_bytes == 4 * 30 * 4


def test_equal_layers_have_equal_signatures() -> None:
    traced = trace_model(one(["+recipe=gpt", "precision=16.16"]).config)
    layers = [op.signature for op in traced.ops if op.module.endswith("mlp.c_fc") and op.dims]
    assert len(layers) > 1
    assert len(set(layers)) == 1


def test_blocks_of_the_models_own_code_are_recorded() -> None:
    traced = trace_model(config_of(WithBlocks))
    first, second = products(traced)
    assert (first.ipu, second.ipu) == (0, 1)
    assert all(op.ipu is None for op in trace_model(config_of(Mlp)).ops)


def test_gradients_are_those_that_torch_computes() -> None:
    """Compare the gradients of each operation with the recorded backward pass."""
    config = config_of(ConvNet, (3, 10, 10))
    wrapped = ModelWithLoss(ConvNet(), make_loss(config.loss, emulator), config.loss, returns_output=False)
    batch = [torch.randn(4, 3, 10, 10), torch.zeros(4, dtype=torch.int64)]
    graph = capture(
        lambda: wrapped(*batch),
        parameters=dict(wrapped.named_parameters()),
        buffers=dict(wrapped.named_buffers()),
        inputs=batch,
        training=True,
        options=emulator.Options(),
    ).graph
    wanted = [node.args[-1] for node in graph.nodes if node.name == "convolution_backward"]
    gradients = sorted(sum(bool(flag) for flag in mask[:2]) for mask in wanted)
    assert sorted(op.gradients for op in products(trace_model(config))) == gradients


def test_a_sample_of_the_data_replaces_the_declared_one() -> None:
    config = config_of(Mlp)
    config.sample = []
    traced = trace_model(config, sample=(torch.zeros(20), torch.tensor(3)))
    assert products(traced)[0].dims == (1, 4, 30, 20, 1)


def test_inference_saves_nothing() -> None:
    traced = trace_model(config_of(Mlp), training=False)
    assert not any(op.saved_bytes or op.gradients for op in traced.ops)
    assert traced.output_bytes == 4 * 10 * 4 + 4  # the output, and the loss


def test_a_constructor_that_reads_values_can_be_traced() -> None:
    (linear,) = products(trace_model(config_of(ReadsValues)))
    assert linear.dims == (1, 4, 10, 20, 1)


@pytest.mark.parametrize("precision", ["32.32", "16.16"])  # with values, and without
def test_a_model_that_branches_on_its_data_is_traced_and_reported_with_its_line(precision: str) -> None:
    traced = trace_model(config_of(Branches, precision=precision))
    assert [op.dims for op in products(traced)] == [(1, 4, 10, 20, 1)]
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "the line that the message names" in text)
    assert f"test_trace.py:{line}" in traced.refused


@pytest.mark.parametrize("precision", ["32.32", "16.16"])
def test_a_model_that_compares_a_random_number_is_traced_in_training_mode(precision: str) -> None:
    traced = trace_model(config_of(SkipsLayers, precision=precision))
    assert traced.training and [op.dims for op in products(traced)] == [(1, 4, 30, 20, 1), (1, 4, 10, 30, 1)]
    assert "depends on its data" in traced.refused and "test_trace.py" in traced.refused
    assert trace_model(config_of(Mlp)).refused == ""


class MakesConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.where(y > 0, y, torch.tensor(0.0, device=y.device, dtype=y.dtype))


@pytest.mark.parametrize("precision", ["32.32", "16.16"])
def test_a_constant_made_in_forward_is_not_refused(precision: str) -> None:
    assert trace_model(config_of(MakesConstants, precision=precision)).refused == ""


class SelectsByValue(nn.Module):
    """Operations whose shapes depend on values, which PopTorch refuses; without values, masks are true everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x > -1000.0].view(-1, 20) + x.masked_select(x > -1000.0).view(-1, 20)
        return self.linear(kept) + (x > -1000.0).nonzero().to(x.dtype).mean()


def test_operations_with_shapes_by_value_are_traced_past() -> None:
    traced = trace_model(config_of(SelectsByValue, precision="16.16"))
    assert [op.dims for op in products(traced)] == [(1, 4, 10, 20, 1)]
    assert "boolean or byte tensor masks" in traced.refused and "and 2 more" in traced.refused


class Layer(nn.Module):
    def __init__(self, index: int, dropout: float) -> None:
        super().__init__()
        self.layer_idx = index
        self.inner = nn.Linear(20, 40)
        self.outer = nn.Linear(40, 20)
        self.dropout = nn.Dropout(dropout)

    def forward(self, data: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu_(self.inner(data) + shift[:, None].mean(-1, keepdim=True)[:, 0])
        data += self.dropout(self.outer(hidden))
        return data


class Layers(nn.Module):
    """Equal layers with growing dropout; the third is wider, and what they return is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.layers = nn.ModuleList([Layer(index, 0.1 * (index + 1)) for index in range(5)])
        self.layers[2].inner, self.layers[2].outer = nn.Linear(20, 60), nn.Linear(60, 20)
        self.layers[4].inner.weight.requires_grad_(False)
        self.head = nn.Linear(20, 10)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        shift = torch.ones_like(data)
        hidden = self.first(data)
        for layer in self.layers:
            hidden = layer(hidden, shift)
        hidden += 1
        return self.head(hidden)


def test_copied_layers_are_traced_as_if_each_had_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(Layers, precision="16.16")
    copied, runs = trace_model(config), []
    monkeypatch.setattr(Layer, "forward", lambda self, *args, own=Layer.forward: runs.append(self) or own(self, *args))
    assert trace_model(config) == copied
    assert len(runs) == 3  # the first, the wide one, and the one with a frozen weight
    plain = trace.capture
    monkeypatch.setattr(trace, "capture", lambda *args, **kwargs: plain(*args, **{**kwargs, "copy_layers": False}))
    each = trace_model(config)
    assert len(runs) == 3 + 5
    # Copies also have the rate of the dropout that was run, which is part of a signature.
    without = [tuple(dataclasses.replace(op, signature="") for op in traced.ops) for traced in (copied, each)]
    assert without[0] == without[1]
    assert copied.parameters == each.parameters


def test_what_autograd_saves_is_what_the_backward_pass_reads() -> None:
    """Compare the trace, which has no backward pass, with a capture that has one."""
    config = config_of(ConvNet, (3, 10, 10))
    wrapped = ModelWithLoss(ConvNet(), make_loss(config.loss, emulator), config.loss, returns_output=False)
    batch = [torch.randn(4, 3, 10, 10), torch.zeros(4, dtype=torch.int64)]
    graph = capture(
        lambda: wrapped(*batch),
        parameters=dict(wrapped.named_parameters()),
        buffers=dict(wrapped.named_buffers()),
        inputs=batch,
        training=True,
        options=emulator.Options(),
    ).graph
    made = {graph.specs[v].storage for node in graph.nodes if not node.is_backward for v in values_in(node.outputs)}
    read = {graph.specs[v].storage for node in graph.nodes if node.is_backward for v in node.reads()}
    saved = made & set(graph.saved)
    assert made & read <= saved
    # Torch 2.0 also saves one tensor that its backward pass does not read.
    assert len(saved - read) <= (1 if torch.__version__.startswith("2.0.") else 0)


class TiedByName(Tied):
    """A constructor that reads values is made on the host and emptied afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0, 1, 3)[1].item()


@pytest.mark.parametrize("training", [True, False])
def test_weights_stay_tied_in_a_model_that_is_emptied(training: bool) -> None:
    config = config_of(TiedByName, (6,), (6,), precision="16.16")
    config.sample[0]["dtype"] = "int64"
    config.loss.name = "ipurun.recipes.gpt.loss.next_token_loss"
    assert len(trace_model(config, training=training).parameters) == 1


def test_a_wrong_shape_is_reported_with_its_operation() -> None:
    with pytest.raises(ConfigError) as caught:
        trace_model(config_of(Mlp, (21,)))
    (problem,) = caught.value.problems
    assert "test_trace.py" in problem.where
    assert "addmm" in problem.where


def test_a_model_of_175_billion_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = one(["+recipe=gpt", "model=gpt3_175b", "precision=16.16"]).config
    traced = trace_model(config)
    assert traced.num_parameters == pytest.approx(175e9, rel=0.01)
    # Six operations per parameter and token, and attention.
    tokens = config.model["max_positions"]
    assert traced.flops_per_sample == pytest.approx(6 * 174.6e9 * tokens, rel=0.1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_500_000  # kilobytes
