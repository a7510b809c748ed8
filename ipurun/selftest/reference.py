"""The same numbers from plain torch: a training loop by hand, in float32, without PopTorch's API or the emulator.

It reads a config as PopTorch's documentation says that a device does: the samples of a host call are those of device
iterations x accumulation steps x replicas x micro-batch, in this order; every replica has its own buffers, and the host
reads those of the first.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import default_collate

from ipurun.config.schema import RunConfig
from ipurun.engine import load
from ipurun.inspect.batch_items import as_call, map_tensors, pick, split_target
from ipurun.inspect.data import make_splits
from ipurun.inspect.loss import make_loss
from ipurun.inspect.model_and_data import make_model_alone
from ipurun.inspect.sampling import seeded
from ipurun.selftest.compare import Numbers

__all__ = ["forward_and_loss", "initial_model", "reference_numbers"]

_TORCH_ARGUMENTS = ("lr", "momentum", "weight_decay", "betas", "eps", "alpha", "centered")


def initial_model(config: RunConfig) -> nn.Module:
    """Return the model of a config with the weights that its seed gives, in float32."""
    return make_model_alone(config, load("cpu"))


def reference_numbers(config: RunConfig, replicas: int, evaluates: bool, predicts: bool) -> Numbers:
    """Train the model of a config with plain torch.

    Args:
        config: The config; it must not shuffle, and its steps must fit into one epoch.
        replicas: Number of replicas.
        evaluates: Whether to compute the loss of the eval split.
        predicts: Whether to compute the outputs of the eval split.
    """
    with seeded(config.seed):
        splits = make_splits(config.data)
    model = initial_model(config)
    losses = _train(config, model, splits["train"], replicas)
    numbers = Numbers(losses, *_weights(model))
    if not evaluates and not predicts:
        return numbers
    model.eval()
    found, total, outputs = splits["eval"], 0.0, []
    with torch.no_grad():
        for index in range(len(found)):
            output, loss = forward_and_loss(config, model, default_collate([found[index]]))
            total += float(loss) / len(found)
            outputs.append(output)
    if evaluates:
        numbers.eval_loss = total
    if predicts:
        numbers.outputs = [torch.cat(parts) for parts in zip(*(_tensors(output) for output in outputs))]
    return numbers


def forward_and_loss(config: RunConfig, model: nn.Module, batch: Any) -> Tuple[Any, torch.Tensor]:
    """Return the output of a model for a micro-batch, and its loss."""
    args, kwargs = as_call(batch)
    if config.loss.name is None:
        output = model(*args, **kwargs)
        return output, _reduced(pick(output, config.loss.output, loss=True), config.loss.reduction)
    args, kwargs, target = split_target(args, kwargs, config.loss.target)
    output = model(*args, **kwargs)
    loss = make_loss(config.loss, load("cpu").module)
    assert loss is not None
    value = loss.function(pick(output, config.loss.output), target)
    return output, value if loss.reduction is None else _reduced(value, loss.reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[reduction]()


def _tensors(output: Any) -> List[torch.Tensor]:
    found: List[torch.Tensor] = []
    map_tensors(found.append, output)
    return found


def _train(config: RunConfig, model: nn.Module, data: Any, replicas: int) -> List[float]:
    """Train the model in place, and return the loss that a run logs at each host call."""
    inputs = replicas // config.replication.input_group_size
    iterations, steps = config.device_iterations, config.gradient_accumulation or 1
    buffers = [_copied_buffers(model) for _ in range(replicas)]
    optimizer = _optimizer(config.optimizer, model)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = _micro_batches(data, config.micro_batch_size)
    logged: List[float] = []
    model.train()
    for call in range((config.max_steps or 1) // iterations):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * _rate_factor(config, call * iterations)
        losses: List[List[List[float]]] = []
        for _ in range(iterations):
            optimizer.zero_grad()
            losses.append([])
            for _ in range(steps):
                shared = [next(batches) for _ in range(inputs)]
                losses[-1].append([])
                for replica in range(replicas):
                    _put_buffers(model, buffers[replica])
                    loss = forward_and_loss(config, model, shared[replica * inputs // replicas])[1]
                    count = 1 if config.replication.reduction == "sum" else steps * replicas
                    (loss / count).backward()
                    buffers[replica] = _copied_buffers(model)
                    losses[-1][-1].append(loss.item())
            optimizer.step()
        logged.append(_logged(config, losses))
    _put_buffers(model, buffers[0])
    return logged


def _micro_batches(data: Any, size: int) -> Iterator[Any]:
    for first in range(0, len(data) - size + 1, size):
        yield default_collate([data[first + row] for row in range(size)])


def _logged(config: RunConfig, losses: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the mean of the losses that the output mode returns; by device iteration, step and replica."""
    if config.output.mode == "final":
        losses = [[losses[-1][-1]]]
    elif config.output.mode == "every_n":
        losses = losses[config.output.every - 1 :: config.output.every]
    returned = [loss for iteration in losses for step in iteration for loss in step]
    return sum(returned) / len(returned)


def _rate_factor(config: RunConfig, step: int) -> float:
    if not config.schedule:
        return 1.0
    assert config.schedule["_target_"] == "ipurun.schedules.cosine", "the reference knows only this schedule"
    warmup = int(config.schedule.get("warmup_steps", 0))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max((config.max_steps or 1) - warmup, 1)))


def _copied_buffers(model: nn.Module) -> Dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _put_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _weights(model: nn.Module) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]:
    return dict(model.named_parameters()), dict(model.named_buffers())


def _optimizer(node: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    name = str(node["_target_"]).rpartition(".")[2]
    parameters = dict(model.named_parameters())
    groups: List[Dict[str, Any]] = [
        {**group, "params": [parameters.pop(name) for name in group["match"]]} for group in node.get("groups") or ()
    ]
    if node.get("no_decay"):
        assert node["no_decay"] == "norms_and_biases", "the reference knows only this word"
        exempt = {name for name in parameters if name.endswith("bias") or _is_norm(model, name)}
        groups.insert(0, {"params": [parameters.pop(name) for name in sorted(exempt)], "weight_decay": 0.0})
    groups.insert(0, {"params": list(parameters.values())})
    if name == "LAMB":
        return _Lamb(groups, node["lr"], node["weight_decay"], node.get("bias_correction", True))
    arguments = {key: node[key] for key in _TORCH_ARGUMENTS if key in node}
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **arguments)
    return made


def _is_norm(model: nn.Module, parameter: str) -> bool:
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), (_NormBase, nn.GroupNorm, nn.LayerNorm))


class _Lamb(torch.optim.Optimizer):
    """LAMB as in its paper, which torch does not have."""

    def __init__(self, groups: List[Dict[str, Any]], lr: float, weight_decay: float, corrects_bias: bool) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._corrects_bias = corrects_bias
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter by its own trust ratio."""
        self._steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                mean = state["mean"] = 0.9 * state.get("mean", torch.zeros_like(weight)) + 0.1 * weight.grad
                square = 0.999 * state.get("square", torch.zeros_like(weight)) + 0.001 * weight.grad**2
                state["square"] = square
                if self._corrects_bias:
                    mean, square = mean / (1 - 0.9**self._steps), square / (1 - 0.999**self._steps)
                change = mean / (square.sqrt() + 1e-8) + group["weight_decay"] * weight
                size, length = float(weight.norm()), float(change.norm())
                ratio = size / length if size and length else 1.0
                weight -= group["lr"] * ratio * change
