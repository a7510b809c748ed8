"""Warns about attributes that appear on an optimizer after its first conversion: the device ignores them."""

from __future__ import annotations

from typing import Any, Optional, Set, Tuple

from ipurun.emulator._logging import logger

__all__ = ["AttributeTracker"]

# Set by torch's or poptorch's constructors: a switch between the two is no reason to warn.
_CONSTRUCTOR_ATTRIBUTES = frozenset(
    {
        "accum_type",
        "bias_correction",
        "defaults",
        "first_order_momentum_accum_type",
        "loss_scaling",
        "max_grad_norm",
        "param_groups",
        "second_order_momentum_accum_type",
        "state",
        "use_combined_accum",
        "use_tf_variant",
        "variable_attrs",
        "velocity_accum_type",
    }
)


class AttributeTracker:
    """Remembers what an executor's optimizers looked like.

    Args:
        relaxed: Only mention unexpected attributes in the debug log.
    """

    def __init__(self, relaxed: bool = False) -> None:
        self._log = logger.debug if relaxed else logger.warning
        self._optimizer_names: Optional[Set[str]] = None
        self._group_names: Set[str] = set()
        self._reported: Set[Tuple[int, str]] = set()

    def observe(self, optimizer: Any) -> None:
        """Learn the attributes the first time, report new ones once each later."""
        names = {name for name in vars(optimizer) if not name.startswith("_")} - _CONSTRUCTOR_ATTRIBUTES
        if self._optimizer_names is None:
            self._optimizer_names = names
            self._group_names = {name for group in optimizer.param_groups for name in group}
            return
        kind = type(optimizer).__name__
        for name in sorted(names - self._optimizer_names):
            self._optimizer_names.add(name)
            self._log("Ignoring unexpected optimizer attribute in %s optimizer: %r", kind, name)
        for index, group in enumerate(optimizer.param_groups):
            for name in sorted(set(group) - self._group_names):
                if (index, name) in self._reported:
                    continue
                self._reported.add((index, name))
                self._log("Ignoring unexpected group %d attribute in %s optimizer: %r", index, kind, name)
