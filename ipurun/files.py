"""Write files completely or not at all: the one way in which files of run and sweep folders are replaced."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Iterator, Union

__all__ = ["PARTIAL", "replacing", "sync_folder", "write_atomically"]

PARTIAL = ".partial"  # ends the name of a file while it is being written


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces another only after all of it is on the disk; after an error the old one stays."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_atomically(path: Path, content: Union[str, bytes]) -> None:
    """Replace a file by one with this content; a process killed meanwhile leaves the old or the new one."""
    with replacing(path) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make sure that the names of new files survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
