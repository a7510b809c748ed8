"""What a model that does not fit would take: IPUs, and the parts of it that are too large for any split."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Collection, Optional, Tuple

from ipurun.estimate.cuts import cells_of, cut_points, segment_memory, segments_ending_at
from ipurun.estimate.hardware import Machine
from ipurun.estimate.memory import parameter_shares
from ipurun.estimate.solve import Variant, split_for
from ipurun.estimate.stages import single_ipu
from ipurun.inspect.traced_model import ModelProfile

__all__ = ["Needs", "needs_of"]


@dataclass(frozen=True)
class Needs:
    """What it would take, all of it estimates.

    Args:
        parameter_bytes: Weights, accumulators and optimizer state on chip, of one replica.
        streaming_bytes: What lives in streaming memory, of one replica.
        least_ipus: IPUs whose memory holds the parameters alone, if nothing else were there.
        ipus: Fewest IPUs of one replica, a power of two, over which a split was found that fits; None: none was.
        tried: Largest number of IPUs that was tried.
        largest: (module, bytes) of the largest part that cannot be cut, where it is larger than an IPU; None: no such.
        overrides: Settings that all this supposes.
    """

    parameter_bytes: int
    streaming_bytes: int
    least_ipus: int
    ipus: Optional[int]
    tried: int
    largest: Optional[Tuple[str, int]]
    overrides: Tuple[str, ...]


def needs_of(
    profile: ModelProfile,
    variant: Variant,
    devices: int,
    machine: Machine,
    names: Optional[Collection[str]] = None,
    most: int = 512,
) -> Needs:
    """What a model would take with a variant of its settings.

    Args:
        profile: The model.
        variant: The settings that save most memory.
        devices: IPUs that were found to be too few.
        machine: On what it runs.
        names: Modules at which a block can begin; None: any.
        most: Where to stop.
    """
    settings = dataclasses.replace(variant.settings, micro_batch_size=1, recompute="checkpoints", strategy="pipelined")
    scaled = profile.with_micro_batch(1)
    (share,) = parameter_shares(scaled, single_ipu(scaled), settings)
    fixed = share.weights + share.gradients + share.state
    points = cut_points(scaled, names)
    cells = cells_of(scaled, points, variant.checkpoints, settings, machine)
    modules = ["the beginning", *(point.module for point in points)]
    largest: Optional[Tuple[str, int]] = None
    for number in range(len(cells)):
        alone = segments_ending_at(number + 1, cells, scaled, settings, machine, 0.0)[0]
        size = segment_memory(alone, 1, machine)
        if size > machine.memory_bytes * (1 + machine.over_margin) and (largest is None or size > largest[1]):
            largest = (modules[number], round(size))
    least = max(math.ceil(fixed / machine.memory_bytes), 1)  # weights may all be in streaming memory
    number, found = max(2 * devices, 2), None
    while largest is None and number <= min(most, len(cells)) and found is None:
        if number >= least and split_for(scaled, number, settings, machine, names, variant.checkpoints) is not None:
            found = number
        number *= 2
    return Needs(fixed, share.streaming, least, found, number // 2, largest, variant.overrides)
