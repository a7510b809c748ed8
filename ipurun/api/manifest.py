"""The manifest of PopTorch 3.4's public API, which needs neither torch nor PopTorch."""

from __future__ import annotations

import functools
import json
import os
from typing import Any, Dict

__all__ = ["load"]


@functools.lru_cache(maxsize=None)
def load() -> Dict[str, Any]:
    """Return the manifest: modules, option groups, exceptions, environment variables, backend keys."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api.json")
    with open(path, encoding="utf-8") as file:
        manifest: Dict[str, Any] = json.load(file)
    return manifest
