"""``Attribute``: backend attributes for the ops of a scope."""

from __future__ import annotations

from typing import Any, Dict

__all__ = ["Attribute", "clear_attribute", "set_attribute"]


class Attribute:
    """Context manager that gives the ops inside it attributes of the backend.

    Args:
        kwargs: For each attribute a dict of its keys and values: ``__outline={"layer": "embedding"}``.
    """

    # What is in force now: {attribute: {key: value}}, shared by nested scopes.
    _attributes: Dict[str, Dict[str, str]] = {}

    def __init__(self, **kwargs: Dict[str, str]) -> None:
        self._attrs = kwargs
        self._saved: Dict[str, Dict[str, str]] = {}

    def __enter__(self) -> None:
        self._saved = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
        in_force = {name: dict(pairs) for name, pairs in self._saved.items()}
        for name, pairs in self._attrs.items():
            in_force.setdefault(name, {}).update(pairs)
        self._put_in_force(in_force)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self._put_in_force(self._saved)

    @staticmethod
    def _put_in_force(attributes: Dict[str, Dict[str, str]]) -> None:
        from ipurun.emulator._capture.recorder import current

        Attribute._attributes = attributes
        recorder = current()
        if recorder is not None:
            recorder.record_event("attributes", attributes=attributes)


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Gives the ops that follow an attribute; programs find it as ``torch.ops.poptorch.set_attribute``."""
    in_force = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
    in_force.setdefault(attribute, {})[key] = value
    Attribute._put_in_force(in_force)


def clear_attribute(attribute: str, key: str) -> None:
    """Takes an attribute from the ops that follow; programs find it as ``torch.ops.poptorch.clear_attribute``."""
    in_force = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
    in_force.get(attribute, {}).pop(key, None)
    Attribute._put_in_force({name: pairs for name, pairs in in_force.items() if pairs})
