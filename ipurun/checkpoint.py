"""Checkpoints on disk: written atomically, and verified before they are used.

A checkpoint is two files: ``step-00000100.pt`` with the tensors, and ``step-00000100.json``, which describes them. The
second is written last and holds the checksum of the first, so that a process killed at any moment leaves either a
complete checkpoint or one that is recognised as incomplete. Where a step is saved again, the description comes first
and holds the checksums of both, so that the tensors on the disk are good before and after they are replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, List, Mapping, Optional, Protocol, Tuple, Union

import torch

from ipurun.errors import Problem, RunError, underlying_os_error
from ipurun.files import PARTIAL, replacing, sync_folder, write_atomically

__all__ = [
    "Checkpoint",
    "Folder",
    "best",
    "broken",
    "broken_after_latest",
    "latest",
    "listed",
    "load",
    "newest_good",
    "save",
    "set_aside",
]

_FORMAT = 1
_NAME = re.compile(r"step-(\d+)\.json")
_ASIDE = "abandoned-"  # begins the name of a checkpoint to which a run does not return
_REPLACED = "replaced_sha256"  # checksums of the tensors that are being replaced
_CHUNK = 1 << 20
_MISMATCH = "its contents do not match their checksum"


class Folder(Protocol):
    """Anything with a folder of checkpoints, such as a run folder."""

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, not yet read; `is_verified` if its checksum was compared."""

    path: Path
    step: int
    info: Mapping[str, Any]
    is_verified: bool = False

    @property
    def is_best(self) -> bool:
        """Whether it had the best value of the monitored metric when it was written."""
        return bool(self.info.get("is_best"))

    def __str__(self) -> str:
        return str(self.path)


def save(
    folder: Union[Folder, Path],
    step: int,
    state: Mapping[str, Any],
    keep: int = 0,
    keep_hours: Optional[float] = None,
    info: Optional[Mapping[str, Any]] = None,
    is_best: bool = False,
) -> Checkpoint:
    """Write a checkpoint, then remove those that need not be kept.

    Args:
        folder: The run folder, or the folder of checkpoints itself.
        step: Weight updates done.
        state: Tensors and plain values.
        keep: How many of the newest to keep, 0 for all; the best one is kept as well.
        keep_hours: Age up to which others are kept as well; with ``keep`` 0, older ones than this are removed.
        info: Plain values that can be read without loading the tensors.
        is_best: Whether this is the best one so far.

    Raises:
        RunError: It could not be written; all earlier checkpoints are intact.
    """
    place = _place(folder)
    tensors, description = place / f"step-{step:08d}.pt", place / f"step-{step:08d}.json"
    try:
        place.mkdir(exist_ok=True)  # without parents: a run folder that was deleted is an error, not made again
        _remove_partial(place)
        before = _read_description(description)
        about = {**(info or {}), "format": _FORMAT, "step": step, "is_best": is_best, "time": round(time.time(), 3)}
        with replacing(tensors) as stream:
            writer = _HashingWriter(stream)
            torch.save(dict(state), writer)
            about.update(sha256=writer.digest(), bytes=writer.written)
            if before is not None:
                write_atomically(description, _as_json({**about, _REPLACED: _checksums(before)}))
        write_atomically(description, _as_json(about))
        sync_folder(place)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            _remove_partial(place)
        raise RunError(_save_problem(place, step, error)) from error
    if keep or keep_hours is not None:
        _prune(place, max(keep, 1), keep_hours)
    return Checkpoint(tensors, step, about)


