"""optimum's `layers_per_ipu` and `ipus_per_replica`, as ipurun's `layers_per_ipu`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Mapping, Tuple

__all__ = ["Layers", "read_layers"]

_REST = -1


@dataclass(frozen=True)
class Layers:
    """Placement of one mode.

    Args:
        given: Whether the file says anything about it.
        counts: Layers on each IPU, -1 for a share of the rest; empty for a single IPU.
        note: What contradicts itself.
    """

    given: bool
    counts: Tuple[int, ...] = ()
    note: str = ""


def read_layers(source: Mapping[str, Any], mode: str) -> Layers:
    """The placement of training (mode ``""``) or inference (``inference_``)."""
    prefixes = [mode] if mode else ["training_", ""]
    counts = next(
        (source[f"{prefix}layers_per_ipu"] for prefix in prefixes if f"{prefix}layers_per_ipu" in source), None
    )
    ipus = next(
        (source[f"{prefix}ipus_per_replica"] for prefix in prefixes if source.get(f"{prefix}ipus_per_replica")), None
    )
    if counts is None and ipus is None:
        return Layers(given=False)
    counts = [_REST] if counts is None else counts
    spread = ipus or len(counts)
    if spread == 1:
        return Layers(given=True)
    if list(counts) == [_REST]:
        return Layers(True, (_REST,) * spread)
    if len(counts) != spread:
        return Layers(True, note=f"{mode}layers_per_ipu: {json.dumps(counts)} does not fit {spread} IPUs per replica")
    return Layers(True, tuple(counts))
