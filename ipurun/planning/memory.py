"""`memory` and `replication.tensor_sharding`: where tensors are kept, and how much memory operations may use."""

from __future__ import annotations

import re
from typing import Any, Dict, List

from ipurun.api.calls import Call
from ipurun.config.schema import RunConfig, TensorLocationConfig
from ipurun.errors import Findings
from ipurun.planning.user_settings import LOCATION_FIELDS, LOCATIONS, UserSettings

__all__ = ["memory_calls"]


def memory_calls(
    config: RunConfig, settings: UserSettings, ipus: int, replicas: int, training: bool, found: Findings
) -> List[Call]:
    """Return the calls that follow from `memory`.

    Args:
        config: The config.
        settings: What the user set.
        ipus: IPUs of one replica, for `memory.available_proportion`.
        replicas: Replicas, for the rules of sharding.
        training: False leaves out what only training has (optimizer state, accumulators).
        found: Takes problems and notes.
    """
    memory = config.memory
    calls = _location_calls(config, settings, training)
    proportions = _proportions(memory.available_proportion, ipus, training, found)
    if proportions:
        calls.append(Call("setAvailableMemoryProportion", (proportions,), origin="memory.available_proportion"))
    if memory.io_tiles is not None:
        if not 32 <= memory.io_tiles <= 192 or memory.io_tiles % 2:
            nearest = min(max(memory.io_tiles + memory.io_tiles % 2, 32), 192)
            found.problem(
                "`memory.io_tiles` must be an even number from 32 to 192",
                seen=f"memory.io_tiles={memory.io_tiles}",
                fix=f"memory.io_tiles={nearest}",
                key="memory.io_tiles",
            )
        calls.append(Call("TensorLocations.numIOTiles", (memory.io_tiles,), origin="memory.io_tiles"))
    if memory.prefetch_depth is not None:
        calls.append(
            Call(
                "_Popart.set",
                ("defaultPrefetchBufferingDepth", memory.prefetch_depth),
                origin="memory.prefetch_depth",
            )
        )
    if training:
        _check_sharding(config, replicas, found)
    return calls


def _location_calls(config: RunConfig, settings: UserSettings, training: bool) -> List[Call]:
    calls = []
    for kind in LOCATIONS if training else ("weights", "activations"):
        location: TensorLocationConfig = getattr(config.memory, kind)
        values = {setter: getattr(location, name) for name, setter in LOCATION_FIELDS.items()}
        chain = [Call(setter, (value,)) for setter, value in values.items() if value is not None]
        origin = f"memory.{kind}"
        sharding = config.replication.tensor_sharding
        # An explicit false is written only where another source may say true.
        is_refused = settings.has("replication.tensor_sharding") and settings.argument(LOCATIONS[kind]) is not None
        if kind == "optimizer_state" and (sharding or is_refused) and location.sharded is None:
            chain.append(Call("useReplicatedTensorSharding", (sharding,)))
            origin = f"{origin}, replication.tensor_sharding" if len(chain) > 1 else "replication.tensor_sharding"
        if chain:
            made = Call("poptorch.TensorLocationSettings", chain=tuple(chain))
            calls.append(Call(LOCATIONS[kind], (made,), origin=origin))
    return calls


def _check_sharding(config: RunConfig, replicas: int, found: Findings) -> None:
    if config.replication.tensor_sharding and config.memory.optimizer_state.sharded is False:
        found.problem(
            "`replication.tensor_sharding` and `memory.optimizer_state.sharded` contradict each other",
            seen="replication.tensor_sharding=true, memory.optimizer_state.sharded=false",
            fix="memory.optimizer_state.sharded=null",
            key="replication.tensor_sharding",
        )
    sharded = [kind for kind in LOCATIONS if getattr(config.memory, kind).sharded]
    if replicas == 1 and (config.replication.tensor_sharding or sharded):
        # PopART warns ("Unable to shard tensor ... due to lack of replication") and keeps whole tensors.
        found.note(
            "replicated tensor sharding needs two or more replicas in a process; with one, PopART does not shard"
        )


def _proportions(value: Any, ipus: int, training: bool, found: Findings) -> Dict[str, float]:
    """Return a number for all IPUs, a list by IPU or a mapping as ``{"IPU0": 0.2}``.

    Lists are written for training; inference on fewer IPUs uses the first entries.
    """
    if value is None:
        return {}
    if isinstance(value, (list, tuple)):
        listed = value if training else value[:ipus]
        shares: Dict[Any, Any] = {f"IPU{index}": share for index, share in enumerate(listed)}
        if training and len(value) != ipus:
            found.problem(
                f"`memory.available_proportion` needs one entry for each of the {ipus} IPUs of a replica",
                seen=str(list(value)),
                fix=f"write one number for all IPUs, or {ipus} entries",
                key="memory.available_proportion",
            )
    elif isinstance(value, dict):
        shares = dict(value)
    else:
        shares = {f"IPU{index}": value for index in range(ipus)}
    wrong = {
        name: share
        for name, share in shares.items()
        if not re.fullmatch(r"IPU\d+", str(name))
        or isinstance(share, bool)
        or not isinstance(share, (int, float))
        or not 0 <= share <= 1
    }
    if wrong:
        found.problem(
            "`memory.available_proportion` takes numbers from 0 to 1, one for all IPUs or one for each",
            seen=str(value),
            fix="memory.available_proportion=0.2 or '{IPU0: 0.2, IPU1: 0.4}'",
            key="memory.available_proportion",
        )
        return {}
    return {str(name): float(share) for name, share in shares.items()}
