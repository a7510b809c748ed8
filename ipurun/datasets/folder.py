"""The folder that a data set is read from: everything that is missing is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Optional, Sequence

from ipurun.errors import ConfigError

__all__ = ["check_folder"]


def check_folder(
    root: Path, names: Sequence[str], find: Callable[[Path, str], Optional[Path]], *, ending: str, advice: str
) -> None:
    """Make sure that `data.root` has all files of a data set.

    Args:
        root: The folder.
        names: What its files are called, without the ending they may have.
        find: Gives the path of a file in the folder; None where it is missing.
        ending: The ending that they may have, for the message.
        advice: What to do when files are missing.

    Raises:
        ConfigError: The folder is missing or incomplete.
    """
    where = f"data.root={root}"
    if not root.is_dir():
        raise ConfigError("`data.root` is not a folder", where=where, seen=str(root), fix=advice, key="data.root")
    missing = [name for name in names if find(root, name) is None]
    if missing:
        raise ConfigError(
            f"`data.root` lacks {len(missing)} of the {len(names)} data files",
            where=where,
            seen="missing " + ", ".join(missing),
            known=", ".join(names) + f" (each may end in {ending})",
            fix=advice,
            key="data.root",
        )
