"""Files of the executable cache: data with a checksum, and beside it a JSON file about it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import time
from typing import Any, Dict, Mapping, NamedTuple, Optional

import torch

from ipurun.emulator._impl import __version__
from ipurun.emulator._logging import logger

PARTIAL = ".partial"
ENTRY = ".graph"
SECONDS_VARIABLE = "POPTORCH_EMULATOR_CACHE_SECONDS"
_FORMAT = 1
_MAGIC = b"ipurun executable "
_ABOUT, _BROKEN = ".json", ".broken"
_SUM = "checksum"  # of the file about an entry itself


class Shelf(NamedTuple):
    """Where a program stores what it makes, and what the files about it say.

    Attributes:
        folder: The folder of the entries.
        about: Information for the files about them.
    """

    folder: str
    about: Mapping[str, Any]


class CacheFile:
    """An entry of the cache.

    Args:
        folder: The folder of the entries.
        name: Name of the entry.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.path = os.path.join(folder, name + ENTRY)
        self._about_path = os.path.join(folder, name + _ABOUT)

    @property
    def about(self) -> Dict[str, Any]:
        """Return what the file about the entry says, nothing if it is missing or damaged."""
        try:
            with open(self._about_path, encoding="utf-8") as file:
                about = json.load(file)
        except (OSError, ValueError):
            return {}
        is_whole = isinstance(about, dict) and about.pop(_SUM, None) == about_checksum(about)
        return about if is_whole else {}

    def _write_about(self, about: Mapping[str, Any]) -> None:
        sealed_about = {**about, _SUM: about_checksum(about)}
        write_completely(self._about_path, json.dumps(sealed_about, indent=1).encode())

    def read(self) -> Dict[str, Any]:
        """Return the content of the entry.

        Raises:
            OSError: It cannot be read.
            ValueError: The file is not what was written.
        """
        with open(self.path, "rb") as file:
            return unsealed(file.read())

    def write(self, data: Mapping[str, Any], about: Mapping[str, Any], cpu_seconds: float) -> None:
        """Write the entry and the file about it.

        Args:
            data: The content.
            about: What else to say about it.
            cpu_seconds: CPU time that it took to make.

        Raises:
            OSError: It cannot be written.
        """
        content, now = sealed(data), time.time()
        full = {
            **about,
            "format": _FORMAT,
            "engine": "cpu",
            "versions": {**cache_versions(), **about.get("versions", {})},
            "compile_cpu_seconds": cpu_seconds,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "created": now,
            "last_use": now,
            "hits": 0,
        }
        self._write_about(full)
        write_completely(self.path, content)

    def count_hit(self, cpu_seconds: float, about_it: Mapping[str, Any]) -> None:
        """Note that the entry was loaded, which took this CPU time; `about_it` is for a file about it that is lost.

        An entry that takes longer to load than to make is removed. By CPU time: other work on the machine, or a slow
        disk, says nothing about the next start.
        """
        about = self.about or {
            **about_it,
            "engine": "cpu",
            "versions": {**cache_versions(), **about_it.get("versions", {})},
        }
        made = number(about.get("compile_cpu_seconds"))
        if made is not None and cpu_seconds > made and SECONDS_VARIABLE not in os.environ:
            self.remove("loading it takes longer than compiling")
            return
        about.update(last_use=time.time(), hits=int(number(about.get("hits")) or 0) + 1)
        with contextlib.suppress(OSError):  # a folder that can only be read is of use too
            self._write_about(about)

    def set_aside(self, why: str) -> None:
        """Rename a damaged entry, so that no process finds it."""
        logger.warning("The executable %s in the cache is damaged (%s): set aside, compiling again.", self.path, why)
        with contextlib.suppress(OSError):
            os.replace(self.path, self.path + _BROKEN)
            os.remove(self._about_path)

    def remove(self, why: str) -> None:
        """Remove the entry."""
        logger.debug("The executable %s is removed from the cache: %s", self.path, why)
        for path in (self.path, self._about_path):
            with contextlib.suppress(OSError):
                os.remove(path)


def number(item: Any) -> Optional[float]:
    """Return a number of a file that anything may have changed, None if it is not one."""
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item)
    return float(item) if is_number else None


def least_seconds(default: float) -> float:
    """Return the CPU time from which on what was made is stored."""
    return float(os.environ.get(SECONDS_VARIABLE) or default)


def about_checksum(about: Mapping[str, Any]) -> str:
    """Return the checksum of what a file about an entry says."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def sealed(data: Mapping[str, Any]) -> bytes:
    """Return data as the content of a file, with its checksum."""
    body = json.dumps(data, separators=(",", ":")).encode()
    return _header(body) + body


def unsealed(content: bytes) -> Dict[str, Any]:
    """Return the data in the content of a file.

    Raises:
        ValueError: It is not what `sealed` returned.
    """
    first, _, body = content.partition(b"\n")
    if first + b"\n" != _header(body):
        raise ValueError("its checksum is wrong")
    data = json.loads(body)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    return data


def _header(body: bytes) -> bytes:
    return _MAGIC + f"{_FORMAT} {hashlib.sha256(body).hexdigest()}\n".encode()


def write_completely(path: str, content: bytes) -> None:
    """Write a file completely or not at all."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}{PARTIAL}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


@functools.lru_cache(maxsize=None)
def cache_versions() -> Dict[str, str]:
    """Return the versions that an entry depends on; `engine` is a digest of this package's code."""
    digest = hashlib.sha256()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(name.encode() + file.read())
    return {
        "poptorch": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "engine": digest.hexdigest()[:12],
    }
