"""The forms in which a placement is written (`pipeline.split`, `layers_per_ipu`, `blocks`), turned into blocks."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import Match, flat_names, match_names, names_in
from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings, listing
from ipurun.inspect.facts import Facts
from ipurun.planning.layers import find_layers, share_layers
from ipurun.planning.placement.ends import embedding_blocks, head_blocks, returning_blocks, table_blocks

__all__ = ["RequestedBlock", "is_auto", "requested_blocks"]

_BLOCK_FIELDS = {"ipu": "ipu", "ipu_id": "ipu", "id": "id", "user_id": "id"}
_MODULE_FIELDS = ("module", "layer_to_call")


@dataclass(frozen=True)
class RequestedBlock:
    """A block that the config asks for; its IPU may be left to the stages or phases."""

    module: str
    ipu: Optional[int]
    block_id: str
    origin: str


def is_auto(split: Any) -> bool:
    """Return whether the split is to be found automatically."""
    return isinstance(split, str) and split.strip().lower() == "auto"


def _ipu_of_part(index: int, strategy: str) -> int:
    if strategy == "serial_phased":
        return 0
    return index % 2 if strategy == "parallel_phased" else index


def requested_blocks(pipeline: PipelineConfig, facts: Facts, group: str, found: Findings) -> List[RequestedBlock]:
    """Return all blocks that a config asks for, in the order in which it names them.

    Args:
        pipeline: How the model is placed.
        facts: The model; without module names, names are not checked.
        group: ``pipeline`` or ``inference``: the config group that holds the keys.
        found: Takes the problems.
    """
    split = _split_modules(pipeline, facts, group, found)
    layer_ipus: Mapping[str, int] = {}
    requested = [
        RequestedBlock(module, _ipu_of_part(index, pipeline.strategy), module, f"{group}.split")
        for index, module in enumerate(split, start=1)
    ]
    if pipeline.layers_per_ipu:
        if split:
            found.problem(
                f"`{group}.split` and `{group}.layers_per_ipu` contradict each other",
                seen=f"{group}.split={split}, {group}.layers_per_ipu={list(pipeline.layers_per_ipu)}",
                fix=f"{group}.split=[] or {group}.layers_per_ipu=[]",
                key=f"{group}.split",
            )
        layer_ipus, requested = _by_layers(pipeline, facts, group, found)
    else:
        names_in(pipeline.layers, "pipeline.layers", found)  # unused here, but wrong values are reported
    requested += _explicit_blocks(pipeline, facts, found)
    ends = (
        *embedding_blocks(pipeline, facts, found),
        *head_blocks(pipeline, facts, layer_ipus, requested[-1].ipu if requested else 0, found),
    )
    requested = [*(RequestedBlock(*end) for end in ends), *requested]
    parts = table_blocks(facts, layer_ipus, None if group == "pipeline" else [one.ipu or 0 for one in requested])
    if parts and pipeline.strategy.endswith("phased"):
        found.problem(
            f"`memory.serialize` splits `{next(iter(facts.table_parts))}` over IPUs, which phased execution cannot",
            fix="a number of parts instead of a list, or pipeline.strategy=pipelined",
            key="memory.serialize",
        )
    begun = {one.module for one in requested}
    return requested + [RequestedBlock(*part) for part in parts if part[0] not in begun]


def _split_modules(pipeline: PipelineConfig, facts: Facts, group: str, found: Findings) -> List[str]:
    key = f"{group}.split"
    if is_auto(pipeline.split):
        if facts.solved_split is None:
            found.problem(
                f"`{key}=auto` found no split",
                seen=facts.unsolved or "no known split of the model fits",
                fix="run ipurun plan --solve with the same config, or set pipeline.split=[MODULE, ...]",
                key=key,
            )
            return []
        return list(facts.solved_split)
    if isinstance(pipeline.split, str):
        found.problem(
            f"`{key}` takes a list of module names, or auto",
            seen=pipeline.split,
            fix=f"{key}=[{pipeline.split}]",
            key=key,
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
            modules.append(name)  # keeps the number of IPUs as intended
    return modules


def _modules(name: str, key: str, facts: Facts, found: Findings) -> List[str]:
    if not facts.module_names:
        return [name]
    return [match.name for match in match_names(name, key, facts.module_names, found)]


def _by_layers(
    pipeline: PipelineConfig, facts: Facts, group: str, found: Findings
) -> Tuple[Mapping[str, int], List[RequestedBlock]]:
    key = f"{group}.layers_per_ipu"
    layers: Sequence[str] = ()
    if facts.module_names:
        layers = find_layers(names_in(pipeline.layers, "pipeline.layers", found), facts, key, found)
    counts = share_layers(pipeline.layers_per_ipu, len(layers), pipeline.ipus, key, found) if layers else ()
    if not counts:  # keeps the number of IPUs as intended
        parts = range(1, pipeline.ipus or len(pipeline.layers_per_ipu))
        return dict.fromkeys(layers, 0), [
            RequestedBlock(f"{key}[{part}]", _ipu_of_part(part, pipeline.strategy), str(part), key) for part in parts
        ]
    requested: List[RequestedBlock] = []
    before = pipeline.embedding_ipu or 0
    layer_ipus: Dict[str, int] = {}
    first = 0
    for part, count in enumerate(counts):
        ipu = _ipu_of_part(part, pipeline.strategy)
        layer_ipus.update(dict.fromkeys(layers[first : first + count], ipu))
        phased = pipeline.strategy.endswith("phased") and part > 0
        if count and (ipu != before or phased):
            requested.append(RequestedBlock(layers[first], ipu, layers[first], key))
        if count:
            before = ipu
        first += count
    begun = {one.module for one in requested}
    returning = returning_blocks(pipeline, facts, layer_ipus, found)
    return layer_ipus, [RequestedBlock(*block) for block in returning if block[0] not in begun] + requested


def _explicit_blocks(pipeline: PipelineConfig, facts: Facts, found: Findings) -> List[RequestedBlock]:
    requested: List[RequestedBlock] = []
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
                    fix="keep one block for each module",
                    key="pipeline.blocks",
                )
                continue
            requested.append(RequestedBlock(match.name, fields.get("ipu"), block_id, "pipeline.blocks"))
    return requested


def _block_entries(blocks: Any, found: Findings) -> List[Tuple[str, Any]]:
    if blocks is None:
        return []
    if isinstance(blocks, Mapping):
        return list(flat_names(blocks, tuple(_BLOCK_FIELDS)).items())
    entries: List[Tuple[str, Any]] = []
    for entry in blocks if isinstance(blocks, (list, tuple)) else [blocks]:
        named = [entry[field] for field in _MODULE_FIELDS if field in entry] if isinstance(entry, Mapping) else []
        if not named:
            found.problem(
                "`pipeline.blocks` takes a mapping by module, or a list of {module, ipu, id}",
                seen=str(entry),
                fix="pipeline.blocks={fc: {ipu: 1, id: B}}",
                key="pipeline.blocks",
            )
            continue
        entries.append((str(named[0]), {key: value for key, value in entry.items() if key not in _MODULE_FIELDS}))
    return entries


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
    """Return a block's id: the module's name, or a filled-in template such as ``layer{0}``."""
    if template is None:
        return match.name
    try:
        # vformat numbers `{}` itself, so that it means the first wildcard.
        return string.Formatter().vformat(template, match.texts, {"name": match.name, "index": index, "ipu": ipu})
    except (IndexError, KeyError, ValueError) as error:
        found.problem(
            f"`pipeline.blocks`: the id `{template}` cannot be filled in for `{match.name}`",
            seen=f"{type(error).__name__}: {error}",
            known="{name}, {index}, {ipu}, and {0}, {1}, ... for the text that each wildcard matches",
            fix="use {index}, which counts the matching modules",
            key="pipeline.blocks",
        )
        return match.name
