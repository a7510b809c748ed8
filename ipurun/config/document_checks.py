"""Checks of the YAML files themselves, so that a message can name file and line."""

from __future__ import annotations

from typing import Any, List, Mapping, Sequence

import yaml

from ipurun.config import keys
from ipurun.config.documents import Document, Entry
from ipurun.config.keys import ONE_CHOICE, several_choices
from ipurun.errors import Problem

__all__ = ["check_document"]


def check_document(document: Document, groups: Mapping[str, Sequence[str]]) -> List[Problem]:
    """Unknown keys and values of a wrong type in one file."""
    if document.package == "recipe" and document.has_byte_order_mark:
        return [
            Problem(
                "a byte order mark hides the first line of a recipe",
                document.where(1),
                seen="the bytes EF BB BF at the beginning of the file, which editors do not show",
                fix="save it as UTF-8 without a byte order mark",
            )
        ]
    if document.package == "recipe":
        return [
            Problem(
                "a recipe sets keys of the whole config, which its first line has to say",
                document.where(1),
                fix="make `# @package _global_` the first line of the file",
            )
        ]
    if not document.holds_keys:
        what = "a config file has to hold keys, as in `epochs: 4`"
        return [Problem(what, document.where(1), seen="a list or a single value")]
    problems = [
        several_choices(entry.key, _value(entry), document.where(entry.line))
        for entry in document.choices
        if entry.key in ONE_CHOICE and isinstance(entry.node, yaml.SequenceNode) and len(entry.node.value) > 1
    ]
    unknown: List[str] = []
    for entry in document.entries:
        if entry.key.split(".")[0] == "hydra" or any(entry.key.startswith(above + ".") for above in unknown):
            continue
        if not keys.is_known(entry.key):
            unknown.append(entry.key)
            value = _value(entry)
            meant = keys.meant(entry.key, value)
            known = ", ".join(meant.keys) if meant.keys else "run `ipurun ls keys` to see every key"
            fix = _advice(meant, value, groups)
            if entry.key in groups:
                known, fix = "", _choose(entry.key, "NAME")
            problems.append(
                Problem(f"unknown key `{entry.key}`", document.where(entry.line), known=known, fix=fix, key=entry.key)
            )
            continue
        wrong = keys.type_problem(entry.key, _value(entry))
        if wrong is not None:
            problems.append(
                Problem(f"`{entry.key}` takes {wrong[0]}", document.where(entry.line), seen=wrong[1], key=entry.key)
            )
    return problems


def _advice(meant: keys.Meant, value: Any, groups: Mapping[str, Sequence[str]]) -> str:
    if not meant.keys or (value is not None and meant.value is None):
        return ""
    key = meant.keys[0]
    if key in groups and isinstance(meant.value, str):
        return _choose(key, meant.value)
    changed = meant.value is not None and repr(meant.value) != repr(value)
    return f"write {key}: {_shown(meant.value)}" if changed else f"write {key}"


def _choose(group: str, name: str) -> str:
    return f"choose it in the defaults list: - override /{group}: {name}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(entry: Entry) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(entry.node)
    finally:
        loader.dispose()
