"""PopTorch's public names, as data: what exists, which arguments it takes, which option it writes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Dict

__all__ = ["load"]


@functools.lru_cache(maxsize=1)
def load() -> Dict[str, Any]:
    """The manifest of PopTorch 3.4's Python API; shared, so readers leave it as it is."""
    text = (Path(__file__).parent / "api.json").read_text(encoding="utf-8")
    manifest: Dict[str, Any] = json.loads(text)
    return manifest