def listed(folder: Union[Folder, Path]) -> List[Checkpoint]:
    """Return all complete checkpoints, oldest first (by number, so that step 99 comes before step 7037)."""
    found = []
    for file in _place(folder).glob("step-*.json"):
        match = _NAME.fullmatch(file.name)
        about = _read_description(file)
        tensors = file.with_suffix(".pt")
        if match and about is not None and not _visible_fault(tensors, about):
            found.append(Checkpoint(tensors, int(match.group(1)), about))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def broken(folder: Union[Folder, Path]) -> Dict[str, str]:
    """Return the checkpoints that cannot be used, newest first: the name of the tensor file and what is wrong.

    What a look at names and sizes shows; `newest_good` also compares checksums.
    """
    found = {}
    stems = {file.stem for kind in ("pt", "json") for file in _place(folder).glob(f"step-*.{kind}")}
    for name in sorted(stems, key=lambda stem: (len(stem), stem), reverse=True):
        tensors = _place(folder) / f"{name}.pt"
        about = _read_description(tensors.with_suffix(".json"))
        fault = f"no readable {name}.json" if about is None else _visible_fault(tensors, about)
        if fault:
            found[tensors.name] = fault
    return found


def broken_after_latest(folder: Union[Folder, Path]) -> Dict[str, str]:
    """Return those of `broken` that are newer than `latest`, which skips them."""
    newest = latest(folder)
    return {name: why for name, why in broken(folder).items() if newest is None or _step_of(name) > newest.step}


def newest_good(folder: Union[Folder, Path]) -> Tuple[Optional[Checkpoint], Dict[str, str]]:
    """Return the newest checkpoint whose tensors match their checksum, and the newer ones that had to be skipped.

    The second is as in `broken`, for files that are newer than the first; all if there is no good one.
    """
    skipped = broken(folder)
    for checkpoint in reversed(listed(folder)):
        if _digest_of(checkpoint.path) in _checksums(checkpoint.info):
            newer = {name: why for name, why in skipped.items() if _step_of(name) > checkpoint.step}
            return Checkpoint(checkpoint.path, checkpoint.step, checkpoint.info, is_verified=True), newer
        skipped[checkpoint.path.name] = _MISMATCH
    return None, skipped


def latest(folder: Union[Folder, Path]) -> Optional[Checkpoint]:
    """Return the newest complete checkpoint, None if there is none."""
    checkpoints = listed(folder)
    return checkpoints[-1] if checkpoints else None


def best(folder: Union[Folder, Path]) -> Optional[Checkpoint]:
    """Return the newest checkpoint that was the best one when it was written, None if there is none."""
    return next((checkpoint for checkpoint in reversed(listed(folder)) if checkpoint.is_best), None)


def load(checkpoint: Union[Checkpoint, Path, str]) -> Dict[str, Any]:
    """Read a checkpoint after verifying its checksum.

    Raises:
        RunError: The file is damaged, incomplete or has another format.
    """
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else Path(checkpoint)
    about = _read_description(path.with_suffix(".json"))
    if about is None or not path.is_file():
        raise RunError(_damaged(path, "there is no complete checkpoint of this name"))
    if about.get("format") != _FORMAT:
        raise RunError(_damaged(path, f"format {about.get('format')}; this ipurun reads {_FORMAT}"))
    is_verified = isinstance(checkpoint, Checkpoint) and checkpoint.is_verified
    if not is_verified and _digest_of(path) not in _checksums(about):
        raise RunError(_damaged(path, _MISMATCH))
    try:
        # Plain values and tensors only, so that a checkpoint from elsewhere cannot run code.
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise RunError(_damaged(path, f"{type(error).__name__}: {error}")) from error


def set_aside(folder: Union[Folder, Path], after: Optional[int]) -> List[str]:
    """Rename the checkpoints after a step, None for all, so that nothing resumes from them; return their names.

    Raises:
        RunError: A file cannot be renamed.
    """
    newer = [checkpoint for checkpoint in listed(folder) if after is None or checkpoint.step > after]
    try:
        for checkpoint in newer:
            # The description goes first, after which the rest is no longer a checkpoint.
            for file in (checkpoint.path.with_suffix(".json"), checkpoint.path):
                file.replace(file.with_name(_ASIDE + file.name))
    except OSError as error:
        fix = "check that the folder is writable"
        raise RunError("a checkpoint cannot be set aside", str(_place(folder)), seen=str(error), fix=fix) from error
    return [checkpoint.path.name for checkpoint in newer]


