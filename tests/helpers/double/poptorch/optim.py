"""Optimizers: torch's, with PopTorch's further arguments; the state is that of the device."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

_FURTHER = ("loss_scaling", "accum_type", "velocity_accum_type", "first_order_momentum_accum_type",
            "second_order_momentum_accum_type", "use_combined_accum", "velocity_scaling", "max_grad_norm",
            "bias_correction")  # fmt: skip


class _VariableAttributes:
    def isConstant(self, name: str) -> bool:
        return name != "lr"

    def markAsConstant(self, name: str) -> None:
        pass

    markAsVariable = markAsConstant


class Optimizer:
    """Arguments that PopTorch adds to an optimizer of torch."""

    def __init__(self, params: Any, **values: Any) -> None:
        further = {name: values.pop(name) for name in _FURTHER if name in values}
        super().__init__(params, **values)
        self.loss_scaling = further.get("loss_scaling") or 1.0
        self.variable_attrs = _VariableAttributes()
        self.device_state: Optional[Dict[str, Any]] = None  # as read from the device, or loaded by the user
        self.read_device: Any = None  # set by the executor

    def state_dict(self) -> Dict[str, Any]:
        if self.read_device is not None:
            self.read_device()
        return {**super().state_dict(), "ipu_state": self.device_state, "ipu_param": {}}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if not key.startswith("ipu_")})
        if "ipu_state" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self.device_state = state["ipu_state"]


class SGD(Optimizer, torch.optim.SGD):
    pass


class Adam(Optimizer, torch.optim.Adam):
    pass


class AdamW(Optimizer, torch.optim.AdamW):
    pass


class RMSprop(Optimizer, torch.optim.RMSprop):
    pass
