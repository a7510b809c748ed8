"""Find the files of a data set, and report missing ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Union

from ipurun.errors import ConfigError, listing

__all__ = ["check_folder", "numbered_files"]

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


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


def numbered_files(pattern: Union[str, Sequence[str], None], key: str) -> List[Path]:
    """Return the files of a pattern, by number.

    Args:
        pattern: A file; ``NAME-{000..127}.END`` for numbers that must all be there; ``NAME-*.END`` for those that are
            there, without a gap in their numbers; or a list of these. None is an error.
        key: The config key, for messages.

    Raises:
        ConfigError: If there is no such file, or a number is missing.
    """
    if not pattern:
        raise ConfigError(f"`{key}` is not set", fix=f"{key}=FILE, or {key}='NAME-*.END'", key=key)
    if not isinstance(pattern, str):
        return [path for item in pattern for path in numbered_files(item, key)]
    path = Path(pattern).expanduser()
    braces = _BRACES.search(path.name)
    if braces:
        first, last = braces[1], braces[2]
        names = [
            path.name[: braces.start()] + str(number).zfill(len(first)) + path.name[braces.end() :]
            for number in range(int(first), int(last) + 1)
        ]
        found = [path.with_name(name) for name in names]
        missing = [file.name for file in found if not file.is_file()]
    elif any(sign in path.name for sign in "*?["):
        found = sorted(path.parent.glob(path.name), key=lambda file: (_numbers(file.name), file.name))
        missing = _gaps(found)
    else:
        found, missing = [path], [] if path.is_file() else [path.name]
    if missing or not found:
        seen = f"missing {listing(missing)}" if missing else f"no file in {path.parent} matches {path.name}"
        fix = "copy the missing files, or name others: a file, NAME-{000..127}.END or NAME-*.END"
        raise ConfigError(
            f"`{key}` names files that are not there", where=f"{key}={pattern}", seen=seen, fix=fix, key=key
        )
    return found


def _numbers(name: str) -> List[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _gaps(files: Sequence[Path]) -> List[str]:
    """Return the names of the files that are missing between others whose names differ in one number."""
    names = {file.name for file in files}
    gaps: List[str] = []
    for before, after in zip(files, files[1:]):
        pieces, following = re.split(r"(\d+)", before.name), re.split(r"(\d+)", after.name)
        places = [place for place, (one, other) in enumerate(zip(pieces, following)) if one != other]
        if len(pieces) == len(following) and len(places) == 1 and places[0] % 2:
            place = places[0]
            for number in range(int(pieces[place]) + 1, int(following[place])):
                digits = str(number).zfill(len(pieces[place]) if pieces[place].startswith("0") else 1)
                gaps.append("".join([*pieces[:place], digits, *pieces[place + 1 :]]))
    return [name for name in gaps if name not in names]
