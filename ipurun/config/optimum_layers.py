"""optimum's `layers_per_ipu`, as names of the modules at which each next IPU begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Tuple

__all__ = ["Layers", "read_layers", "recompute_patterns"]


@dataclass(frozen=True)
class Layers:
    """Placement of one mode.

    Args:
        given: Whether the file says anything about it.
        ipus: IPUs of one replica.
        split: Module names, empty where they are not known or not needed.
        note: What could not be turned into names.
    """

    given: bool
    ipus: int = 1
    split: Tuple[str, ...] = ()
    note: str = ""


def read_layers(source: Mapping[str, Any], mode: str, layers: Optional[str]) -> Layers:
    """The placement of training (mode ``""``) or inference (``inference_``).

    Args:
        source: The values of ipu_config.json.
        mode: Prefix of the mode's keys.
        layers: Dotted name of the list of layers; None: not known.
    """
    prefixes = [mode] if mode else ["training_", ""]
    counts = next(
        (source[f"{prefix}layers_per_ipu"] for prefix in prefixes if f"{prefix}layers_per_ipu" in source), None
    )
    ipus = next(
        (source[f"{prefix}ipus_per_replica"] for prefix in prefixes if source.get(f"{prefix}ipus_per_replica")), None
    )
    if counts is None and ipus is None:
        return Layers(given=False)
    counts = [-1] if counts is None else counts
    spread = ipus or len(counts)
    if spread == 1:
        return Layers(given=True)
    shown = f"{mode}layers_per_ipu: {json.dumps(counts)} over {spread} IPUs"
    if -1 in counts or len(counts) != spread:
        return Layers(True, spread, note=f"{shown} depends on the number of layers")
    starts = _starts(counts)
    if layers is None:
        places = ", ".join(map(str, starts))
        return Layers(True, spread, note=f"{shown} (IPUs begin at layers {places}; --layers NAME names them)")
    return Layers(True, spread, tuple(f"{layers}.{start}" for start in starts))


def _starts(counts: List[int]) -> List[int]:
    """The first layer of every IPU but the first; IPU 0 may hold no layer and only the embedding."""
    starts = []
    total = 0
    for count in counts[:-1]:
        total += count
        starts.append(total)
    return starts


def recompute_patterns(layers: str) -> List[str]:
    """Patterns that match the layers of a list, and nothing inside them."""
    return [f"{layers}.[0-9]", f"{layers}.[0-9][0-9]"]
