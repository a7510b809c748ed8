"""The folders of compiled executables: list, check and remove what is in them, without torch or an engine.

A cache folder holds PopART's ``*.popef`` files with a JSON file about each in ``about/``, and in ``cpu/`` the entries
of the CPU engine, each with a JSON file beside it. Other files are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from ipurun.files import write_atomically

__all__ = [
    "Entry",
    "absolute",
    "cache_folders",
    "cache_root",
    "clear",
    "count_hit",
    "differing_keys",
    "entries",
    "leftovers",
    "parse_size",
    "program_config",
    "prune",
    "remove_leftovers",
    "set_aside",
    "verify",
    "verify_about",
    "write_about",
]

_CPU_FOLDER, _ABOUT_FOLDER = "cpu", "about"
_CPU_ENDING, _IPU_ENDING = ".graph", ".popef"
_CHOICE_ENDING = ".form"  # what the CPU engine chose by measuring, for a program that may be too quick to be stored
_ABOUT_SUM = "checksum"
_CPU_MAGIC = b"ipurun executable "
_OLD_PLACEHOLDER = b'{"operations": '
_LEFTOVERS = (".broken", ".partial", ".lock")
_READ_BYTES = 2**20
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Keys of the config that no executable depends on.
_NOT_COMPILED = frozenset(
    [
        "cache",
        "callbacks",
        "checkpoint",
        "debug",
        "early_stopping",
        "engine",
        "epochs",
        "eval",
        "init",
        "init_from",
        "interrupt_exit_code",
        "limit",
        "loader",
        "log_every_epochs",
        "log_every_minutes",
        "log_every_steps",
        "logger",
        "machine",
        "max_minutes",
        "max_steps",
        "metrics",
        "monitor",
        "name",
        "on_callback_error",
        "on_nonfinite",
        "optimizer.lr",
        "options.connectionType",
        "options.useOfflineIpuTarget",
        "poplar.log_dest",
        "poplar.log_level",
        "poplar.monitor_seconds",
        "poplar.popart_log_level",
        "poplar.wait_for_ipu_minutes",
        "precompiled",
        "profile.dir",
        "profile.start_step",
        "profile.steps",
        "recovery",
        "resume",
        "rollback",
        "runs_dir",
        "schedule",
        "security",
        "seed",
        "sweep",
        "threads",
    ]
)


@dataclass(frozen=True)
class Entry:
    """An executable in a cache folder.

    Args:
        key: Its name.
        engine: ``cpu`` or ``ipu``.
        path: Its file.
        about_path: The JSON file about it, which may be missing.
        about: The content of that file.
        size: Bytes on the disk.
        modified: When the file was written.
    """

    key: str
    engine: str
    path: Path
    about_path: Path
    about: Mapping[str, Any]
    size: int
    modified: float

    @property
    def last_use(self) -> float:
        """Return when it was last compiled or loaded, in seconds since the epoch."""
        return max(self.modified, _number(self.about.get("last_use")))

    @property
    def mode(self) -> str:
        """Return ``training``, ``inference`` or "" where unknown."""
        return str(self.about.get("mode", ""))

    @property
    def compile_seconds(self) -> Optional[float]:
        """Return how long it took to compile, None where unknown."""
        seconds = self.about.get("compile_seconds")
        return _number(seconds) if isinstance(seconds, (int, float)) else None

    @property
    def hits(self) -> int:
        """Return how often it was loaded."""
        return int(_number(self.about.get("hits")))

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the keys of the run that compiled it."""
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def versions(self) -> Mapping[str, str]:
        """Return the versions that compiled it."""
        versions = self.about.get("versions")
        return {str(key): str(value) for key, value in versions.items()} if isinstance(versions, dict) else {}

    @property
    def name(self) -> str:
        """Return the name of the run that compiled it, that of the cache folder where unknown."""
        folder = self.path.parent
        return str(self.about.get("name") or (folder.parent if folder.name == _CPU_FOLDER else folder).name)


def absolute(path: str) -> str:
    """Return a path of the user as an absolute one."""
    return os.path.abspath(os.path.expanduser(path))


def cache_root(environ: Mapping[str, str]) -> str:
    """Return ipurun's cache folder: IPURUN_CACHE_DIR, else ``~/.cache/ipurun``."""
    root = environ.get("IPURUN_CACHE_DIR", "").strip()
    if not root:
        root = os.path.join(environ.get("XDG_CACHE_HOME", "").strip() or os.path.join("~", ".cache"), "ipurun")
    return absolute(root)


