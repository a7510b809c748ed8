"""What to type so that a change takes the place of what a config says already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Sequence, Tuple

from ipurun.config.schema import RunConfig

__all__ = ["Words", "resized", "words_of"]

# Keys that place modules, apart from the split itself, with the value that each has when it is not used.
_PLACEMENT = {
    "layers_per_ipu": "[]",
    "layers": "null",
    "embedding": "null",
    "embedding_ipu": "null",
    "head": "null",
    "head_ipu": "null",
    "stages": "[]",
    "phases": "[]",
    "ipus": "null",
}


@dataclass(frozen=True)
class Words:
    """Overrides that undo what stands in a change's way.

    Args:
        placement: For another split: other keys that place modules.
        blocks: The same for `pipeline.blocks`, where the change does not set it.
        resized: For another number of IPUs in a replica.
        batch: For other numbers of a batch.
    """

    placement: Tuple[str, ...] = ()
    blocks: Tuple[str, ...] = ()
    resized: Tuple[str, ...] = ()
    batch: Tuple[str, ...] = ()


def resized(words: Words, proportions: Sequence[float], ipus: int) -> Tuple[List[str], Tuple[float, ...]]:
    """What to type for another number of IPUs in a replica, and the shares of tile memory that then hold.

    A list of shares by IPU stays where it is as long as there are IPUs; else its first one is taken for all.
    """
    key = "memory.available_proportion"
    typed = list(words.resized)
    if len(proportions) in (0, 1):
        return typed, tuple(proportions)
    if len(proportions) == ipus:
        return [word for word in typed if not word.startswith(key)], tuple(proportions)
    return [f"{key}={proportions[0]:g}" if word.startswith(key) else word for word in typed], tuple(proportions[:1])


def words_of(config: RunConfig) -> Words:
    """The overrides that a config makes necessary."""
    pipeline = config.pipeline
    placement = [
        f"pipeline.{key}={empty}" for key, empty in _PLACEMENT.items() if getattr(pipeline, key) not in (None, [], "")
    ]
    resized = []
    if config.replication.factor is not None:
        resized.append("replication.factor=null")
    if isinstance(config.memory.available_proportion, (list, tuple, dict)):
        resized.append("memory.available_proportion=null")
    for key in ("device_iterations", "replicas", "split", "layers_per_ipu"):
        if getattr(config.inference, key) is not None:
            resized.append(f"inference.{key}=null")
    return Words(
        tuple(placement),
        ("pipeline.blocks={}",) if pipeline.blocks else (),
        tuple(resized),
        ("global_batch_size=null",) if config.global_batch_size is not None else (),
    )
