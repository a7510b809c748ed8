"""Compare a model layer by layer: the output of every module and the gradient of every parameter, in one weight update.

The executor returns the outputs of modules as further outputs of the model: that needs no names of the backend's
tensors, and works in every stage of a pipeline. Gradients are read from the change that one step of plain SGD makes.
Its learning rate is so large that rounding the new weight, even to float16, hardly touches them.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipurun.build import Run, build_run
from ipurun.config import compose
from ipurun.config.schema import LoaderConfig, RunConfig
from ipurun.engine import load
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import as_call, leading_rows, map_tensors
from ipurun.log.plan_text import plan_dict
from ipurun.planning.plan import Plan
from ipurun.runs.prepare import prepare
from ipurun.selftest.compare import Tolerances, change_differences, relative_difference, tensor_sides, tolerances
from ipurun.selftest.outcome import agreement
from ipurun.selftest.reference import forward_and_loss, initial_model

__all__ = ["Layer", "LayerTest", "compare_layers"]

_LEARNING_RATE = 256.0
# Names of what belongs to no layer inside the model.
_MODEL, _LOSS = "(model)", "(loss)"


@dataclass(frozen=True)
class Layer:
    """One row: an output of a module, or the gradient of a parameter.

    Args:
        kind: ``output`` or ``gradient``.
        name: Name of the module or parameter; a further call or a further tensor has a number.
        shape: Its shape.
        largest: Largest absolute difference.
        difference: Relative difference: of outputs by the largest value, of gradients by the length.
        tolerance: Largest relative difference that counts as agreement.
        sides: The numbers of both sides where they differ.
    """

    kind: str
    name: str
    shape: Tuple[int, ...]
    largest: float
    difference: float
    tolerance: float
    sides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance

    def to_dict(self) -> Dict[str, Any]:
        """Return the row as JSON-ready data."""
        return {**vars(self), "agrees": self.agrees}


@dataclass(frozen=True)
class LayerTest:
    """A model compared layer by layer.

    Args:
        engine: Kind, version and number of IPUs of the engine.
        layers: Outputs in the order in which they are computed, then gradients in theirs.
        config: The config of the one step, as YAML.
        plan: The plan, as data.
        settled: If two engines differ, with which of them plain torch agrees.
    """

    engine: Dict[str, Any]
    layers: List[Layer]
    config: str
    plan: Dict[str, Any]
    settled: str = ""

    @property
    def first_wrong(self) -> Optional[Layer]:
        """The first layer that differs, in the order of computation."""
        return next((layer for layer in self.layers if not layer.agrees), None)


@dataclass
class _Values:
    """Results of one side: outputs by name in order, and gradients by parameter."""

    outputs: Dict[str, torch.Tensor]
    gradients: Dict[str, torch.Tensor]


def compare_layers(words: Sequence[str]) -> LayerTest:
    """Compare the layers of a config on its engine with those on the CPU engine, or on that with plain torch.

    Args:
        words: The config, as on a command line.

    Raises:
        ConfigError: The config is wrong, or its model draws random numbers.
    """
    config = compose.one(words, "selftest").config
    engine = load(config.engine)
    config = _small_step(config)
    plan, found, batch = _on_engine(config, engine.kind)
    _refuse_random_numbers(config, batch)
    if engine.kind == "cpu":
        expected = _on_torch(config, batch)
    else:
        _, expected, _ = _on_engine(config, "cpu", batch)
    allowed = tolerances(config.precision, engine.kind)
    layers = _compared(found, expected, allowed)
    settled = ""
    if engine.kind != "cpu" and not all(layer.agrees for layer in layers):
        torch_values = _on_torch(config, batch)
        sides = {"the CPU engine": expected, "this engine": found}
        settled = agreement(
            name
            for name, values in sides.items()
            if all(layer.agrees for layer in _compared(values, torch_values, allowed))
        )
    about = {"kind": engine.kind, "version": engine.version, "ipus": engine.available_ipus}
    return LayerTest(about, layers, compose.to_yaml(config), plan_dict(plan), settled)


def _small_step(config: RunConfig) -> RunConfig:
    """Return the config of one weight update on one replica, with the fewest micro-batches that its strategy takes."""
    small = copy.deepcopy(config)
    small.device_iterations, small.gradient_accumulation, small.global_batch_size = 1, None, None
    small.max_steps, small.epochs = 1, None
    small.replication = dataclasses.replace(small.replication, factor=None, input_group_size=1, tensor_sharding=False)
    small.optimizer = {"_target_": "poptorch.optim.SGD", "lr": _LEARNING_RATE}
    small.schedule, small.metrics, small.monitor = {}, {}, None
    small.init_from, small.freeze, small.unfreeze = None, [], {}
    small.stochastic_rounding = None
    small.output = dataclasses.replace(small.output, mode="all")
    small.memory = dataclasses.replace(small.memory, overlap_io="none")
    small.loader = LoaderConfig(shuffle=False, collate=small.loader.collate)
    small.eval = dataclasses.replace(small.eval, every_epochs=None, every_steps=None, at_end=False)
    small.checkpoint = dataclasses.replace(small.checkpoint, best=None)
    small.cache = dataclasses.replace(small.cache, enabled=False)
    small.logger = {}
    if config.loss_scaling == "auto":
        small.loss_scaling = None
    plan = prepare(compose.Point(dataclasses.replace(config, engine="cpu"))).plan
    stages = plan.stages if config.pipeline.strategy == "pipelined" else 1
    small.gradient_accumulation = 2 * stages - 1
    small.inference = dataclasses.replace(small.inference, device_iterations=stages, replicas=None)
    small.devices = plan.devices.per_replica
    return small


def _on_engine(config: RunConfig, engine: str, batch: Any = None) -> Tuple[Plan, _Values, Any]:
    """Make one weight update on an engine; return the plan, the values, and the batch, by default its first."""
    prepared = prepare(compose.Point(dataclasses.replace(config, engine=engine)))
    run = build_run(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)
    try:
        if batch is None:
            run.train_loader.start()
            batch = next(iter(run.train_loader.epoch()))
        return prepared.plan, _step(run, batch), batch
    finally:
        run.close()


def _step(run: Run, batch: Any) -> _Values:
    _stop_dropout(run.user_model)
    before = _parameters(run.user_model)
    run.enter_training()
    probe = _Probe(run.user_model)
    # The executor runs a shallow copy of this module, which has the same hooks.
    run.model_with_loss.register_forward_pre_hook(lambda module, args: probe.clear())
    run.model_with_loss.register_forward_hook(lambda module, args, output: (output, *probe.outputs.values()))
    args, kwargs = as_call(batch)
    run.model_with_loss.tracing_flag.retry(lambda: run.training_model.compile(*args, **kwargs))
    names = [*probe.outputs, _LOSS]
    probe.clear()  # the tensors of the capture
    result = run.training_model(*args, **kwargs)
    run.training_model.detachFromDevice()
    after = _parameters(run.user_model)
    gradients = {name: (before[name] - after[name]) / _LEARNING_RATE for name in before}
    outputs = {name: tensor.detach().clone() for name, tensor in zip(names, (*result[1:], result[0]))}
    return _Values(outputs, gradients)


def _on_torch(config: RunConfig, batch: Any) -> _Values:
    """Make the same step with plain torch: micro-batch by micro-batch, in float32."""
    model = initial_model(config)
    _stop_dropout(model)
    model.train()
    probe = _Probe(model)
    parts: List[Dict[str, torch.Tensor]] = []
    batches = _micro_batches(config, batch)
    for part in batches:
        probe.clear()
        loss = forward_and_loss(config, model, part)[1]
        (loss if config.replication.reduction == "sum" else loss / len(batches)).backward()
        parts.append({name: tensor.detach() for name, tensor in (*probe.outputs.items(), (_LOSS, loss))})
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return _Values({name: _joined([part[name] for part in parts]) for name in parts[0]}, gradients)


def _micro_batches(config: RunConfig, batch: Any) -> List[Any]:
    single = map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, batch)
    rows, size = leading_rows(batch) or 1, config.micro_batch_size
    parts = [slice(first, first + size) for first in range(0, rows, size)]
    return [map_tensors(operator.itemgetter(part), single) for part in parts]


def _joined(parts: List[torch.Tensor]) -> torch.Tensor:
    """Join micro-batches as PopTorch returns them: along the first dimension, numbers as a list."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


