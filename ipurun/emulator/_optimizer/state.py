"""Read and write the optimizer's state by the backend's names."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Optional

import torch

from ipurun.emulator._logging import logger, native_logger
from ipurun.emulator._optimizer.rules import Slot
from ipurun.emulator._optimizer.scalars import LOSS_SCALING, Scalar, Variant, single

UPDATE_FACTOR = "lossScaleUpdateFactor"
# Earlier versions of this module put this prefix before the names of parameters.
_OLD_PREFIX = "model."


def initial_state(
    slot: Slot, first_order: torch.dtype, second_order: torch.dtype, *, keeps_momentum: bool
) -> Dict[str, torch.Tensor]:
    """Return initial state tensors of a parameter, by the prefix of their names.

    Args:
        slot: The parameter.
        first_order: Type of velocities and first moments.
        second_order: Type of second moments.
        keeps_momentum: Whether RMSprop has a momentum buffer.
    """
    weight = slot.weight
    if slot.variant is Variant.SGD:
        return {}
    if slot.variant is Variant.SGD_COMBINED:
        return {"Accl": weight.detach() * slot["weightDecayScaleFactor1"]}
    if slot.variant is Variant.SGD_SEPARATE:
        return {"Accl1": torch.zeros_like(weight, dtype=first_order)}
    if slot.variant is Variant.RMSPROP:
        squares = torch.ones_like if slot.tf_variant else torch.zeros_like
        state = {"Accl1": squares(weight, dtype=second_order)}
        if slot.centered:
            state["Accl2"] = torch.zeros_like(weight, dtype=first_order)
        if keeps_momentum:
            state["Accl3"] = torch.zeros_like(weight, dtype=first_order)
        return state
    state = {
        "Accl1": torch.zeros_like(weight, dtype=first_order),
        "Accl2": torch.zeros_like(weight, dtype=second_order),
    }
    if slot.bias_corrected:
        state["Step"] = torch.zeros((), dtype=torch.float32)
    return state


class StateTable:
    """Reads and writes the entries of state dictionaries.

    Args:
        slots: The parameters on the device.
        loss_scaling: The loss scaling on the device.
        accumulation: Type of the gradient accumulators, None if there are none.
        update_factor: The factor of automatic loss scaling, if that is on.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        loss_scaling: Scalar,
        accumulation: Optional[torch.dtype],
        update_factor: Optional[torch.Tensor],
    ) -> None:
        self._slots: List[Slot] = list(slots)
        self._loss_scaling = loss_scaling
        self._accumulation = accumulation
        self._update_factor = update_factor

    def read(self) -> Dict[str, Dict[str, torch.Tensor]]:
        """Return a copy of all state and variable scalars."""
        native_logger.debug("Writing optimiser state tensors from IPU to host.")
        state = {name: tensor.detach().clone() for name, tensor in self._state_tensors().items()}
        if self._accumulation is not None:
            for slot in self._slots:
                if slot.variant is not Variant.SGD_COMBINED:
                    # The host reads state only between updates, when accumulators are empty.
                    state[f"Accum___{slot.name}"] = torch.zeros_like(slot.weight, dtype=self._accumulation)
        parameters = {
            name: torch.tensor(scalars[0].value, dtype=torch.float32) for name, scalars in self._variables().items()
        }
        return {"ipu_state": state, "ipu_param": parameters}

    def write(self, state: Mapping[str, Optional[Mapping[str, torch.Tensor]]]) -> None:
        """Overwrite the entries in `state`; warn about the others and keep their values on the device."""
        native_logger.debug("Writing optimiser state tensors from host to IPU memory")
        tensors, variables = self._state_tensors(), self._variables()
        loaded = {**(state.get("ipu_state") or {}), **(state.get("ipu_param") or {})}
        loaded = self._with_current_names(loaded, [*tensors, *variables])
        for name, tensor in tensors.items():
            if name in loaded:
                # A parameter that differs between replicas has one step count per value, here a single one.
                value = loaded[name]
                tensor.copy_(value[0] if tensor.dim() == 0 and value.dim() else value)
        for name, scalars in variables.items():
            if name in loaded:
                for scalar in scalars:
                    scalar.value = single(float(loaded[name]))
        missing = [name for name in (*tensors, *variables) if name not in loaded]
        if missing:
            logger.warning(
                "The optimizer state has no entry for %s: the values on the device are kept.",
                ", ".join(sorted(missing)),
            )

    def _with_current_names(self, loaded: Dict[str, torch.Tensor], names: List[str]) -> Dict[str, torch.Tensor]:
        """Return loaded values by the names of the device, whichever names they were stored under."""
        older = {name: _older_name(name) for name in names}
        num_current = sum(name in loaded for name in names)
        if sum(name in loaded for name in older.values()) <= num_current:
            return loaded
        return {name: loaded[stored] for name, stored in older.items() if stored in loaded}

    def _state_tensors(self) -> Dict[str, torch.Tensor]:
        tensors = {f"{prefix}___{slot.name}": tensor for slot in self._slots for prefix, tensor in slot.state.items()}
        if self._update_factor is not None:
            tensors[UPDATE_FACTOR] = self._update_factor
        return tensors

    def _variables(self) -> Dict[str, List[Scalar]]:
        # Lists, because parameters without a group share the names of the defaults.
        variables: Dict[str, List[Scalar]] = {}
        for slot in self._slots:
            for prefix, scalar in slot.scalars.items():
                if not scalar.is_const:
                    variables.setdefault(f"{prefix}___{slot.scalar_owner}", []).append(scalar)
        if not self._loss_scaling.is_const:
            variables[LOSS_SCALING] = [self._loss_scaling]
        return variables


def _older_name(name: str) -> str:
    """Return the name that earlier versions stored an entry under."""
    head, separator, parameter = name.rpartition("___")
    return name if not separator or parameter == "FLOAT" else f"{head}___{_OLD_PREFIX}{parameter}"