class _HashingWriter:
    """A writable file that computes its checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.written = 0

    def write(self, data: Any) -> int:
        block = bytes(data)
        self._hash.update(block)
        self._stream.write(block)
        self.written += len(block)
        return len(block)

    def flush(self) -> None:
        self._stream.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()


def _as_json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=2) + "\n"


def _checksums(about: Mapping[str, Any]) -> List[str]:
    """Return the checksums that the tensors of a description may have."""
    return [about.get("sha256", ""), *about.get(_REPLACED, ())]


def _visible_fault(tensors: Path, about: Mapping[str, Any]) -> str:
    """Return what is wrong with tensors as far as their size shows it; empty if nothing."""
    if not tensors.is_file():
        return "the file is missing"
    size, expected = tensors.stat().st_size, about.get("bytes")
    if size == expected or _REPLACED in about:
        return ""
    return f"it has {size} of {expected} bytes"


def _step_of(name: str) -> int:
    match = _NAME.fullmatch(f"{Path(name).stem}.json")
    return int(match.group(1)) if match else -1


def _remove_partial(place: Path) -> None:
    """Remove what a killed process left: half-written files, and tensors without a description."""
    for file in place.glob("step-*" + PARTIAL):
        file.unlink()
    for file in place.glob("step-*.pt"):
        if not file.with_suffix(".json").exists():
            file.unlink()


def _prune(place: Path, keep: int, keep_hours: Optional[float]) -> None:
    checkpoints = listed(place)
    favourite = best(place)
    for checkpoint in checkpoints[:-keep]:
        if favourite is not None and checkpoint.step == favourite.step:
            continue
        if keep_hours is not None and _age_hours(checkpoint) <= keep_hours:
            continue
        # The description goes first, after which the rest is no longer a checkpoint.
        checkpoint.path.with_suffix(".json").unlink()
        checkpoint.path.unlink()


def _age_hours(checkpoint: Checkpoint) -> float:
    saved = checkpoint.info.get("time") or checkpoint.path.stat().st_mtime  # older editions did not record it
    return (time.time() - float(saved)) / 3600


def _place(folder: Union[Folder, Path]) -> Path:
    return folder if isinstance(folder, Path) else folder.checkpoints


def _read_description(file: Path) -> Optional[Dict[str, Any]]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def _digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(_CHUNK), b""):
            found.update(block)
    return found.hexdigest()


def _save_problem(place: Path, step: int, error: BaseException) -> Problem:
    error = underlying_os_error(error)  # torch closes its file after a failed write, which fails as well
    seen = f"{type(error).__name__}: {error}"
    fix = "check that the folder is writable"
    if not place.parent.is_dir():
        return Problem(
            f"the folder of the run was deleted, so the checkpoint of step {step} could not be saved",
            where=str(place.parent),
            seen=seen,
            fix="start the run again; its earlier checkpoints are gone",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            seen += f"; {shutil.disk_usage(place).free / 2**20:.0f} MiB free"
        fix = "free some space or set runs_dir to another disk; checkpoint.keep=1 keeps fewer checkpoints"
    if listed(place):
        fix += f"; then ipurun train resume={place.parent}"
    return Problem(
        f"the checkpoint of step {step} could not be saved; earlier ones are intact",
        where=str(place),
        seen=seen,
        fix=fix,
    )


def _damaged(path: Path, seen: str) -> Problem:
    others = [checkpoint.path.name for checkpoint in listed(path.parent) if checkpoint.path != path]
    return Problem(
        f"the checkpoint {path.name} cannot be used",
        where=str(path.parent),
        seen=seen,
        known=f"other checkpoints: {', '.join(others)}" if others else "",
        fix=f"delete {path.name} and its .json to resume from {others[-1]}" if others else "start again without resume",
    )