def cache_folders(environ: Mapping[str, str], chosen: Optional[str] = None) -> List[Path]:
    """Return the folders that may hold executables: the chosen one with those in it, else all of the user's."""
    roots = [absolute(chosen)] if chosen else [os.path.join(cache_root(environ), "executables")]
    poptorch_dir = environ.get("POPTORCH_CACHE_DIR", "").strip()
    if poptorch_dir and not chosen:
        roots.insert(0, absolute(poptorch_dir))
    found: Dict[Path, None] = {}
    for root in map(Path, roots):
        found[root] = None
        for path in _listed(root):
            if path.is_dir() and not path.is_symlink() and path.name not in (_CPU_FOLDER, _ABOUT_FOLDER):
                found[path] = None
    return list(found)


def entries(folder: Union[str, Path], engine: Optional[str] = None) -> List[Entry]:
    """Return the executables of a cache folder, the most recently used first.

    Args:
        folder: The folder, which need not exist.
        engine: Only those of this engine, ``cpu`` or ``ipu``.
    """
    root = Path(folder)
    found: List[Entry] = []
    if engine in (None, "cpu"):
        paths = _listed(root / _CPU_FOLDER)
        found += [_entry(path, "cpu", path.with_suffix(".json")) for path in paths if path.name.endswith(_CPU_ENDING)]
    if engine in (None, "ipu"):
        about = root / _ABOUT_FOLDER
        paths = [path for path in _listed(root) if path.name.endswith(_IPU_ENDING)]
        made = [_entry(path, _engine_of(path), about / f"{path.stem}.json") for path in paths]
        found += [entry for entry in made if engine is None or entry.engine == "ipu"]
    return sorted((entry for entry in found if entry.size >= 0), key=lambda entry: -entry.last_use)


def _engine_of(path: Path) -> str:
    """Return the engine of a file that PopART may have made: earlier versions of the CPU engine left such names too."""
    try:
        with path.open("rb") as stream:
            return "cpu" if stream.read(len(_OLD_PLACEHOLDER)) == _OLD_PLACEHOLDER else "ipu"
    except OSError:
        return "ipu"


def _entry(path: Path, engine: str, about_path: Path) -> Entry:
    try:
        status = path.lstat()
        size = status.st_size if path.is_file() and not path.is_symlink() else -1
    except OSError:
        return Entry(path.stem, engine, path, about_path, {}, -1, 0.0)
    return Entry(path.stem, engine, path, about_path, _read_about(about_path), size, status.st_mtime)


def leftovers(folder: Union[str, Path]) -> List[Path]:
    """Return what else the cache has made in a folder: entries set aside, unfinished files and unused locks."""
    paths = _listed(Path(folder) / _CPU_FOLDER) + [path for path in _listed(Path(folder)) if path.suffix == ".broken"]
    return [path for path in paths if path.name.endswith(_LEFTOVERS)]


def remove_leftovers(folder: Union[str, Path], older_than_seconds: float) -> List[Path]:
    """Remove entries that were set aside, and unfinished files, of some age; return them. Locks stay."""
    limit = time.time() - older_than_seconds
    removed = []
    for path in leftovers(folder):
        with contextlib.suppress(OSError):
            if path.suffix != ".lock" and path.stat().st_mtime <= limit:
                path.unlink()
                removed.append(path)
    return removed


