"""Run one case in this process: on the engine, and on the side that it is compared with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Set, Tuple

import torch
from torch import nn

from ipurun import checkpoint, executables, interface
from ipurun.config import compose
from ipurun.config.compose import Point
from ipurun.engine import Engine
from ipurun.log.plan_text import plan_dict
from ipurun.log.screen import SilentScreen
from ipurun.runs.job import run_job
from ipurun.runs.prepare import prepare, prepare_job, resumed_folder
from ipurun.selftest.cases import Case
from ipurun.selftest.compare import Comparison, Numbers, compare, tolerances
from ipurun.selftest.outcome import AGREES, DIFFERS, REASONS, SKIPPED, Outcome, agreement
from ipurun.selftest.reference import initial_model, reference_numbers

__all__ = ["describe", "run_case"]

_CACHE_SECONDS = "POPTORCH_EMULATOR_CACHE_SECONDS"

# The order of samples and the lengths are fixed, so that the other side needs neither sampler nor epochs.
_SETTINGS = (
    "data=synthetic",
    "data.train_samples=128",
    "loader.shuffle=false",
    "threads=1",
    "eval.every_epochs=null",
    "checkpoint.every_epochs=null",
)


def run_case(case: Case, engine: Engine, folder: Path, on_side: Callable[[str], None] = lambda side: None) -> Outcome:
    """Run a case on an engine and compare it.

    The CPU engine is compared with plain torch, any other engine with the CPU engine.

    Args:
        case: The case.
        engine: The engine.
        folder: An empty folder for its runs.
        on_side: Called with the name of each side before it runs.

    Raises:
        Exception: Whatever went wrong.
    """
    begun = time.monotonic()
    if engine.available_ipus is not None and case.ipus > engine.available_ipus:
        return Outcome(case.name, SKIPPED, f"needs {case.ipus} IPUs, {engine.available_ipus} available")
    point = compose.one(_words(case))
    model = initial_model(point.config)
    initial = dict(model.named_parameters())
    allowed = tolerances(point.config.precision, engine.kind)
    on_side(f"engine={engine.kind}")
    found, comparisons = _on_engine(case, _placed(point, engine.kind, folder), model)
    if engine.kind == "cpu":
        on_side("plain torch")
        expected = _on_torch(case, point)
    else:
        on_side("engine=cpu")
        expected, _ = _on_engine(case, _placed(point, "cpu", folder), model)
    on_side("")
    comparisons += compare(found, expected, initial, allowed)
    outcome = _judged(case, comparisons)
    if outcome.status == DIFFERS:
        if engine.kind != "cpu":
            settled = _on_torch(case, point)
            sides = {"the CPU engine": expected, "this engine": found}
            outcome.reason += REASONS + agreement(
                name
                for name, numbers in sides.items()
                if all(item.agrees for item in compare(numbers, settled, initial, allowed))
            )
        outcome.evidence.update(_described(case, _placed(point, engine.kind, folder)))
    outcome.seconds = time.monotonic() - begun
    return outcome


def describe(case: Case, engine: str, folder: Path) -> Dict[str, Any]:
    """Return what a report says about a case: a command that runs it, its config and its plan."""
    return _described(case, _placed(compose.one(_words(case)), engine, folder))


def _described(case: Case, point: Point) -> Dict[str, Any]:
    return {
        "command": ["ipurun", "train", *_words(case), f"engine={point.config.engine}"],
        "config": compose.to_yaml(point.config, point.hidden),
        "plan": plan_dict(prepare(point).plan),
    }


def _words(case: Case) -> List[str]:
    words = [*case.words, *_SETTINGS, f"eval.at_end={case.evaluates}".lower()]
    # By default, a run takes all IPUs and caches executables in the home folder.
    for word in (f"devices={case.ipus}", "data.eval_samples=16", "cache.enabled=false"):
        if not any(known.startswith(word.partition("=")[0] + "=") for known in words):
            words.append(word)
    return words


def _placed(point: Point, engine: str, folder: Path) -> Point:
    """Return a point that runs on an engine, in a separate folder."""
    return _changed(point, engine=engine, runs_dir=str(folder / engine))


def _changed(point: Point, **keys: Any) -> Point:
    return dataclasses.replace(point, config=dataclasses.replace(point.config, **keys))


def _on_engine(case: Case, point: Point, model: nn.Module) -> Tuple[Numbers, List[Comparison]]:
    """Run a case on the engine of its point.

    Returns:
        Its numbers, and comparisons with runs on the same engine that must give the same.
    """
    initial = dict(model.named_parameters())
    if case.kind == "cache":
        cache = Path(point.config.runs_dir) / "cache"
        point = _changed(point, cache=dataclasses.replace(point.config.cache, enabled=True, dir=str(cache)))
        with _all_is_cached():
            numbers, _ = _trained(case, point, model)
            stored = _executables(cache)
            second, _ = _trained(case, point, model)
        return numbers, [*_same(second, numbers, initial, "with the cache: "), _reuse(stored, _executables(cache))]
    numbers, _ = _trained(case, point, model)
    if case.kind != "resume":
        return numbers, []
    _, half = _trained(case, _changed(point, max_steps=(point.config.max_steps or 0) // 2), model)
    resumed, _ = _trained(case, _changed(point, resume=str(half)), model)
    return numbers, _same(resumed, numbers, initial, "resumed: ")


def _trained(case: Case, point: Point, model: nn.Module) -> Tuple[Numbers, Path]:
    """Train a point; return its numbers and its run folder."""
    resumed = resumed_folder(point)
    finished = run_job(prepare_job(point), SilentScreen(), resumed)
    if finished.summary.status == "interrupted":
        raise KeyboardInterrupt
    lines = finished.folder.metrics_file.read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["split"] == "train"]
    newest = checkpoint.latest(finished.folder)
    assert newest is not None
    state: Mapping[str, torch.Tensor] = checkpoint.load(newest)["model"]
    numbers = Numbers(
        losses,
        {name: state[name] for name, _ in model.named_parameters()},
        {name: state[name] for name, _ in model.named_buffers() if name in state},
    )
    if case.evaluates:
        numbers.eval_loss = finished.summary.metrics.get("loss")
    if case.predicts:
        outputs = interface.predict(finished.folder.path, "eval", quiet=True).outputs
        numbers.outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return numbers, finished.folder.path


def _on_torch(case: Case, point: Point) -> Numbers:
    return reference_numbers(point.config, case.replicas, case.evaluates, case.predicts)


def _reuse(stored: Set[str], after: Set[str]) -> Comparison:
    """Check that the first run has stored executables, and the second one no further ones."""
    evidence = {"stored_by_the_first_run": sorted(stored), "stored_by_the_second_run": sorted(after - stored)}
    is_wrong = bool(after - stored) or not stored
    return Comparison("executables that the second run compiled again", float(is_wrong), 0.0, lambda: evidence)


def _executables(folder: Path) -> Set[str]:
    return {str(entry.path.relative_to(folder)) for entry in executables.entries(folder)}


@contextlib.contextmanager
def _all_is_cached() -> Iterator[None]:
    """Let the CPU engine store programs that it compiles quickly, too."""
    before = os.environ.get(_CACHE_SECONDS)
    os.environ[_CACHE_SECONDS] = "0"
    try:
        yield
    finally:
        del os.environ[_CACHE_SECONDS]
        if before is not None:
            os.environ[_CACHE_SECONDS] = before


def _same(again: Numbers, first: Numbers, initial: Mapping[str, torch.Tensor], prefix: str) -> List[Comparison]:
    """Compare two runs on one engine; a resumed run has logged the losses of both halves."""
    compared = compare(again, first, initial, tolerances("32.32", "cpu"))
    return [Comparison(prefix + item.what, item.difference, item.tolerance, item.sides) for item in compared]


def _judged(case: Case, comparisons: List[Comparison]) -> Outcome:
    worst = max(comparisons, key=_share)
    wrong = [item for item in comparisons if not item.agrees]
    outcome = Outcome(case.name, DIFFERS if wrong else AGREES, worst=worst.what, share=_share(worst))
    outcome.reason = REASONS.join(map(_reason, wrong))
    for item in comparisons:
        document: Dict[str, Any] = {"what": item.what, "difference": item.difference, "tolerance": item.tolerance}
        if not item.agrees:
            document["sides"] = dict(item.sides())
        outcome.comparisons.append(document)
    return outcome


def _reason(item: Comparison) -> str:
    if not item.tolerance:
        return item.what
    return f"{item.what} off by {item.difference:.1e}, allowed {item.tolerance:.0e}"


def _share(item: Comparison) -> float:
    if not item.tolerance:
        return math.inf if item.difference else 0.0
    return item.difference / item.tolerance
