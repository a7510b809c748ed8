"""Run one case in this process: on the engine, and on the side that it is compared with."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Set, Tuple

import torch

from ipurun import interface
from ipurun.config import compose
from ipurun.engine import Engine
from ipurun.log.plan_text import plan_dict
from ipurun.runs.prepare import prepare
from ipurun.selftest.cases import Case
from ipurun.selftest.compare import Comparison, Numbers, compare, tolerances
from ipurun.selftest.outcome import AGREES, DIFFERS, SKIPPED, Outcome
from ipurun.selftest.reference import initial_model, reference_numbers

__all__ = ["describe", "run_case"]

# The order of samples and the lengths are fixed, so that the other side needs neither sampler nor epochs.
_SETTINGS = (
    "data=synthetic",
    "data.train_samples=128",
    "loader.shuffle=false",
    "threads=1",
    "eval.every_epochs=null",
    "checkpoint.every_epochs=null",
)
_EVAL_SAMPLES = "data.eval_samples=16"


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
    config = compose.one(_words(case, engine.kind, folder)).config
    initial = dict(initial_model(config).named_parameters())
    allowed = tolerances(config.precision, engine.kind)
    on_side(f"engine={engine.kind}")
    found, comparisons = _on_engine(case, engine.kind, folder / engine.kind)
    if engine.kind == "cpu":
        on_side("plain torch")
        expected = _on_torch(case, config)
    else:
        on_side("engine=cpu")
        expected, _ = _on_engine(case, "cpu", folder / "cpu")
    on_side("")
    comparisons += compare(found, expected, initial, allowed)
    outcome = _judged(case, comparisons)
    if outcome.status == DIFFERS:
        if engine.kind != "cpu":
            settled = _on_torch(case, config)
            sides = {"the CPU engine": expected, "this engine": found}
            agreeing = [
                name
                for name, numbers in sides.items()
                if all(item.agrees for item in compare(numbers, settled, initial, allowed))
            ]
            verdict = f"plain torch agrees with {' and '.join(agreeing) or 'neither'}"
            outcome.reason += f"; {verdict}"
            outcome.evidence["settled_by"] = verdict
        outcome.evidence.update(describe(case, engine.kind, folder))
    outcome.seconds = time.monotonic() - begun
    return outcome


def describe(case: Case, engine: str, folder: Path) -> Dict[str, Any]:
    """Return what a report says about the config of a case."""
    words = _words(case, engine, folder)
    point = compose.one(words)
    plan = plan_dict(prepare(point).plan)
    command = ["ipurun", "train", *(word for word in words if str(folder) not in word)]
    return {"command": command, "config": compose.to_yaml(point.config), "plan": plan}


def _words(case: Case, engine: str, folder: Path) -> List[str]:
    words = [*case.words, *_SETTINGS, f"engine={engine}", f"runs_dir={folder}", f"eval.at_end={case.evaluates}"]
    if not any(word.startswith("devices=") for word in words):
        words.append(f"devices={case.ipus}")  # by default, a run takes all IPUs
    words.append(f"cache.dir={folder / 'cache'}" if case.kind == "cache" else "cache.enabled=false")
    if not any(word.startswith("data.eval_samples=") for word in words):
        words.append(_EVAL_SAMPLES)
    return words


def _on_engine(case: Case, engine: str, folder: Path) -> Tuple[Numbers, List[Comparison]]:
    """Run a case on an engine; return its numbers, and comparisons with runs that must give the same."""
    words = _words(case, engine, folder)
    if case.kind == "cache":
        return _with_cache(case, words, folder / "cache")
    numbers = _trained(case, words)
    if case.kind != "resume":
        return numbers, []
    initial = dict(initial_model(compose.one(words).config).named_parameters())
    total = next(int(word.partition("=")[2]) for word in words if word.startswith("max_steps="))
    half = interface.train_words([*_without(words, "max_steps="), f"max_steps={total // 2}"], quiet=True)
    resumed = _trained(case, [f"resume={half.folder}", f"max_steps={total}", *_engine_words(words)])
    return numbers, _same(resumed, numbers, initial, "resumed: ")


def _with_cache(case: Case, words: List[str], cache: Path) -> Tuple[Numbers, List[Comparison]]:
    numbers = _trained(case, words)
    stored = _files(cache)
    second = _trained(case, words)
    initial = dict(initial_model(compose.one(words).config).named_parameters())
    new = _files(cache) - stored
    kept = float(bool(new) or not stored)  # 0: something was stored, and the second run found it
    evidence = {"stored_by_the_first_run": sorted(stored), "stored_by_the_second_run": sorted(new)}
    reused = Comparison("executables stored again", kept, 0.0, lambda: evidence)
    return numbers, [reused, *_same(second, numbers, initial, "with the cache: ")]


def _same(again: Numbers, first: Numbers, initial: Dict[str, torch.Tensor], prefix: str) -> List[Comparison]:
    """Compare two runs on one engine, which must agree to the last digits."""
    # Resumed runs log only their own half.
    first = Numbers(first.losses[-len(again.losses) :], first.weights, first.buffers)
    compared = compare(again, first, initial, tolerances("32.32", "cpu"))
    return [Comparison(prefix + item.what, item.difference, item.tolerance, item.sides) for item in compared]


def _without(words: List[str], start: str) -> List[str]:
    return [word for word in words if not word.startswith(start)]


def _engine_words(words: List[str]) -> List[str]:
    return [word for word in words if word.startswith(("engine=", "runs_dir="))]


def _files(folder: Path) -> Set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _trained(case: Case, words: List[str]) -> Numbers:
    result = interface.train_words(words, quiet=True)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    lines = (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["split"] == "train"]
    model = result.load().model
    numbers = Numbers(losses, dict(model.named_parameters()), dict(model.named_buffers()))
    if case.evaluates:
        numbers.eval_loss = result.metrics.get("loss")
    if case.predicts:
        outputs = interface.predict(result.folder, "eval", quiet=True).outputs
        numbers.outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return numbers


def _on_torch(case: Case, config: Any) -> Numbers:
    return reference_numbers(config, case.replicas, case.evaluates, case.predicts)


def _judged(case: Case, comparisons: List[Comparison]) -> Outcome:
    worst = max(comparisons, key=_share)
    wrong = [item for item in comparisons if not item.agrees]
    outcome = Outcome(case.name, DIFFERS if wrong else AGREES, worst=worst.what, share=_share(worst))
    outcome.reason = "; ".join(
        f"{item.what} off by {item.difference:.1e}, allowed {item.tolerance:.0e}" for item in wrong
    )
    for item in comparisons:
        document: Dict[str, Any] = {"what": item.what, "difference": item.difference, "tolerance": item.tolerance}
        if not item.agrees:
            document["sides"] = dict(item.sides())
        outcome.comparisons.append(document)
    return outcome


def _share(item: Comparison) -> float:
    return item.difference / item.tolerance if item.tolerance else item.difference
