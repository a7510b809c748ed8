"""Reload a stored run: its config with new overrides on top, and its weights for evaluation and prediction."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, cast

from omegaconf import OmegaConf
from torch import nn

from ipurun import engine as engines
from ipurun.build import Run, build_run
from ipurun.checkpoint import Checkpoint, best, broken, broken_after_latest, latest, listed
from ipurun.config import compose
from ipurun.config.argv import parse_argv
from ipurun.config.compose import Point
from ipurun.config.documents import display, load_file
from ipurun.config.folders import builtin_folder
from ipurun.config.overrides import each_key_once
from ipurun.config.patterns import widened
from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.data import split_for_eval
from ipurun.inspect.model_and_data import make_model_alone
from ipurun.moved import new_path
from ipurun.planning.user_settings import unlike_defaults
from ipurun.runs.folder import RunFolder
from ipurun.runs.prepare import prepare
from ipurun.training.state import load_weights

__all__ = ["LoadedModel", "LoadedRun", "load_model", "load_run", "skipped_notes", "split_to_use", "stored_point"]

_CONFIG_NAME = "stored_run"


def stored_point(folder: RunFolder, argv: Sequence[str], command: str = "train") -> Point:
    """Compose the config of a run folder with the words of a command line.

    The stored file takes the place of ipurun's primary config, so overrides are read and checked as in any command.

    Args:
        folder: The run.
        argv: Overrides; a group choice (``data=synthetic``) replaces what the run had there.
        command: The command they were typed after, for advice.

    Raises:
        ConfigError: The stored config or an override is wrong.
    """
    config = compose.from_yaml(folder.config_file)  # a config of another version gets its own message
    words = parse_argv(argv)
    if words.multirun or any(word.lstrip("+").startswith("recipe=") for word in words.overrides):
        raise ConfigError(
            "a stored run takes overrides of keys, but no recipe and no sweep",
            where=f"command line: {' '.join(argv)}",
            fix="leave the recipe and -m out: the run folder has its config",
        )
    stored = cast(Dict[str, Any], OmegaConf.to_container(load_file(folder.config_file)))
    if folder.schema == 1:
        stored = _with_new_paths(stored)
        _keep_matching(stored.get("optimizer") or {})
    words_then = folder.overrides()
    if str(stored.get("precision")) == "16":  # runs of this release store what it means
        stored["precision"] = "16.16"
        words_then = ["precision=16.16" if word.lstrip("+") == "precision=16" else word for word in words_then]
    if not command.startswith("train"):
        for unused in ("logger", "callbacks"):
            stored.pop(unused, None)  # its secrets need not be given again
    groups = _groups()
    chosen = [group for group in groups if any(word.lstrip("+").startswith(f"{group}=") for word in words.overrides)]
    for group in chosen:
        stored.pop(group, None)
    document: Dict[str, Any] = {"defaults": ["schema", "_self_", *({group: None} for group in groups)], **stored}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{_CONFIG_NAME}.yaml"
        OmegaConf.save(OmegaConf.create(document), file)
        flags = ["--config-dir", place, "--config-name", _CONFIG_NAME]
        try:
            point = compose.one([*flags, *words.overrides], command)
        except ConfigError as error:
            raise ConfigError(_in_the_run(problem, file, folder) for problem in error.problems) from error
    recipes = [word.partition("=")[2] for word in folder.overrides() if word.lstrip("+").startswith("recipe=")]
    changed = tuple(change for change in point.changed if change.origin == "command line")
    origins = folder.origins()
    set_then = unlike_defaults(config) if origins is None else origins
    # The stored file has every key; those that were not set are defaults again.
    stored_in = display(file)
    set_now = {key: origin for key, origin in (point.given or {}).items() if not origin.startswith(stored_in)}
    given = {**{key: set_then[key] for key in point.given or {} if key in set_then}, **set_now}
    # The words of a group that is chosen again no longer describe the run.
    still = [word for word in words_then if word.lstrip("+~").partition("=")[0].split(".")[0] not in chosen]
    return replace(
        point,
        overrides=each_key_once([*still, *point.overrides]),
        recipes=tuple(recipes),
        changed=changed,
        given=given,
    )


def _in_the_run(problem: Problem, file: Path, folder: RunFolder) -> Problem:
    """Return a problem of the temporary config file as one of the file in the run folder."""
    is_inside = problem.where.startswith((display(file), str(file), "the config"))
    return replace(problem, where=str(folder.config_file)) if is_inside else problem


def _with_new_paths(value: Any) -> Any:
    """Return a stored config with the present paths of everything that has moved."""
    if isinstance(value, dict):
        return {key: _with_new_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_new_paths(inner) for inner in value]
    return new_path(value) if isinstance(value, str) else value


def _keep_matching(optimizer: Dict[str, Any]) -> None:
    """Let the patterns of parameter groups match what they matched in the first edition."""
    for group in optimizer.get("groups") or ():
        match = group.get("match") if isinstance(group, dict) else None
        if isinstance(match, str):
            group["match"] = widened(match)
        elif isinstance(match, list):
            group["match"] = [widened(str(pattern)) for pattern in match]


def _groups() -> List[str]:
    return sorted(
        path.name
        for path in builtin_folder().iterdir()
        if path.is_dir() and any(path.glob("*.yaml")) and path.name != "recipe"
    )


@dataclass(frozen=True)
class LoadedRun:
    """A run, where its weights came from, and notes about newer checkpoints that are broken."""

    run: Run
    folder: RunFolder
    checkpoint: Checkpoint
    notes: Sequence[str] = ()


def load_run(
    folder: RunFolder,
    argv: Sequence[str],
    checkpoint_file: Optional[str] = None,
    use_best: bool = False,
    command: str = "eval",
) -> LoadedRun:
    """Build the run of a folder and load its weights.

    Args:
        folder: The run folder.
        argv: Overrides on top of the config that the run stored.
        checkpoint_file: A checkpoint of the folder; None: the newest one.
        use_best: Take the best checkpoint instead of the newest.
        command: The command, for advice.

    Raises:
        ConfigError: Invalid config, or missing or mismatched checkpoint.
        RunError: The checkpoint is damaged.
    """
    point = stored_point(folder, argv, f"{command} {folder}")
    checkpoint, notes = _checkpoint(folder, checkpoint_file, use_best)
    prepared = prepare(point, has_checkpoint=True)
    run = build_run(point.config, prepared.plan, prepared.inspected, prepared.engine)
    load_weights(run.user_model, checkpoint, point.config.averaging)
    return LoadedRun(run, folder, checkpoint, notes)


@dataclass(frozen=True)
class LoadedModel:
    """The model of a run, on the CPU and in evaluation mode.

    Args:
        model: The model with its weights.
        config: The config of the run.
        step: Number of weight updates that produced the weights.
        metrics: Values of the last evaluation before the checkpoint; empty where there was none.
        folder: The run folder.
        checkpoint: The file that the weights are from.
    """

    model: nn.Module
    config: RunConfig
    step: int
    metrics: Mapping[str, float]
    folder: Path
    checkpoint: Path


def load_model(
    folder: RunFolder, argv: Sequence[str], checkpoint_file: Optional[str] = None, use_best: bool = False
) -> LoadedModel:
    """Make the model of a run and load its weights, as plain torch: neither data nor devices are needed.

    Args and exceptions as for `load_run`.
    """
    point = stored_point(folder, argv, f"eval {folder}")
    checkpoint, _ = _checkpoint(folder, checkpoint_file, use_best)
    model = make_model_alone(point.config, engines.load("cpu"))
    progress = load_weights(model, checkpoint, point.config.averaging)
    return LoadedModel(model.eval(), point.config, progress.step, progress.metrics, folder.path, checkpoint.path)


def split_to_use(run: Run, asked: Optional[str]) -> str:
    """Return the wanted split, else the one the config names, else test, else eval.

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


