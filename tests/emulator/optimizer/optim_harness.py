"""A small quadratic problem trained by the emulator's device optimizer, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional

import torch

from ipurun.emulator._optimizer.convert import convert
from ipurun.emulator._optimizer.update import DeviceOptimizer
from ipurun.emulator.options import Options

INPUTS = torch.linspace(-1.0, 1.0, 24).reshape(6, 4)
TARGETS = torch.linspace(0.5, -0.5, 18).reshape(6, 3)


def starting_weights() -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"weight": torch.randn(4, 3, generator=generator), "bias": torch.randn(3, generator=generator)}


def loss_of(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    outputs = INPUTS.to(weights["weight"].dtype) @ weights["weight"] + weights["bias"]
    return ((outputs - TARGETS.to(outputs.dtype)) ** 2).mean()


def gradients_of(weights: Mapping[str, torch.Tensor], scale: float) -> Dict[str, torch.Tensor]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in weights.items()}
    gradients = torch.autograd.grad(loss_of(leaves) * scale, list(leaves.values()))
    return dict(zip(leaves, gradients))


def train_with_torch(
    make_optimizer: Callable[[List[torch.nn.Parameter]], torch.optim.Optimizer],
    updates: int,
    max_norm: Optional[float] = None,
) -> Dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in starting_weights().items()}
    optimizer = make_optimizer(list(parameters.values()))
    for _ in range(updates):
        optimizer.zero_grad()
        loss_of(parameters).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), max_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


class Device:
    """Weights and their optimizer on the emulated device."""

    def __init__(
        self,
        make_optimizer: Callable[[List[torch.Tensor]], torch.optim.Optimizer],
        options: Optional[Options] = None,
        accumulation: int = 1,
        replicas: int = 1,
        weights: Optional[Dict[str, torch.Tensor]] = None,
        group_of: Optional[Dict[str, int]] = None,
    ) -> None:
        self.weights = starting_weights() if weights is None else weights
        self.host = [torch.nn.Parameter(tensor.clone()) for tensor in self.weights.values()]
        self.runs = accumulation * replicas
        self.optimizer = make_optimizer(self.host)
        groups = dict.fromkeys(self.weights, 0) if group_of is None else group_of
        self.compiled = DeviceOptimizer(
            convert(self.optimizer), self.weights, groups, options or Options(), accumulation, replicas
        )

    def feed(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Run one update with given gradients, the same for every micro-batch."""
        for _ in range(self.runs):
            self.compiled.accumulate(gradients, 1)
        self.compiled.apply()

    def train(self, updates: int) -> Dict[str, torch.Tensor]:
        for _ in range(updates):
            self.feed(gradients_of(self.weights, self.compiled.loss_scaling))
        return self.weights

    def send(self, **attributes: Any) -> None:
        """Change values of the first group and of the optimizer, then update the device as setOptimizer does."""
        for name, value in attributes.items():
            if name in self.optimizer.param_groups[0]:
                self.optimizer.param_groups[0][name] = value
                self.optimizer.defaults[name] = value
            else:
                setattr(self.optimizer, name, value)
        self.compiled.update(convert(self.optimizer))


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-6)
