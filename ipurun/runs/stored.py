"""A run's stored config as a point again, with new overrides on top: for `eval`, `predict` and a bare resume."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Sequence, cast
from omegaconf import OmegaConf
from ipurun.config import compose
from ipurun.config.compose import Point
from ipurun.config.documents import display
from ipurun.config.folders import builtin_folder
from ipurun.config.words import split_words
from ipurun.errors import ConfigError
from ipurun.planning.user_settings import unlike_defaults
from ipurun.config.patterns import widened
from ipurun.runs.folder import RunFolder

__all__ = ["stored_point"]

_CONFIG_NAME = "stored_run"


def stored_point(folder: RunFolder, argv: Sequence[str], command: str = "train") -> Point:
    """Compose the config of a run folder with the words of a command line.

    The stored file stands in for ipurun's primary config, so overrides are read and checked as anywhere else.

    Args:
        folder: The run.
        argv: Overrides; a group choice (``data=synthetic``) replaces what the run had there.
        command: The command they were typed after, for advice.

    Raises:
        ConfigError: The stored config or an override is wrong.
    """
    config = compose.from_yaml(folder.config_file)  # a config of another version gets its own message
    words = split_words(argv)
    if words.multirun or any(word.lstrip("+").startswith("recipe=") for word in words.overrides):
        raise ConfigError(
            "a stored run takes overrides of keys, no recipe and no sweep",
            where=f"command line: {' '.join(argv)}",
            fix="leave the recipe and -m out: the run folder has its config",
        )
    stored = cast(Dict[str, Any], OmegaConf.to_container(OmegaConf.load(folder.config_file)))
    _keep_matching(stored.get("optimizer") or {})
    groups = _groups()
    for group in groups:
        if any(word.lstrip("+").startswith(f"{group}=") for word in words.overrides):
            stored.pop(group, None)
    document: Dict[str, Any] = {"defaults": ["schema", "_self_", *({group: None} for group in groups)], **stored}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{_CONFIG_NAME}.yaml"
        OmegaConf.save(OmegaConf.create(document), file)
        flags = ["--config-dir", place, "--config-name", _CONFIG_NAME]
        point = compose.one([*flags, *words.overrides], command)
    recipes = [word.partition("=")[2] for word in folder.overrides() if word.lstrip("+").startswith("recipe=")]
    changed = tuple(change for change in point.changed if change.origin == "command line")
    origins = folder.origins()
    set_then = unlike_defaults(config) if origins is None else origins
    # The stored file has every key; those that nobody had set are defaults again.
    stored_in = display(file)
    set_now = {key: origin for key, origin in (point.given or {}).items() if not origin.startswith(stored_in)}
    given = {**{key: set_then[key] for key in point.given or {} if key in set_then}, **set_now}
    return replace(
        point,
        overrides=(*folder.overrides(), *words.overrides),
        recipes=tuple(recipes),
        changed=changed,
        given=given,
    )


def _keep_matching(optimizer: Dict[str, Any]) -> None:
    """Let the groups of a run that an earlier version stored match what they matched then.

    In runs of this version nothing changes: a pattern that would match more with wide wildcards was refused.
    """
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
