"""Check the folder of a data set for missing files."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Optional, Sequence

from ipurun.errors import ConfigError

__all__ = ["check_folder"]


def check_folder(
    root: Path, names: Sequence[str], find: Callable[[Path, str], Optional[Path]], *, ending: str, advice: str
) -> None:
    """Check that `data.root` has all files of a data set.

    Args:
        root: The folder.
        names: Names of the files, without their optional ending.
        find: Returns the path of a file in the folder, or None if it is missing.
        ending: The optional ending, for the message.
        advice: How to get missing files.

    Raises:
        ConfigError: If the folder is missing or incomplete.
    """
    where = f"data.root={root}"
    if not root.is_dir():
        raise ConfigError("`data.root` is not a folder", where=where, seen=str(root), fix=advice, key="data.root")
    missing = [name for name in names if find(root, name) is None]
    if missing:
        raise ConfigError(
            f"`data.root` is missing {len(missing)} of the {len(names)} data files",
            where=where,
            seen="missing " + ", ".join(missing),
            known=", ".join(names) + f" (each may end in {ending})",
            fix=advice,
            key="data.root",
        )
