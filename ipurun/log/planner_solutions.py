"""Configs that a search found, as text, as YAML and as JSON. Every figure is an estimate, and says so."""

from __future__ import annotations

import shlex
from typing import Any, Dict, List, Sequence

from ipurun.estimate.solve import Solution
from ipurun.log.format import plural
from ipurun.log.planner_text import count_short

__all__ = ["solution_dict", "solution_lines", "solution_yaml"]


def solution_lines(solutions: Sequence[Solution], most: int = 3) -> List[str]:
    """The configs that a search found, the best one with all that is to be typed."""
    if not solutions:
        return ["solve: no split, micro-batch, accumulation and replication was found that fits (estimate)"]
    lines = ["solve: found by trying splits, micro-batches, accumulation and replication (estimate)"]
    lines += [f"  {number}. {_line(solution)}" for number, solution in enumerate(solutions[:most], start=1)]
    quickest = max(solutions, key=lambda solution: solution.estimate.time.samples_per_second)
    if quickest not in solutions[:most]:
        lines += [f"  quicker, if it fits: {_line(quickest)}"]
        lines += [f"    {shlex.quote(word)}" for word in quickest.overrides]
    if not solutions[0].overrides:
        return [*lines, "", "nothing to type: the config is the best of them as it is"]
    return [*lines, "", "type", *(f"  {shlex.quote(word)}" for word in solutions[0].overrides)]


def _line(solution: Solution) -> str:
    settings, found = solution.settings, solution.estimate
    own = "" if solution.overrides else " (the config as it is)"
    return (
        f"{plural(settings.replicas, 'replica')} x {plural(solution.ipus, 'IPU')}, "
        f"micro-batch {settings.micro_batch_size} x accumulation {settings.gradient_accumulation}: "
        f"{found.verdict.value}, fullest IPU {max(ipu.share for ipu in found.ipus):.0%}, "
        f"{count_short(found.time.samples_per_second)} samples/s{own}"
    )


def solution_yaml(solution: Solution, recipe_words: Sequence[str]) -> str:
    """A config file of a solution, to be used as ``+recipe=FILE`` or copied from.

    Args:
        solution: What was found.
        recipe_words: The command line that it was solved for, for the comment at its top.
    """
    lines = ["# @package _global_", f"# Solved by `ipurun plan --solve {' '.join(recipe_words)}`; an estimate."]
    nested: Dict[str, Any] = {}
    for word in solution.overrides:
        key, _, value = word.partition("=")
        *path, last = key.split(".")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return "\n".join(lines + _yaml(nested, 0)) + "\n"


def solution_dict(solution: Solution) -> Dict[str, Any]:
    """A solution as JSON-ready data."""
    return {
        "is_estimate": True,
        "overrides": list(solution.overrides),
        "verdict": solution.estimate.verdict.value,
        "ipus_per_replica": solution.ipus,
        "replicas": solution.settings.replicas,
        "micro_batch_size": solution.settings.micro_batch_size,
        "gradient_accumulation": solution.settings.gradient_accumulation,
        "samples_per_second": solution.estimate.time.samples_per_second,
        "fullest_share": max(ipu.share for ipu in solution.estimate.ipus),
    }


def _yaml(values: Dict[str, Any], depth: int) -> List[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{key}:", *_yaml(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {value}")
    return lines
