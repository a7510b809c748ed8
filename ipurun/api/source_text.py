"""A plan as PopTorch source text: what a YAML file means, in lines that anyone could have written by hand."""

from __future__ import annotations

from typing import Any, Mapping

from ipurun.api.calls import Call, Symbol

__all__ = ["call_text", "value_text"]


def call_text(call: Call) -> str:
    """One call: ``Training.gradientAccumulation(8)``."""
    arguments = [value_text(value) for value in call.args]
    arguments += [f"{name}={value_text(value)}" for name, value in call.kwargs.items()]
    chained = "".join(f".{call_text(setter)}" for setter in call.chain)
    return f"{call.path}({', '.join(arguments)}){chained}"


def value_text(value: Any) -> str:
    """An argument as source."""
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, Call):
        return call_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {value_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(value_text(entry) for entry in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)
