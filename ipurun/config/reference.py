"""Write the reference page of all config keys from the schema: ``python -m ipurun.config.reference FILE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict, List

from ipurun.config.schema import Key, RunConfig, walk_keys

__all__ = ["page"]

_HEAD = """\
# Config keys

Written by `make docs` from `ipurun/config/schema/`; do not edit. `ipurun ls keys PATTERN` shows the same in a terminal.
Set any key on the command line as `key=value`. A key of type `mapping` takes further keys: the arguments of a
`_target_`, PopTorch's setters, or names.
"""


def page() -> str:
    """Return the page as Markdown: one table for the top-level keys and one for each group."""
    tables: Dict[str, List[Key]] = {}
    for key in walk_keys(RunConfig):
        tables.setdefault(key.path.rpartition(".")[0], []).append(key)
    return "\n".join([_HEAD, *(_table(prefix, keys) for prefix, keys in tables.items())])


def _table(prefix: str, keys: List[Key]) -> str:
    heading = f"## `{prefix}`" if prefix else "## Top level"
    rows = [
        f"| `{key.path}` | {_cell(key.type_name)} | `{_cell(key.default_text)}` | {_cell(key.help)} |" for key in keys
    ]
    return "\n".join([heading, "", "| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
