"""What loggers for experiment trackers share: the stored config, the id of a run, and how one that fails is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import yaml
from omegaconf import OmegaConf

from ipurun.errors import ConfigError
from ipurun.files import write_atomically
from ipurun.training.events import (
    CheckpointSaved,
    CompileEnd,
    CompileStart,
    DeviceWait,
    EvalEnd,
    EvalProgress,
    Note,
    Observer,
    RolledBack,
    RunStart,
    StepEnd,
    Summary,
)

__all__ = ["DroppedIfFailing", "chosen_keys", "kept_id", "missing_package", "step_values", "store_id", "stored_config"]


class DroppedIfFailing(Observer):
    """A logger that is dropped with a warning when it fails: training does not depend on it.

    Args:
        name: Its name in the config.
        logger: The logger.
        warn: Shows a warning to the user.
    """

    def __init__(self, name: str, logger: Observer, warn: Callable[[str], None]) -> None:
        self._name = name
        self._logger: Optional[Observer] = logger
        self._warn = warn
        self.takes_steps_late = logger.takes_steps_late

    def on_start(self, event: RunStart) -> None:
        self._pass_on("on_start", event)

    def on_note(self, event: Note) -> None:
        self._pass_on("on_note", event)

    def on_compile_start(self, event: CompileStart) -> None:
        self._pass_on("on_compile_start", event)

    def on_compile_end(self, event: CompileEnd) -> None:
        self._pass_on("on_compile_end", event)

    def on_step(self, event: StepEnd) -> None:
        self._pass_on("on_step", event)

    def on_device_wait(self, event: DeviceWait) -> None:
        self._pass_on("on_device_wait", event)

    def on_eval_progress(self, event: EvalProgress) -> None:
        self._pass_on("on_eval_progress", event)

    def on_eval(self, event: EvalEnd) -> None:
        self._pass_on("on_eval", event)

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self._pass_on("on_checkpoint", event)

    def flush(self) -> None:
        self._pass_on("flush")

    def on_rollback(self, event: RolledBack) -> None:
        self._pass_on("on_rollback", event)

    def on_end(self, event: Summary) -> None:
        self._pass_on("on_end", event)

    def _pass_on(self, method: str, *event: Any) -> None:
        if self._logger is None:
            return
        try:
            getattr(self._logger, method)(*event)
        except Exception as error:  # of any kind: it comes from a library, a network or the user's code
            self._logger = None
            self._warn(f"`logger.{self._name}` failed in {method} and is dropped: {type(error).__name__}: {error}")


def stored_config(folder: Path) -> Dict[str, Any]:
    """Return the config of a run as its folder has it: secrets are masked, or interpolations that stay text."""
    stored = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
    return {str(key): value for key, value in stored.items()} if isinstance(stored, dict) else {}


def chosen_keys(folder: Path) -> Dict[str, Any]:
    """Return the keys that were typed or written in YAML and have a single value: what tells runs apart."""
    flat = dict(_leaves(stored_config(folder)))
    try:
        origins = yaml.safe_load((folder / "origins.yaml").read_text(encoding="utf-8")) or {}
    except FileNotFoundError:  # a run folder of the first edition
        origins = flat
    return {key: value for key, value in flat.items() if key in origins and isinstance(value, (bool, int, float, str))}


def _leaves(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def kept_id(folder: Path, logger: str) -> Optional[str]:
    """Return the id that a tracker gave this run before it was resumed, None if there is none."""
    try:
        found = json.loads(_id_file(folder, logger).read_text(encoding="utf-8"))
        return str(found["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_id(folder: Path, logger: str, run_id: str) -> None:
    """Keep the id of a run for when it is resumed."""
    write_atomically(_id_file(folder, logger), json.dumps({"id": run_id}) + "\n")


def _id_file(folder: Path, logger: str) -> Path:
    return folder / f"{logger}_run.json"


def step_values(event: StepEnd) -> Dict[str, float]:
    """Return the values of a host call that trackers plot."""
    return {
        "loss": event.loss,
        "lr": event.lr,
        "samples_per_second": event.samples_per_second,
        "data_wait": event.data_wait,
        **event.metrics,
    }


def missing_package(logger: str, error: ImportError) -> ConfigError:
    """Return the error for a logger whose package is not installed."""
    return ConfigError(
        f"`logger.{logger}` needs a package that is not installed",
        seen=str(error),
        fix=f"pip install 'ipurun[{logger}]', or remove the logger",
        key=f"logger.{logger}",
    )