def write_about(entry_path: Path, about: Mapping[str, Any]) -> None:
    """Write the file about an executable of PopART.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = entry_path.parent / _ABOUT_FOLDER
    folder.mkdir(exist_ok=True)
    status = entry_path.stat()
    full = {"sha256": _checksum(entry_path), "bytes": status.st_size, **about}
    _write_about(folder / f"{entry_path.stem}.json", full)


def count_hit(entry: Entry) -> None:
    """Note that an executable of PopART was loaded; a folder that can only be read stays as it is."""
    about = {**entry.about, "last_use": time.time(), "hits": entry.hits + 1}
    with contextlib.suppress(OSError):
        _write_about(entry.about_path, about)


def verify(entry: Entry) -> str:
    """Return what is wrong with an entry, "" for nothing; without a record of it, only its form is checked."""
    try:
        if not entry.size:
            return "it is empty: a run was killed while it was written"
        if entry.path.name.endswith(_CPU_ENDING):
            with entry.path.open("rb") as stream:
                first, body = stream.readline(), stream.read()
            words = first[len(_CPU_MAGIC) :].split()
            if not first.startswith(_CPU_MAGIC) or len(words) != 2:
                return "it is not an executable of the CPU engine"
            return "" if words[1].decode("ascii", "replace") == hashlib.sha256(body).hexdigest() else _DAMAGED
        recorded = entry.about.get("sha256")
        return "" if recorded is None or _checksum(entry.path) == recorded else _DAMAGED
    except OSError as error:
        return str(error.strerror or error)


_DAMAGED = "its checksum is wrong: it was changed or cut off after it was written"


def verify_about(entry: Entry) -> str:
    """Return what is wrong with the file about an entry, "" for nothing or if there is none."""
    return _DAMAGED if not entry.about and entry.about_path.is_file() else ""


def set_aside(entry: Entry) -> Path:
    """Rename a damaged entry so that no run finds it, and remove the file about it.

    Raises:
        OSError: The folder cannot be written.
    """
    target = entry.path.with_name(entry.path.name + ".broken")
    os.replace(entry.path, target)
    with contextlib.suppress(OSError):
        entry.about_path.unlink()
    return target


def prune(
    found: Sequence[Entry],
    *,
    older_than_seconds: Optional[float] = None,
    max_bytes: Optional[int] = None,
    stale_for: Optional[Mapping[str, Mapping[str, str]]] = None,
    keep: Iterable[Path] = (),
) -> List[Entry]:
    """Remove entries; return those that were removed.

    Args:
        found: The entries.
        older_than_seconds: Remove those that were not used for this long.
        max_bytes: Remove the least recently used ones until the rest is no larger.
        stale_for: Engine -> versions now: remove those that other versions compiled.
        keep: Files that stay whatever their age.
    """
    protected = set(keep)
    candidates = sorted((entry for entry in found if entry.path not in protected), key=lambda entry: entry.last_use)
    chosen: List[Entry] = []
    if older_than_seconds is not None:
        limit = time.time() - older_than_seconds
        chosen += [entry for entry in candidates if entry.last_use < limit]
    if stale_for is not None:
        chosen += [entry for entry in candidates if entry not in chosen and _is_stale(entry, stale_for)]
    if max_bytes is not None:
        total = sum(entry.size for entry in found if entry not in chosen)
        for entry in candidates:
            if total <= max_bytes:
                break
            if entry not in chosen:
                chosen.append(entry)
                total -= entry.size
    return [entry for entry in chosen if _remove(entry)]


def _is_stale(entry: Entry, now: Mapping[str, Mapping[str, str]]) -> bool:
    if entry.engine == "cpu" and entry.path.suffix == _IPU_ENDING:
        return True  # a placeholder, which nothing reads any more
    current = now.get(entry.engine, {})
    return any(name in current and current[name] != version for name, version in entry.versions.items())


def clear(folder: Union[str, Path]) -> Tuple[List[Entry], int]:
    """Remove all executables of a folder and what belongs to them; return them and the number of other files."""
    removed = [entry for entry in entries(folder) if _remove(entry)]
    others = 0
    for path in leftovers(folder):
        with contextlib.suppress(OSError):
            path.unlink()
            others += 1
    for path in _listed(Path(folder) / _CPU_FOLDER):
        if path.suffix == _CHOICE_ENDING:
            with contextlib.suppress(OSError):
                path.unlink()
    for name in (_CPU_FOLDER, _ABOUT_FOLDER):
        with contextlib.suppress(OSError):
            (Path(folder) / name).rmdir()
    return removed, others


def _remove(entry: Entry) -> bool:
    try:
        entry.path.unlink()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        entry.about_path.unlink()
    return True


def program_config(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the keys of a config that an executable may depend on, flat: ``model.hidden_size``."""
    flat: Dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if any(path == name or path.startswith(f"{name}.") for name in _NOT_COMPILED):
            return
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{path}.{key}" if path else str(key), inner)
        else:
            flat[path] = value

    walk("", config)
    return flat


def differing_keys(config: Mapping[str, Any], other: Mapping[str, Any]) -> List[Tuple[str, Any, Any]]:
    """Return the keys whose values differ: key, value in the first, value in the second; None where one is missing."""
    known = json.loads(json.dumps(dict(config), default=str))  # as it was stored
    keys = [*known, *(key for key in other if key not in known)]
    return [(key, known.get(key), other.get(key)) for key in keys if known.get(key) != other.get(key)]


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``20GB`` or ``500 MB`` means.

    Raises:
        ValueError: It is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", str(text), re.ASCII | re.IGNORECASE)
    unit = found[2].upper() if found else "?"
    unit = f"{unit}B" if unit in ("K", "M", "G", "T") else "" if unit == "B" else unit
    if found is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 20GB or 500MB")
    return int(float(found[1]) * _UNITS[unit])


def _listed(folder: Path) -> List[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # missing, not a folder, or not ours to read
        return []


def _read_about(path: Path) -> Dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(about, dict) and about.pop(_ABOUT_SUM, None) == _about_checksum(about)
    return about if is_whole else {}


def _write_about(path: Path, about: Mapping[str, Any]) -> None:
    plain = json.loads(json.dumps(dict(about), default=str))
    write_atomically(path, json.dumps({**plain, _ABOUT_SUM: _about_checksum(plain)}, indent=1))


def _about_checksum(about: Mapping[str, Any]) -> str:
    """Return the checksum of a file about an executable; the CPU engine writes the same into its own."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(_READ_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
