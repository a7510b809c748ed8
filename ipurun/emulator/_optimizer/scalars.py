"""The named scalars of an update on the device: products of the optimizer's attributes.

A scalar is constant if all attributes in it are. State dictionaries contain the variable ones, and writing them
changes later updates, so the update rules use only these scalars.

The backend keeps attributes and scalars as float32. All of them are rounded here, the constants too, so that a run that
loads a state continues with exactly the values of the run that saved it.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Callable, Dict, Mapping

from ipurun.emulator._impl import createNativeError
from ipurun.emulator._optimizer.convert import Converted, OptimizerType, Value

LOSS_SCALING = "lossScaling_FLOAT"


class Variant(enum.Enum):
    """The kind of update of a parameter."""

    SGD = "SGD0"
    SGD_COMBINED = "SGD1"
    SGD_SEPARATE = "SGD2"
    ADAM = "Adam"
    ADAMW = "AdamW"
    LAMB = "Lamb"
    RMSPROP = "RMSProp"


@dataclass
class Scalar:
    """A scalar on the device; its value is rounded to float32."""

    value: float
    is_const: bool

    def __post_init__(self) -> None:
        self.value = single(self.value)


def single(value: float) -> float:
    """Return a number rounded to float32."""
    return ctypes.c_float(value).value


_ADAM_VARIANTS: Mapping[OptimizerType, Variant] = {
    OptimizerType.ADAM: Variant.ADAM,
    OptimizerType.ADAMW: Variant.ADAMW,
    OptimizerType.ADAMW_NO_BIAS: Variant.ADAMW,
    OptimizerType.RMSPROP: Variant.RMSPROP,
    OptimizerType.RMSPROP_CENTERED: Variant.RMSPROP,
    OptimizerType.LAMB: Variant.LAMB,
    OptimizerType.LAMB_NO_BIAS: Variant.LAMB,
}


def variant_for(converted: Converted, values: Mapping[str, Value]) -> Variant:
    """Return the kind of update for these values: SGD needs no state if momentum is constantly zero."""
    if converted.type not in (OptimizerType.SGD1, OptimizerType.SGD2):
        return _ADAM_VARIANTS[converted.type]
    momentum, is_const = values["momentum"]
    if is_const and momentum == 0:
        return Variant.SGD
    return Variant.SGD_COMBINED if converted.type is OptimizerType.SGD1 else Variant.SGD_SEPARATE


def make_scalars(variant: Variant, values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    """Compute the scalars of one parameter.

    Raises:
        poptorch.Error: If the loss scaling is zero.
    """
    if loss_scaling[0] == 0:
        raise createNativeError("Loss scaling cannot be 0", type="popart_exception")
    return _MAKERS[variant](values, (single(loss_scaling[0]), loss_scaling[1]))


def _sgd_scalars(values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    lr, wd, dm = (_number(values, name) for name in ("lr", "weight_decay", "dampening"))
    constant = _all_constant(values, "lr", "dampening")
    damped_lr = _product(lr, single(1 - dm))
    return {
        "scaledLearningRate0": Scalar(damped_lr / loss_scaling[0], constant and loss_scaling[1]),
        "weightDecayScaleFactor0": Scalar(1 - _product(damped_lr, wd), constant and values["weight_decay"][1]),
    }


def _momentum_scalars(
    values: Mapping[str, Value], loss_scaling: Value, velocity_scaling: Value, suffix: str
) -> Dict[str, Scalar]:
    lr, mm, wd, dm = (_number(values, name) for name in ("lr", "momentum", "weight_decay", "dampening"))
    vs, vs_const = single(velocity_scaling[0]), velocity_scaling[1]
    damped = _all_constant(values, "dampening") and vs_const
    undamped = single(1 - dm)
    return {
        "scaledLearningRate" + suffix: Scalar(lr / vs, values["lr"][1] and vs_const),
        "scaledMomentum" + suffix: Scalar(mm, values["momentum"][1]),
        "dampeningScaleFactor" + suffix: Scalar(_product(undamped, vs) / loss_scaling[0], damped and loss_scaling[1]),
        "weightDecayScaleFactor" + suffix: Scalar(_product(undamped, wd) * vs, damped and values["weight_decay"][1]),
    }


def _separate_scalars(values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    return _momentum_scalars(values, loss_scaling, velocity_scaling=loss_scaling, suffix="2")


def _combined_scalars(values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    return _momentum_scalars(values, loss_scaling, values["velocity_scaling"], suffix="1")


def _adam_scalars(values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    (beta1, beta2), betas_const = values["betas"]
    return {
        **_plain(values, learningRate="lr", weightDecay="weight_decay", adamEps="eps"),
        "adamBeta1": Scalar(float(beta1), betas_const),
        "adamBeta2": Scalar(float(beta2), betas_const),
    }


def _lamb_scalars(values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    return {**_adam_scalars(values, loss_scaling), **_plain(values, maxWeightNorm="max_weight_norm")}


def _rmsprop_scalars(values: Mapping[str, Value], loss_scaling: Value) -> Dict[str, Scalar]:
    return _plain(
        values,
        learningRate="lr",
        weightDecay="weight_decay",
        adaptiveAlpha="alpha",
        adaptiveMomentum="momentum",
        adaptiveEps="eps",
    )


_MAKERS: Mapping[Variant, Callable[[Mapping[str, Value], Value], Dict[str, Scalar]]] = {
    Variant.SGD: _sgd_scalars,
    Variant.SGD_SEPARATE: _separate_scalars,
    Variant.SGD_COMBINED: _combined_scalars,
    Variant.ADAM: _adam_scalars,
    Variant.ADAMW: _adam_scalars,
    Variant.LAMB: _lamb_scalars,
    Variant.RMSPROP: _rmsprop_scalars,
}


def _plain(values: Mapping[str, Value], **names: str) -> Dict[str, Scalar]:
    return {scalar: Scalar(_number(values, name), values[name][1]) for scalar, name in names.items()}


def _number(values: Mapping[str, Value], name: str) -> float:
    return single(values[name][0])


def _product(first: float, second: float) -> float:
    return single(first * second)


def _all_constant(values: Mapping[str, Value], *names: str) -> bool:
    return all(values[name][1] for name in names)
