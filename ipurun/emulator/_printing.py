"""Print a module with its blocks."""

from __future__ import annotations

import builtins
from typing import Any, List

import torch

from ipurun.emulator._ops.blocks import BlockHook

__all__ = ["module_repr", "print"]


def _indented(text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first] + [f"  {line}" for line in rest])


def module_repr(m: torch.nn.Module) -> str:
    """Return the repr of a module, with each block shown before the module that begins it."""
    blocks: List[str] = [repr(hook) for hook in m._forward_pre_hooks.values() if isinstance(hook, BlockHook)]
    extra = m.extra_repr()
    extra_lines = extra.split("\n") if extra else []
    children = [f"({name}): {_indented(module_repr(child))}" for name, child in m.named_children()]
    name = " ".join([*blocks, m._get_name()])
    if not children and len(extra_lines) <= 1:
        return f"{name}({extra})"
    inside = "\n".join(f"  {line}" for line in extra_lines + children)
    return f"{name}(\n{inside}\n)"


def print(m: Any) -> None:
    """Print the repr of a module, then the object with Python's print, as PopTorch 3.4 does."""
    if isinstance(m, torch.nn.Module):
        builtins.print(module_repr(m))
    builtins.print(m)
