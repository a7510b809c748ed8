"""`recompute`: the modules whose outputs are kept when everything else is computed again."""

from __future__ import annotations

from typing import List, Tuple

from ipurun.config.patterns import match_modules, names_in
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.placement.layout import Layout
from ipurun.planning.stacks import named_layers, stacks

__all__ = ["recompute_modules"]


def recompute_modules(config: RunConfig, facts: Facts, layout: Layout, found: Findings) -> Tuple[str, ...]:
    """Modules whose outputs are recomputation checkpoints, each once."""
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
            "recomputation checkpoints have no effect while nothing is recomputed: recompute.mode=recompute_all "
            "recomputes what lies between them (a pipeline over several IPUs does so by itself)"
        )
    return tuple(dict.fromkeys(modules))


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
            "`recompute.every=block` finds no repeated layers in the model",
            fix="pipeline.layers=[MODULE, ...], or recompute.checkpoints=[MODULE, ...]",
            key="recompute.every",
        )
    return layers
