"""A recipe under construction: keys of ipurun, and notes on what could not be taken over."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, Optional

from ipurun.config.foreign import explain, translate
from ipurun.config.keys import is_known, type_problem

__all__ = ["Recipe"]


class Recipe:
    """Keys and notes of an imported config.

    Args:
        lacks: What the source does not describe, for the head of the recipe.
    """

    def __init__(self, lacks: str = "model, data, loss and optimizer") -> None:
        self.keys: Dict[str, Any] = {}
        self.notes: List[str] = []
        self.versions: List[str] = []
        self.lacks = lacks

    def set(self, key: str, value: Any) -> None:
        """Set a dotted key of ipurun."""
        node = self.keys
        *groups, last = key.split(".")
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value

    def take(self, name: str, value: Any, shown: Optional[str] = None) -> None:
        """Translate a key of another tool, or note that it has no counterpart.

        Args:
            name: The key.
            value: Its value.
            shown: The key as the source writes it.
        """
        shown = shown or name
        own = name if is_known(name) and "." not in name and type_problem(name, value) is None else None
        found = (own, value) if own else translate(name, value)
        if found is None:
            why = explain(name) or "has no counterpart in ipurun"
            self.notes.append(f"{shown}: {json.dumps(value, default=str)}: {why}")
        elif found[1] is None or (is_known(found[0]) and type_problem(*found) is not None and "." in found[0]):
            why = explain(name, value) or f"not a value of {found[0]}"
            self.notes.append(f"{shown}: {json.dumps(value, default=str)}: {why}")
        elif "." not in found[0] and isinstance(found[1], str) and found[0] in _GROUPS:
            self.choose(found[0], found[1])
        else:
            self.set(found[0], None if found[1] == "null" else found[1])

    def choose(self, group: str, name: str) -> None:
        """Choose a file of a group, as ``optimizer=adamw`` does."""
        choices = self.keys.setdefault("defaults", [])
        choices[:] = [choice for choice in choices if not choice.startswith(f"override /{group}:")]
        choices.append(f"override /{group}: {name}")

    def text(self, name: str, file_name: str) -> str:
        """Return the recipe as YAML."""
        lines = [
            "# @package _global_",
            f"# {name}: imported from {file_name}{' (' + ', '.join(self.versions) + ')' if self.versions else ''}.",
        ]
        if self.lacks:
            lines.append(f"# Add {self.lacks}, which the file does not describe.")
        if self.notes:
            lines += ["#", "# Not imported:"]
            lines += [f"# - {note}" for note in self.notes]
        keys = dict(self.keys)
        choices = ["defaults:", *(f"  - {choice}" for choice in keys.pop("defaults"))] if "defaults" in keys else []
        return "\n".join([*lines, "", *choices, *_yaml(keys)]) + "\n"


_GROUPS = ("optimizer", "schedule", "logger", "debug", "profile")


def _yaml(node: Mapping[str, Any], indent: str = "") -> List[str]:
    """Format nested keys in block style; the leaves are JSON, which is YAML."""
    lines = []
    for key, value in node.items():
        if isinstance(value, Mapping) and value and not str(key).startswith("set"):
            lines += [f"{indent}{key}:", *_yaml(value, indent + "  ")]
        else:
            text = json.dumps(value)
            # YAML 1.1 reads 3e-05 as text.
            lines.append(f"{indent}{key}: {text.replace('e-', '.0e-') if text[1:3] == 'e-' else text}")
    return lines
