"""`precision`: the normal form, rules by module, and what float16 needs beside it."""

from __future__ import annotations

from typing import Dict, Sequence

from ipurun.config.patterns import match_modules
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings

__all__ = ["module_precisions", "normal_precision", "note_loss_scale"]

_SHORT = {"16": "16.16", "32": "32.32"}


def normal_precision(precision: str, found: Findings) -> str:
    """``<operations>.<weights>`` for any spelling of it."""
    text = _SHORT.get(str(precision), str(precision))
    if text not in ("32.32", "16.32", "16.16"):
        found.problem(
            f"`precision` does not know `{precision}`",
            known="32.32, 16.32, 16.16; 16 and 32 for short",
            fix="precision=16.16",
            key="precision",
        )
        return "32.32"
    return text


def module_precisions(config: RunConfig, module_names: Sequence[str], found: Findings) -> Dict[str, str]:
    """Module -> 16 or 32; where two patterns fit a module, the later one counts."""
    chosen: Dict[str, str] = {}
    for pattern, value in config.precision_rules.items():
        if str(value) not in ("16", "32"):
            found.problem(
                f"`precision_rules` gives `{pattern}` the precision `{value}`",
                known="16, 32",
                fix=f"precision_rules: {{'{pattern}': 16}}",
                key="precision_rules",
            )
            continue
        names = match_modules(str(pattern), "precision_rules", module_names, found) if module_names else [pattern]
        chosen.update({name: str(value) for name in names})
    return chosen


def note_loss_scale(config: RunConfig, precision: str, optimizer_scale: object, found: Findings) -> None:
    """Small gradients vanish in float16 unless the loss is scaled up."""
    scale = config.loss_scaling if config.loss_scaling is not None else optimizer_scale
    if precision.startswith("16") and (scale is None or scale in (1, 1.0, "1", "1.0")):
        found.note("float16 gradients with a loss scale of 1 may underflow; loss_scaling=1024 is a usual start")
    if precision == "32.32" and str(scale) == "auto":
        found.note("loss_scaling=auto watches float16 gradients only, and precision=32.32 has none")
