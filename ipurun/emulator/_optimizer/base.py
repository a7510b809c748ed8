"""The base class of poptorch's optimizers: variable attributes, and state on the device."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional

import torch

from ipurun.emulator._logging import logger

DeviceState = Dict[str, Optional[Dict[str, torch.Tensor]]]

_ACCUMULATION_TYPES = (torch.float16, torch.float32)
# Constructor arguments that become attributes of the optimizer instead of entries in its groups.
_DEFAULTS: Dict[str, Any] = {
    "loss_scaling": 1.0,
    "max_grad_norm": float("inf"),
    "bias_correction": True,
    "use_combined_accum": False,
    "use_tf_variant": False,
    "accum_type": torch.float32,
    "velocity_accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}


def _uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's optimizers without its wrapper, which loads torch's compiler only to disable it."""
    return getattr(method, "__wrapped__", method)


class VariableAttributes:
    """The attributes of an optimizer that may change after the model is compiled.

    Args:
        variable_attributes: Names that may change.
        allowed_attributes: All names that can be marked.
    """

    def __init__(self, variable_attributes: List[str], allowed_attributes: List[str]) -> None:
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Whether the attribute is a constant of the compiled program."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Compile the attribute in as a constant."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let `setOptimizer` change the attribute."""
        self._check(attr)
        if self.isConstant(attr):
            self._variable_attributes = [*self._variable_attributes, attr]

    def _check(self, attr: str) -> None:
        assert attr in self._allowed_attributes, (
            f"Unknown attribute {attr!r}: only {', '.join(sorted(self._allowed_attributes))} can be marked"
        )


class Optimizer:
    """Holds the state of the compiled optimizer in addition to torch's.

    The state is newer on the device (after a run), newer on the host (after loading), or the same on both.
    The executor connects a reader while the device holds the state; copies and pickles are not connected.
    """

    _read_device: Optional[Callable[[], DeviceState]] = None
    _device_is_newer: bool = False
    _host_is_newer: bool = False
    variable_attrs: VariableAttributes
    bias_correction: bool
    use_combined_accum: bool
    defaults: Dict[str, Any]
    param_groups: List[Dict[str, Any]]

    def __init__(self) -> None:
        self._ipu_state: DeviceState = {"ipu_state": None, "ipu_param": None}

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add parameters with separate settings."""
        _uncompiled(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> Dict[str, Any]:
        """Return torch's state dictionary with the device's `ipu_state` and `ipu_param` (None until compiled)."""
        state = _uncompiled(torch.optim.Optimizer.state_dict)(self)
        if self._needs_reading():
            self._pull()
        else:
            logger.debug("Using cached optimiser state dict")
        state.update(self.get_state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load torch's values now, and the device's at the next run or attach.

        Raises:
            RuntimeError: If the dictionary does not come from a poptorch optimizer.
        """
        _uncompiled(torch.optim.Optimizer.load_state_dict)(self, state)
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._keep(state)
        self._host_is_newer = self.has_state()

    def get_state_dict(self) -> DeviceState:
        """Return the device state last read by the host, without reading the device."""
        return {key: None if tensors is None else dict(tensors) for key, tensors in self._ipu_state.items()}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the device state on the host; it is uploaded at the next run or attach.

        Raises:
            RuntimeError: If `state` is empty.
        """
        if not state:
            raise RuntimeError("Cannot set an empty optimizer state.")
        self._keep(state)
        self._host_is_newer = self.has_state()

    def has_state(self) -> bool:
        """Whether the host holds any device state."""
        return any(tensors is not None for tensors in self._ipu_state.values())

    def _keep(self, state: Mapping[str, Any]) -> None:
        self._ipu_state = {
            key: None if state.get(key) is None else dict(state[key]) for key in ("ipu_state", "ipu_param")
        }

    def _needs_reading(self) -> bool:
        return self._device_is_newer and not self._host_is_newer and self._read_device is not None

    def _pull(self) -> None:
        assert self._read_device is not None, "no device holds the state of this optimizer"
        self._keep(self._read_device())
        self._device_is_newer = False

    def _connect(self, read: Callable[[], DeviceState]) -> None:
        """Connect the reader of the device's state (called by the executor)."""
        self._read_device = read
        self._device_is_newer = True

    def _disconnect(self) -> None:
        """Read newer state from the device before it detaches or gets another optimizer."""
        if self._needs_reading():
            self._pull()
        self._read_device = None

    def _mark_device_newer(self) -> None:
        """Note that the state on the host is outdated because the executor ran."""
        self._device_is_newer = True

    def _has_state_to_upload(self) -> bool:
        """Whether the user loaded state that is not on the device yet."""
        return self._host_is_newer

    def _take_state_to_upload(self) -> Optional[DeviceState]:
        """Return state loaded by the user that is not on the device yet, or None."""
        if not self._has_state_to_upload():
            return None
        self._host_is_newer = False
        self._device_is_newer = True
        return self.get_state_dict()

    def _bind(self, arguments: Dict[str, Any]) -> None:
        """Initialise the optimizer from its constructor arguments.

        Args:
            arguments: The constructor's `locals()`; None selects the default.
        """
        Optimizer.__init__(self)
        given = {
            name: value for name, value in arguments.items() if value is not None and name not in ("self", "params")
        }
        for name in [name for name in _DEFAULTS if name in arguments]:
            value = given.get(name, _DEFAULTS[name])
            assert not name.endswith("accum_type") or value in _ACCUMULATION_TYPES, (
                f"{name} must be torch.float32 or torch.float16, not {value}"
            )
            setattr(self, name, value)
        self._start_torch(arguments["params"], {name: given[name] for name in given if name not in _DEFAULTS})
        allowed = [*self.defaults, "loss_scaling"]
        self.variable_attrs = VariableAttributes([name for name in allowed if name in given], allowed)

    def _start_torch(self, params: Iterable, given: Dict[str, Any]) -> None:
        """Call the constructor of torch's optimizer with the given arguments."""
        super().__init__(params, **given)  # type: ignore[call-arg]  # torch's class comes next in the order of bases

    def __getstate__(self) -> Dict[str, Any]:
        """Add the poptorch attributes to torch's pickle, without the reader of the device."""
        if self._needs_reading():
            self._pull()
        own = {name: value for name, value in vars(self).items() if name in _DEFAULTS}
        own["variable_attrs"] = VariableAttributes(
            list(self.variable_attrs._variable_attributes), list(self.variable_attrs._allowed_attributes)
        )
        own["_ipu_state"] = self.get_state_dict()
        own["_host_is_newer"] = self.has_state()
        return {**super().__getstate__(), **own}  # type: ignore[misc]  # torch's
