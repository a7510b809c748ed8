"""The ways to write a placement (`pipeline.split`, `layers_per_ipu`, `blocks`, ...), each turned into blocks."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import Match, flat_names, match_names, names_in
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings, listing
from ipurun.inspect.facts import Facts
from ipurun.planning.layers import find_layers, share_layers
from ipurun.planning.placement.ends import embedding_blocks, head_blocks, returning_blocks

__all__ = ["Wanted", "ipu_of_part", "is_auto", "wanted_blocks"]

_BLOCK_FIELDS = {"ipu": "ipu", "ipu_id": "ipu", "id": "id", "user_id": "id"}
_MODULE_FIELDS = ("module", "layer_to_call")


@dataclass(frozen=True)
class Wanted:
    """A block that the config asks for; its IPU may be left to the stages or phases."""

    module: str
    ipu: Optional[int]
    block_id: str
    origin: str


def is_auto(split: Any) -> bool:
    """Whether the split is left to the planner."""
    return isinstance(split, str) and split.strip().lower() == "auto"


def ipu_of_part(index: int, strategy: str) -> int:
    """IPU of the n-th part of a model that is cut into parts."""
    if strategy == "serial_phased":
        return 0
    return index % 2 if strategy == "parallel_phased" else index


def wanted_blocks(pipeline: PipelineConfig, facts: Facts, room: str, found: Findings) -> List[Wanted]:
    """All blocks that a config asks for, in the order in which it names them.

    Args:
        pipeline: How the model is placed.
        facts: The model; without module names nothing is checked against it.
        room: ``pipeline`` or ``inference``, where the keys are.
        found: Takes the problems.
    """
    split = _split_modules(pipeline, facts, room, found)
    layers: Sequence[str] = ()
    wanted = [
        Wanted(module, ipu_of_part(index, pipeline.strategy), module, f"{room}.split")
        for index, module in enumerate(split, start=1)
    ]
    if pipeline.layers_per_ipu:
        if split:
            found.problem(
                f"`{room}.split` and `{room}.layers_per_ipu` contradict each other",
                seen=f"{room}.split={split}, {room}.layers_per_ipu={list(pipeline.layers_per_ipu)}",
                fix=f"{room}.split=[] or {room}.layers_per_ipu=[]",
                key=f"{room}.split",
            )
        layers, wanted = _by_layers(pipeline, facts, room, found)
    wanted += _explicit_blocks(pipeline, facts, found)
    ends = (
        *embedding_blocks(pipeline, facts, found),
        *head_blocks(pipeline, facts, layers, wanted[-1].ipu if wanted else 0, found),
    )
    return [Wanted(*end) for end in ends] + wanted if ends else wanted


def _split_modules(pipeline: PipelineConfig, facts: Facts, room: str, found: Findings) -> List[str]:
    key = f"{room}.split"
    if is_auto(pipeline.split):
        if facts.solved_split is None:
            found.problem(
                f"`{key}=auto` was not solved",
                seen=facts.unsolved or "no split of the model is known that fits",
                fix="ipurun plan --solve with the same config, or pipeline.split=[MODULE, ...]",
                key=key,
            )
            return []
        return list(facts.solved_split)
    if isinstance(pipeline.split, str):
        found.problem(
            f"`{key}` takes module names, or auto", seen=pipeline.split, fix=f"{key}=[{pipeline.split}]", key=key
        )
        return []
    modules: List[str] = []
    for name in names_in(pipeline.split, key, found):
        fitting = _modules(name, key, facts, found)
        for module in fitting:
            if module in modules:
                found.problem(
                    f"`{key}` names `{name}` twice", seen=str(pipeline.split), fix="name each module once", key=key
                )
            modules.append(module)
        if not fitting:
            modules.append(name)  # so that the number of IPUs stays as it was meant
    return modules


def _modules(name: str, key: str, facts: Facts, found: Findings) -> List[str]:
    if not facts.module_names:
        return [name]
    return [match.name for match in match_names(name, key, facts.module_names, found)]


def _by_layers(
    pipeline: PipelineConfig, facts: Facts, room: str, found: Findings
) -> Tuple[Sequence[str], List[Wanted]]:
    key = f"{room}.layers_per_ipu"
    if not facts.module_names:  # the model could not be made: only the number of IPUs is known
        parts = range(1, pipeline.ipus or len(pipeline.layers_per_ipu))
        return (), [Wanted(f"{key}[{part}]", ipu_of_part(part, pipeline.strategy), str(part), key) for part in parts]
    layers = find_layers(names_in(pipeline.layers, "pipeline.layers", found), facts, key, found)
    if not layers:
        return (), []
    counts = share_layers(pipeline.layers_per_ipu, len(layers), pipeline.ipus, key, found)
    wanted: List[Wanted] = []
    before = pipeline.embedding_ipu or 0
    layer_ipus: Dict[str, int] = {}
    first = 0
    for part, count in enumerate(counts):
        ipu = ipu_of_part(part, pipeline.strategy)
        layer_ipus.update(dict.fromkeys(layers[first : first + count], ipu))
        phased = pipeline.strategy.endswith("phased") and part > 0
        if count and (ipu != before or phased):
            wanted.append(Wanted(layers[first], ipu, layers[first], key))
        if count:
            before = ipu
        first += count
    begun = {one.module for one in wanted}
    returning = returning_blocks(pipeline, facts, layer_ipus, found)
    return layers, [Wanted(*block) for block in returning if block[0] not in begun] + wanted


def _explicit_blocks(pipeline: PipelineConfig, facts: Facts, found: Findings) -> List[Wanted]:
    wanted: List[Wanted] = []
    taken: Dict[str, str] = {}
    for pattern, entry in _block_entries(pipeline.blocks, found):
        fields = _block_fields(pattern, entry, found)
        if fields is None:
            continue
        for index, match in enumerate(_block_matches(pattern, facts, found)):
            block_id = _block_id(fields.get("id"), match, index, fields.get("ipu"), found)
            if taken.setdefault(match.name, pattern) != pattern:
                found.problem(
                    f"`pipeline.blocks`: `{taken[match.name]}` and `{pattern}` both begin a block at `{match.name}`",
                    fix="one block for each module",
                    key="pipeline.blocks",
                )
                continue  # the first one stands for both in what else is checked
            wanted.append(Wanted(match.name, fields.get("ipu"), block_id, "pipeline.blocks"))
    return wanted


def _block_entries(blocks: Any, found: Findings) -> List[Tuple[str, Any]]:
    if isinstance(blocks, Mapping):
        return list(flat_names(blocks, tuple(_BLOCK_FIELDS)).items())
    entries: List[Tuple[str, Any]] = []
    for entry in blocks if isinstance(blocks, (list, tuple)) else [blocks]:
        name = next((entry[field] for field in _MODULE_FIELDS if field in entry), None) if _is_map(entry) else None
        if name is None:
            found.problem(
                "`pipeline.blocks` takes a mapping by module, or a list of {module, ipu, id}",
                seen=str(entry),
                fix="pipeline.blocks={fc: {ipu: 1, id: B}}",
                key="pipeline.blocks",
            )
            continue
        entries.append((str(name), {key: value for key, value in entry.items() if key not in _MODULE_FIELDS}))
    return entries


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _block_fields(pattern: str, entry: Any, found: Findings) -> Optional[Dict[str, Any]]:
    if isinstance(entry, int) and not isinstance(entry, bool):
        entry = {"ipu": entry}
    known = isinstance(entry, Mapping) and all(field in _BLOCK_FIELDS for field in entry)
    fields = {_BLOCK_FIELDS[field]: value for field, value in entry.items() if value is not None} if known else {}
    ipu = fields.get("ipu", 0)
    if not known or isinstance(ipu, bool) or not isinstance(ipu, int) or ipu < 0:
        found.problem(
            f"`pipeline.blocks`: `{pattern}` takes an IPU, or {{ipu: 1, id: B}}",
            seen=str(entry),
            known=listing(_BLOCK_FIELDS),
            fix=f"pipeline.blocks={{{pattern}: {{ipu: 1}}}}",
            key="pipeline.blocks",
        )
        return None
    if "id" in fields:
        fields["id"] = str(fields["id"])
    return fields


def _block_matches(pattern: str, facts: Facts, found: Findings) -> List[Match]:
    if not facts.module_names:
        return [Match(pattern)]
    return match_names(pattern, "pipeline.blocks", facts.module_names, found)


def _block_id(template: Optional[str], match: Match, index: int, ipu: Optional[int], found: Findings) -> str:
    """A block's name: the module's, or a template's, such as ``layer{0}`` for the first wildcard's text."""
    if template is None:
        return match.name
    try:
        # What has no index in a format string gets the next one, so that `{}` means the first wildcard.
        return string.Formatter().vformat(template, match.texts, {"name": match.name, "index": index, "ipu": ipu})
    except (IndexError, KeyError, ValueError) as error:
        found.problem(
            f"`pipeline.blocks`: the id `{template}` cannot be filled in for `{match.name}`",
            seen=f"{type(error).__name__}: {error}",
            known="{name}, {index}, {ipu}, and {0}, {1}, ... for what the pattern's wildcards stand for",
            fix="{index} counts the modules that fit",
            key="pipeline.blocks",
        )
        return match.name
