"""A finished run with its weights in place, ready for evaluation and prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence
from ipurun.build import Run, build_run
from ipurun.inspect.data import split_for_eval
from ipurun.checkpoint import Checkpoint, best, damaged_files, latest, listed
from ipurun.errors import ConfigError
from ipurun.runs.prepare import prepare
from ipurun.runs.folder import RunFolder
from ipurun.runs.stored import stored_point
from ipurun.training.state import load_weights

__all__ = ["Loaded", "load_run", "split_to_use"]

@dataclass(frozen=True)
class Loaded:
    """A run and where its weights came from."""

    run: Run
    folder: RunFolder
    checkpoint: Checkpoint


def load_run(
    folder: RunFolder,
    argv: Sequence[str],
    checkpoint_file: Optional[str] = None,
    use_best: bool = False,
    command: str = "eval",
) -> Loaded:
    """Builds the run of a folder and loads its weights.

    Args:
        folder: The run folder.
        argv: Overrides on top of the config that the run stored.
        checkpoint_file: A checkpoint of the folder; None: the newest one.
        use_best: Take the best checkpoint instead of the newest.
        command: The command that asks, for advice.

    Raises:
        ConfigError: The config does not stand, or there is no such checkpoint, or it is of another model.
        RunError: The checkpoint is damaged.
    """
    point = stored_point(folder, argv, f"{command} {folder}")
    checkpoint = _checkpoint(folder, checkpoint_file, use_best)
    prepared = prepare(point)
    run = build_run(point.config, prepared.plan, prepared.subject, prepared.engine)
    load_weights(run, checkpoint)
    return Loaded(run, folder, checkpoint)


def split_to_use(run: Run, asked: Optional[str]) -> str:
    """The split that was asked for, else the one the config names, else test, else eval.

    Raises:
        ConfigError: There is no such split.
    """
    wanted = asked or run.config.eval.split
    if wanted is None and "test" in run.eval_loaders:
        return "test"
    split = split_for_eval(run.eval_loaders, wanted)
    if split is None:
        raise ConfigError("the data has no eval or test split", known=", ".join(run.eval_loaders), fix="--split train")
    return split


def _checkpoint(folder: RunFolder, file: Optional[str], use_best: bool) -> Checkpoint:
    if file is not None:
        wanted = Path(file).with_suffix(".pt").name
        found = next((item for item in listed(folder) if item.path.name == wanted), None)
    else:
        found = best(folder) if use_best else latest(folder)
    if found is None:
        names = ", ".join(item.path.name for item in listed(folder)[-5:])
        kind = f"checkpoint {file}" if file else "best checkpoint" if use_best else "checkpoint"
        what = f"the run `{folder}` has no {kind}"
        damaged = damaged_files(folder)
        seen = f"damaged or incomplete: {', '.join(damaged)}" if damaged else ""
        raise ConfigError(what, str(folder.checkpoints), seen, names, "train first, or take another run")
    return found