def skipped_notes(skipped: Mapping[str, str], used: Checkpoint) -> List[str]:
    """Return a note for each newer checkpoint that could not be used."""
    return [f"the checkpoint {name} is skipped: {why}; using {used.path.name}" for name, why in skipped.items()]


def _checkpoint(folder: RunFolder, file: Optional[str], use_best: bool) -> Tuple[Checkpoint, List[str]]:
    """Return the wanted checkpoint, by default the newest complete one, and notes about broken ones."""
    skipped: Dict[str, str] = {}
    if file is not None:
        wanted = Path(file).with_suffix(".pt").name
        found = next((item for item in listed(folder) if item.path.name == wanted), None)
    elif use_best:
        found = best(folder)
    else:
        # Numbers of older weights than expected must not pass for those of the newest: `load` compares the checksum and
        # refuses, while a run that resumes repeats the steps in between.
        found, skipped = latest(folder), broken_after_latest(folder)
    if found is None:
        names = ", ".join(item.path.name for item in listed(folder)[-5:])
        kind = f"checkpoint {file}" if file else "best checkpoint" if use_best else "checkpoint"
        what = f"the run `{folder}` has no {kind}"
        unusable = skipped or broken(folder)
        seen = "; ".join(f"{name}: {why}" for name, why in unusable.items())
        raise ConfigError(what, str(folder.checkpoints), seen, names, "train first, or take another run")
    return found, skipped_notes(skipped, found)
