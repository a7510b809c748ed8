"""Settings of modules: precision, frozen parameters, recomputation, serialised layers and memory proportions."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.patterns import TABLE_WORDS, check_parameters, flat_names, frozen_until, match_modules, names_in
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings, listing
from ipurun.inspect.facts import Facts
from ipurun.planning.layers import is_within, named_layers, stacks
from ipurun.planning.placement.layout import Layout
from ipurun.planning.plan import BatchSizes, FrozenPart, Serialized, Steps

__all__ = [
    "MATMUL_MODES",
    "frozen_parts",
    "module_precisions",
    "module_proportions",
    "note_loss_scale",
    "recompute_modules",
    "serialized_layers",
]

MATMUL_MODES = {
    "input_channels": "InputChannels",
    "reducing_dim": "ReducingDim",
    "output_channels": "OutputChannels",
}
_ROWS = "rows"
_FIELDS = ("factor", "mode", "keep_precision")
_CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
# Classes with a weight of (outputs, inputs), and that of transformers' GPT-2 with (inputs, outputs).
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear")
_TRANSPOSED_LINEAR = ("Conv1D",)


def module_precisions(config: RunConfig, module_names: Sequence[str], found: Findings) -> Dict[str, str]:
    """Return the precision (16 or 32) of modules; the last pattern that matches one counts."""
    chosen: Dict[str, str] = {}
    for pattern, value in config.precision_rules.items():
        if str(value) not in ("16", "32"):
            found.problem(
                f"`precision_rules`: the precision of `{pattern}` cannot be `{value}`",
                known="16, 32",
                fix=f"precision_rules: {{'{pattern}': 16}}",
                key="precision_rules",
            )
            continue
        names = match_modules(str(pattern), "precision_rules", module_names, found) if module_names else [pattern]
        chosen.update({name: str(value) for name in names})
    return chosen


def frozen_parts(
    config: RunConfig, facts: Facts, batch: BatchSizes, steps: Steps, found: Findings
) -> Tuple[FrozenPart, ...]:
    """Return the parameters that are not trained, by the step after which they are; those that never are come last."""
    names = list(facts.parameter_shapes)
    if not names or not (config.freeze or config.unfreeze):
        return ()
    for pattern in config.freeze:
        check_parameters(str(pattern), "freeze", names, found)
    frozen = frozen_until(config.freeze, {}, names)
    for pattern, step in flat_names(config.unfreeze, ()).items():
        _check_unfreeze(pattern, step, frozen, found)
    by_step: Dict[Optional[int], List[str]] = {}
    for name, step in _tied(frozen_until(config.freeze, config.unfreeze, names), facts).items():
        calls = None if step is None else -(-step // batch.device_iterations)
        by_step.setdefault(None if calls is None else calls * batch.device_iterations, []).append(name)
    parts = [
        FrozenPart(tuple(by_step[step]), _elements(by_step[step], facts), step)
        for step in sorted(by_step, key=lambda step: math.inf if step is None else step)
    ]
    for part in parts:
        if part.until_step is not None:
            _note_unfreeze(part, steps, found)
    return tuple(parts)


def _check_unfreeze(pattern: str, step: Any, frozen: Mapping[str, Any], found: Findings) -> None:
    key = f"unfreeze.{pattern}"
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        found.problem(
            f"`{key}` takes a step: a whole number of weight updates, 1 or more",
            seen=str(step),
            fix=f"unfreeze={{{pattern}: 100}}",
            key=key,
        )
    if not frozen:
        found.problem("`unfreeze` is set but `freeze` is not", fix=f"freeze=[{pattern}]", key="unfreeze")
    else:
        check_parameters(pattern, key, list(frozen), found)


def _note_unfreeze(part: FrozenPart, steps: Steps, found: Findings) -> None:
    values = f"{part.elements:,} values ({part.names[0]}{', ...' if len(part.names) > 1 else ''})"
    if steps.total_updates is not None and part.until_step is not None and part.until_step >= steps.total_updates:
        found.note(f"unfreeze: {values} are never trained, because the run ends at step {steps.total_updates:,}")
        return
    found.note(
        f"unfreeze: {values} are trained after step {part.until_step:,}; the model is compiled again there, and their "
        "optimizer state starts empty"
    )


def _tied(frozen: Mapping[str, Optional[int]], facts: Facts) -> Dict[str, Optional[int]]:
    """Return frozen parameters with all names of tensors that have several; never counts if one of them says so."""
    tied = dict(frozen)
    for group in facts.shared_parameters:
        steps = [frozen[name] for name in group if name in frozen]
        if steps:
            until = None if None in steps else min(step for step in steps if step is not None)
            tied.update(dict.fromkeys(group, until))
    return tied


def _elements(names: Sequence[str], facts: Facts) -> int:
    """Return the number of values in parameters, those of a tensor with several names once."""
    again = {name for group in facts.shared_parameters for name in group[1:]}
    return sum(math.prod(facts.parameter_shapes[name]) for name in names if name not in again)


def note_loss_scale(config: RunConfig, precision: str, optimizer_scale: object, found: Findings) -> None:
    """Note loss scales that do not suit the precision: small gradients underflow in float16 unless scaled up."""
    scale = config.loss_scaling if config.loss_scaling is not None else optimizer_scale
    if precision.startswith("16") and (scale is None or scale in (1, 1.0, "1", "1.0")):
        found.note("float16 gradients with a loss scale of 1 may underflow; loss_scaling=1024 is a common start")
    if precision == "32.32" and str(scale) == "auto":
        found.note("loss_scaling=auto has no effect: precision=32.32 has no float16 gradients")


def recompute_modules(config: RunConfig, facts: Facts, layout: Layout, found: Findings) -> Tuple[str, ...]:
    """Return the modules whose outputs are recomputation checkpoints."""
    recompute = config.recompute
    modules: List[str] = []
    for pattern in recompute.checkpoints:
        known = facts.module_names
        modules += match_modules(pattern, "recompute.checkpoints", known, found) if known else [pattern]
    if recompute.every == "block":
        modules += _every_block(config, facts, layout, found)
    pipelined = config.pipeline.strategy == "pipelined" and layout.ipus > 1
    if modules and recompute.mode in (None, "none") and not (pipelined and recompute.mode is None):
        found.note(
            "recomputation checkpoints have no effect, because nothing is recomputed: set recompute.mode=recompute_all "
            "(a pipeline over several IPUs recomputes without it)"
        )
    return tuple(dict.fromkeys(modules))


def serialized_layers(config: RunConfig, facts: Facts, found: Findings) -> Tuple[Serialized, ...]:
    """Return the layers to compute in parts; the last pattern that matches a layer counts."""
    layers: Dict[str, Serialized] = {}
    for written, entry in flat_names(config.memory.serialize, _FIELDS).items():
        pattern = facts.tables.get(written, written)
        if written in TABLE_WORDS and facts.module_names and written not in facts.tables:
            found.note(f"memory.serialize: the model has no {written.replace('_', ' ')}")
            continue
        if isinstance(entry, (list, tuple)):
            continue  # parts that are layers themselves
        fields = _fields(pattern, entry, found)
        if fields is None or not facts.module_names:
            continue
        for module in _serializable(pattern, facts, found):
            layers[module] = _serialized(module, fields, facts, found)
    return tuple(layer for layer in layers.values() if layer.factor > 1)


def module_proportions(config: RunConfig, facts: Facts, found: Findings) -> Dict[str, float]:
    """Return the share of tile memory of linear layers and convolutions; the last pattern that matches counts."""
    shares: Dict[str, float] = {}
    kinds = (*_LINEAR, *_TRANSPOSED_LINEAR, *_CONVOLUTIONS)
    for pattern, share in flat_names(config.memory.module_proportion, ()).items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            found.problem(
                f"`memory.module_proportion`: `{pattern}` takes a number from 0 to 1",
                seen=str(share),
                fix=f"memory.module_proportion={{{pattern}: 0.2}}",
                key="memory.module_proportion",
            )
            continue
        known = facts.module_names
        matched = match_modules(pattern, "memory.module_proportion", known, found) if known else []
        inside = _of_kinds(kinds, matched, facts)
        if matched and not inside:
            found.problem(
                f"`memory.module_proportion`: `{pattern}` is not a linear layer or a convolution, and contains none",
                seen=listing([f"{name}: {facts.module_kinds.get(name, 'unknown')}" for name in matched]),
                key="memory.module_proportion",
            )
        shares.update({name: float(share) for name in inside})
    return shares


def _every_block(config: RunConfig, facts: Facts, layout: Layout, found: Findings) -> List[str]:
    named = names_in(config.pipeline.layers, "pipeline.layers", Findings())
    if not facts.module_names:
        return []
    if named:
        return named_layers(named, facts, Findings())
    layers = [layer for stack in stacks(facts).values() for layer in stack]
    layers = layers or [placement.module for placement in layout.placements if placement.module]
    if not layers:
        found.problem(
            "`recompute.every=block` found no repeated layers in the model",
            fix="pipeline.layers=[MODULE, ...], or recompute.checkpoints=[MODULE, ...]",
            key="recompute.every",
        )
    return layers


def _fields(pattern: str, entry: Any, found: Findings) -> Optional[Dict[str, Any]]:
    fields = {"factor": entry} if isinstance(entry, int) else entry
    known = isinstance(fields, Mapping) and set(fields) <= set(_FIELDS) and "factor" in fields
    factor = fields["factor"] if known else None
    mode = fields.get("mode") if known else None
    if (
        not known
        or isinstance(factor, bool)
        or not isinstance(factor, int)
        or factor < 1
        or mode not in (None, _ROWS, *MATMUL_MODES)
        or not isinstance(fields.get("keep_precision", False), bool)
    ):
        found.problem(
            f"`memory.serialize`: `{pattern}` takes a number of parts, the parts on each IPU as in [2, 2], or "
            "{factor: 4, mode: output_channels}",
            seen=str(entry),
            known=f"modes: {listing(MATMUL_MODES)}; keep_precision: true or false",
            fix=f"memory.serialize={{{pattern}: 4}}",
            key="memory.serialize",
        )
        return None
    return dict(fields)


def _serializable(pattern: str, facts: Facts, found: Findings) -> List[str]:
    """Return the linear layers and embeddings that a pattern matches, or that are inside what it matches."""
    matched = match_modules(pattern, "memory.serialize", facts.module_names, found)
    kinds = (*_LINEAR, *_TRANSPOSED_LINEAR, "Embedding")
    inside = _of_kinds(kinds, matched, facts)
    if matched and not inside:
        found.problem(
            f"`memory.serialize`: `{pattern}` is not a linear layer or an embedding, and contains none",
            seen=listing([f"{name}: {facts.module_kinds.get(name, 'unknown')}" for name in matched]),
            known=listing([name for name in facts.module_names if facts.module_kinds.get(name) in kinds]),
            key="memory.serialize",
        )
    return inside


def _serialized(module: str, fields: Mapping[str, Any], facts: Facts, found: Findings) -> Serialized:
    kind, factor = facts.module_kinds[module], int(fields["factor"])
    shape = facts.parameter_shapes.get(f"{module}.weight", ())
    if kind == "Embedding":
        if fields.get("mode") not in (None, _ROWS):
            found.note(f"memory.serialize: {module} is an embedding, whose table is split by rows")
        return Serialized(module, factor, _ROWS)
    mode = fields.get("mode") or "output_channels"
    if mode == _ROWS:
        found.problem(
            f"`memory.serialize`: `{module}` is a linear layer; the mode rows is for embeddings",
            known=listing(MATMUL_MODES),
            fix=f"memory.serialize={{{module}: {{factor: {factor}, mode: output_channels}}}}",
            key="memory.serialize",
        )
        return Serialized(module, 1, "output_channels")
    outputs, inputs = (shape[1], shape[0]) if kind in _TRANSPOSED_LINEAR else shape[:2] if shape else (0, 0)
    if fields.get("mode") is None and outputs % factor and inputs and inputs % factor == 0:
        mode = "reducing_dim"
        found.note(
            f"memory.serialize: {factor} parts do not divide the {outputs:,} output channels of {module}, so its "
            f"{inputs:,} inputs are divided (mode reducing_dim)"
        )
    size = {"output_channels": outputs, "reducing_dim": inputs}.get(mode, 0)  # input channels depend on the batch
    if size and size % factor:
        fitting = [part for part in range(2, min(size, 64) + 1) if size % part == 0]
        found.problem(
            f"`memory.serialize`: {factor} parts do not divide the {size} {mode.replace('_', ' ')} of `{module}`",
            known=listing(map(str, fitting)) or "1",
            fix=f"factor {min(fitting, key=lambda part: abs(part - factor))}" if fitting else "another mode",
            key="memory.serialize",
        )
    return Serialized(module, factor, mode, bool(fields.get("keep_precision", False)))


def _of_kinds(kinds: Sequence[str], outer: Sequence[str], facts: Facts) -> List[str]:
    """Return the modules of some classes that are in a list of modules or inside one of them."""
    return [
        name
        for name in facts.module_names
        if facts.module_kinds.get(name) in kinds and any(is_within(name, module) for module in outer)
    ]
