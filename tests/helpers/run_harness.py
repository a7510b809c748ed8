"""Build runs from keyword arguments, as the commands do from YAML, and record their events."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipurun import engine
from ipurun.build import Run, build_run
from ipurun.config.schema import RunConfig
from ipurun.inspect.model_and_data import ModelAndData, inspect
from ipurun.planning import make_plan
from ipurun.training.events import Observer, Summary
from ipurun.training.loop import train

TOYS = "run_toys"


def config(**changes: Any) -> RunConfig:
    """Return a config of the toy model on 32 points in micro-batches of 4, with changes such as ``loader__shuffle``."""
    made = RunConfig(
        engine="cpu",
        micro_batch_size=4,
        epochs=2,
        model={"_target_": f"{TOYS}.Net"},
        data={"_target_": f"{TOYS}.pair"},
        optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        metrics={"accuracy": {"_target_": "ipurun.metrics.Accuracy"}},
    )
    made.loss.name = "CrossEntropyLoss"
    made.cache.enabled = False
    for key, value in changes.items():
        owner: Any = made
        *path, last = key.split("__")
        for part in path:
            owner = getattr(owner, part)
        assert is_dataclass(owner) and hasattr(owner, last), key
        setattr(owner, last, value)
    return made


def inspected(settings: RunConfig) -> ModelAndData:
    return inspect(settings, engine.load("cpu"))


def built(settings: Optional[RunConfig] = None, **changes: Any) -> Run:
    settings = settings or config(**changes)
    chosen = engine.load("cpu")
    made = inspect(settings, chosen)
    return build_run(settings, make_plan(settings, made.facts), made, chosen)


class Folder:
    """The part of a run folder that the loop needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.checkpoints = path / "checkpoints"


class Recorder(Observer):
    """Observer that keeps every event."""

    def __init__(self) -> None:
        self.events: Dict[str, List[Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda event: self.events.setdefault(name[3:], []).append(event)
        return super().__getattribute__(name)

    @property
    def losses(self) -> List[float]:
        return [event.loss for event in self.events.get("step", [])]


def trained(folder: Path, resume_from: Any = None, **changes: Any) -> tuple[Run, Summary, Recorder]:
    run = built(**changes)
    recorder = Recorder()
    summary = train(run, Folder(folder), [recorder], resume_from=resume_from)
    return run, summary, recorder