def _parameters(model: nn.Module) -> Dict[str, torch.Tensor]:
    trained = (item for item in model.named_parameters() if item[1].requires_grad)
    return {name: parameter.detach().float().clone() for name, parameter in trained}


class _Probe:
    """Collects the outputs of all modules of a model in the order in which they are computed.

    A tensor that a module takes from one inside it and returns is collected once, under the name of the inner one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outputs: Dict[str, torch.Tensor] = {}
        self._seen: List[Tuple[str, torch.Tensor]] = []
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name or _MODEL))

    def clear(self) -> None:
        """Forget what was collected; called before the model runs."""
        self.outputs.clear()
        self._seen.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def collect(module: nn.Module, args: Any, output: Any) -> None:
            map_tensors(lambda tensor: self._add(name, tensor), output)

        return collect

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        inside = "" if name == _MODEL else name + "."
        if any(tensor is known and maker.startswith(inside) for maker, known in self._seen):
            return
        self._seen.append((name, tensor))
        free, number = name, 1
        while free in self.outputs:
            number += 1
            free = f"{name} #{number}"
        # A copy: a later layer may write into the tensor.
        self.outputs[free] = tensor.detach().clone()


def _stop_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _refuse_random_numbers(config: RunConfig, batch: Any) -> None:
    model = initial_model(config)
    _stop_dropout(model)
    model.train()
    part = _micro_batches(config, batch)[0]
    with torch.no_grad():
        first, second = (forward_and_loss(config, model, part)[1] for _ in range(2))
    if not torch.equal(first, second):
        raise ConfigError(
            "the model draws random numbers, which differ between engines",
            seen=f"its loss for one batch is {float(first):g}, then {float(second):g}",
            fix="switch them off with the arguments of the model, such as model.dropout=0",
        )


def _compared(found: _Values, expected: _Values, allowed: Tolerances) -> List[Layer]:
    return _outputs(found, expected, allowed) + _gradients(found, expected, allowed)


def _outputs(found: _Values, expected: _Values, allowed: Tolerances) -> List[Layer]:
    layers = []
    for name, there in expected.outputs.items():
        here = found.outputs.get(name)
        scale = float(there.double().abs().max()) if there.numel() else 0.0
        difference = relative_difference(here, there, scale)
        layers.append(_layer("output", name, here, there, difference, allowed.values))
    return layers


def _gradients(found: _Values, expected: _Values, allowed: Tolerances) -> List[Layer]:
    """Compare gradients in the order of the backward pass: those of the last layer first."""
    order = {name: place for place, name in enumerate(expected.outputs)}
    zeros = {name: torch.zeros_like(gradient) for name, gradient in expected.gradients.items()}
    differences = change_differences(found.gradients, expected.gradients, zeros)

    def place(parameter: str) -> int:
        return order.get(parameter.rpartition(".")[0] or _MODEL, -1)

    return [
        _layer("gradient", name, *differences[name][1:], differences[name][0], allowed.gradients)
        for name in sorted(differences, key=place, reverse=True)
    ]


def _layer(
    kind: str, name: str, here: Optional[torch.Tensor], there: torch.Tensor, difference: float, tolerance: float
) -> Layer:
    sides = tensor_sides(here, there) if difference > tolerance else {}
    largest = relative_difference(here, there, 1.0)
    return Layer(kind, name, tuple(there.shape), largest, difference, tolerance, sides)
