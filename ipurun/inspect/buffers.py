"""Which buffers a model changes while it trains: several replicas cannot keep those equal."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
from torch import nn
from torch.utils.data import default_collate

from ipurun.config.schema import LossConfig
from ipurun.inspect.batch_items import as_call, split_target
from ipurun.inspect.sampling import seeded

__all__ = ["changing_buffers"]


def changing_buffers(model: nn.Module, data: Any, loss: LossConfig, seed: int) -> Tuple[str, ...]:
    """Names of the buffers that a forward pass in training mode writes to.

    Statistics of normalisation layers are known by their names. For other buffers the model runs once on two
    samples; where that fails, nothing is claimed, and the engine's own check at compile time remains.

    Args:
        model: The model; its buffers, mode and the random states are as before afterwards.
        data: A map-style data set to take two samples from, or None.
        loss: Tells which item of a sample is the target.
        seed: Seed of the trial.
    """
    known = set(_running_statistics(model))
    others = [name for name, _ in model.named_buffers() if name not in known]
    if others and data is not None:
        known |= _written_in_trial(model, data, loss, seed)
    return tuple(name for name, _ in model.named_buffers() if name in known)


def _running_statistics(model: nn.Module) -> Tuple[str, ...]:
    names = []
    for prefix, module in model.named_modules():
        if getattr(module, "track_running_stats", False) and getattr(module, "running_mean", None) is not None:
            own = ("running_mean", "running_var", "num_batches_tracked")
            names += [f"{prefix}.{name}" if prefix else name for name in own]
    return tuple(names)


def _written_in_trial(model: nn.Module, data: Any, loss: LossConfig, seed: int) -> set:
    before: Dict[str, torch.Tensor] = dict(model.named_buffers())
    versions = {name: buffer._version for name, buffer in before.items()}
    values = {name: buffer.clone() for name, buffer in before.items()}
    modes = {module: module.training for module in model.modules()}
    try:
        with seeded(seed), torch.no_grad():
            batch = default_collate([data[index % len(data)] for index in range(2)])
            args, kwargs = as_call(batch)
            if loss.name is not None:
                args, kwargs, _ = split_target(args, kwargs, loss.target)
            model.train()
            model(*args, **kwargs)
        return {
            name
            for name, buffer in model.named_buffers()
            if name not in before or buffer is not before[name] or buffer._version != versions[name]
        }
    except Exception:  # user code of any kind: compiling will show what is wrong with it
        return set()
    finally:
        _restore(model, before, values)
        for module, mode in modes.items():
            module.training = mode


def _restore(model: nn.Module, before: Dict[str, torch.Tensor], values: Dict[str, torch.Tensor]) -> None:
    for name, buffer in before.items():
        prefix, _, own = name.rpartition(".")
        with torch.no_grad():
            buffer.copy_(values[name])
        model.get_submodule(prefix)._buffers[own] = buffer
