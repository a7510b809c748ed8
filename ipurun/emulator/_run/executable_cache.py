"""The executable cache: what compiling made, in a folder that processes share.

An entry is a captured graph as data (see `stored_graph`) with a checksum, and beside it a JSON file about it: versions,
compile time, size, last use. Its name has two parts: a digest of what is known before the model runs (options, constant
values of the optimizer, shapes, versions), and a digest of the traced forward pass. So a model is traced only if
there is an entry for the first part. A process locks the first part while it compiles; others wait and load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

from ipurun.emulator._capture.capture import Captured
from ipurun.emulator._capture.forward_trace import ForwardTrace, NotTraceableError, forward_digest, python_random_kept
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._executor.cache_files import (
    ENTRY,
    PARTIAL,
    CacheFile,
    Shelf,
    cache_versions,
    least_seconds,
    number,
)
from ipurun.emulator._logging import logger, native_logger
from ipurun.emulator._run import stored_graph

_SUBFOLDER = "cpu"  # PopART opens every file of the folder itself
_LOCK = ".lock"
_LEAST_SECONDS = 2.0  # tracing a model takes about one, mostly to load torch's kernels for meta tensors
# Options that may differ between runs of the same executable.
_RUN_TIME_OPTIONS = frozenset(
    [
        "cachePath",
        "connection_type",
        "distributed_process_id",
        "enableEngineCaching",
        "ipu_id",
        "ipu_version",
        "ipuof_configs",
        "log_dir",
        "max_repeat_logs",
        "random_seed",
    ]
)


@dataclass(frozen=True)
class CacheUse:
    """Result of the cache lookup of a compilation.

    Attributes:
        state: ``hit``, ``miss`` (compiled and stored), ``uncached`` (compiled and not stored), or ``off``.
        key: Name of the entry, "" if there is none.
        compile_seconds: How long compiling takes without the cache; None if unknown.
        saved_seconds: What a hit saved.
        why: Why nothing was stored.
    """

    state: str
    key: str = ""
    compile_seconds: Optional[float] = None
    saved_seconds: Optional[float] = None
    why: str = ""


_description: Dict[str, Any] = {}


@contextlib.contextmanager
def described(about: Mapping[str, Any]) -> Iterator[None]:
    """Add information to the files about the entries that are stored meanwhile."""
    before = dict(_description)
    _description.update(about)
    try:
        yield
    finally:
        _description.clear()
        _description.update(before)


class Slot:
    """The place of a program in the cache.

    Args:
        folder: The folder of the entries, None without a cache.
        key: The digest of what is known before the model runs.
        training: Whether the program trains.
    """

    def __init__(self, folder: Optional[str], key: str, training: bool) -> None:
        self.folder = folder
        self._key = key
        self._training = training
        self._digest = ""
        self.use = CacheUse("off" if folder is None else "uncached")

    def look_up(self, trace: Callable[[], ForwardTrace]) -> Optional[ForwardTrace]:
        """Return the trace of the forward pass if there is an entry for it, which `use` then names."""
        if self.folder is None:
            return None
        self.use = CacheUse("miss")
        if not self._candidates():
            return None
        with python_random_kept() as restore_random:
            try:
                traced = trace()
            except Exception as error:  # of the user's code, or of a kernel that meta tensors lack
                restore_random()
                self._skip(f"the model cannot be traced: {_first_line(error)}")
                return None
            self._digest = traced.digest
            if not os.path.exists(self._file.path):
                restore_random()  # the model runs again
                return None
        self.use = CacheUse("hit", self._name, number(self._file.about.get("compile_seconds")))
        return traced

    def load(self, trace: Callable[[], ForwardTrace]) -> Optional[Captured]:
        """Return the program from the cache, None if it has to be captured."""
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        traced = self.look_up(trace)
        if traced is None:
            return None
        try:
            captured = stored_graph.from_data(self._file.read(), traced)
        except (OSError, ValueError, stored_graph.NotStorableError) as error:
            self._file.set_aside(str(error))
            self.use = CacheUse("miss", why=f"the stored executable is damaged: {error}")
            return None
        before = self.use.compile_seconds
        saved = None if before is None else before - (time.perf_counter() - begun)
        self.use = CacheUse("hit", self._name, before, saved)
        self._file.count_hit(time.thread_time() - cpu_begun, self._about)
        native_logger.info("Found the executable in the cache: %s", self._file.path)
        return captured

    def observe(self, recorder: Recorder, returned: Any) -> None:
        """Find the digest of a forward pass that is being captured."""
        if self.folder is None or self.use.state == "uncached":
            return
        try:
            self._digest = forward_digest(recorder, list(tensors_in(returned)))
        except NotTraceableError as error:
            self._skip(str(error))

    def prepare(self, captured: Captured) -> Optional[Dict[str, Any]]:
        """Return a captured program as data, before anything changes its graph; None if it will not be stored."""
        if self.folder is None or self.use.state != "miss":
            return None
        try:
            return stored_graph.to_data(captured)
        except stored_graph.NotStorableError as error:
            self._skip(str(error))
            return None

    def store(self, data: Optional[Dict[str, Any]], seconds: float, cpu_seconds: float) -> None:
        """Write a program that took this long to compile, and this much CPU time, if loading it will be quicker."""
        if data is None:
            return
        least = least_seconds(_LEAST_SECONDS)
        if cpu_seconds < least:
            self._skip(f"compiling takes less than {least:g} s")
            return
        try:
            self._file.write(data, {**self._about, "compile_seconds": seconds}, cpu_seconds)
        except OSError as error:  # such as a full disk: the program itself does not need the file
            logger.warning("The executable could not be saved to the cache: %s", error)
            self._skip(str(error))
            return
        self.use = CacheUse("miss", self._name, seconds, why=self.use.why)
        native_logger.info("Saved the executable to the cache: %s", self._file.path)

    @property
    def shelf(self) -> Optional[Shelf]:
        """Return where the program stores what it makes later, None without a cache."""
        return None if self.folder is None else Shelf(self.folder, self._about)

    @property
    def _about(self) -> Dict[str, Any]:
        return {**_description, "mode": "training" if self._training else "inference"}

    @property
    def _name(self) -> str:
        return f"{self._key}-{self._digest[:16]}"

    @property
    def _file(self) -> CacheFile:
        assert self.folder is not None
        return CacheFile(self.folder, self._name)

    def _candidates(self) -> List[str]:
        assert self.folder is not None
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        return [name for name in names if name.startswith(f"{self._key}-") and name.endswith(ENTRY)]

    def _skip(self, why: str) -> None:
        self.use = CacheUse("uncached", why=why)
        logger.debug("The executable is not cached: %s", why)


class ExportSlot(Slot):
    """The place of a program in an exported file.

    Args:
        options: The executor's options.
        training: Whether the program trains.
        program: What the file holds of it; None to find that out.
    """

    def __init__(self, options: Any, training: bool, program: Optional[Mapping[str, Any]] = None) -> None:
        super().__init__(None, hashlib.sha256(repr(_compiled_options(options)).encode()).hexdigest(), training)
        self.program = program

    def load(self, trace: Callable[[], ForwardTrace]) -> Optional[Captured]:
        if self.program is None:
            return None
        with python_random_kept() as restore_random:
            try:
                if self.program["options"] != self._key:
                    raise stored_graph.NotStorableError("it was compiled with other options")
                traced = trace()
                if traced.digest != self.program["digest"]:
                    raise stored_graph.NotStorableError("its forward pass is another one")
                return stored_graph.from_data(self.program["graph"], traced)
            except Exception as error:  # of the user's code, or of a kernel that meta tensors lack
                restore_random()
                logger.warning("The exported program is compiled again: %s", _first_line(error))
                self.program = None
        return None

    def observe(self, recorder: Recorder, returned: Any) -> None:
        with contextlib.suppress(NotTraceableError):
            self._digest = forward_digest(recorder, list(tensors_in(returned)))

    def prepare(self, captured: Captured) -> Optional[Dict[str, Any]]:
        if self.program is None and self._digest:
            with contextlib.suppress(stored_graph.NotStorableError):
                self.program = {
                    "options": self._key,
                    "digest": self._digest,
                    "graph": stored_graph.to_data(captured),
                }
        return None


def find_slot(options: Any, training: bool, known: Sequence[Any]) -> Slot:
    """Return the place of a program in the cache folder of the options, without locking it.

    Args:
        options: The executor's options.
        training: Whether the program trains.
        known: What else the executable depends on: its repr is a part of the key.
    """
    folder = _folder(options)
    if folder is None:
        return Slot(None, "", training)
    text = repr((sorted(cache_versions().items()), training, _compiled_options(options), known))
    return Slot(os.path.join(folder, _SUBFOLDER), hashlib.sha256(text.encode()).hexdigest()[:16], training)


def _compiled_options(options: Any) -> List[Any]:
    """Return the options that an executable depends on."""
    return sorted((key, repr(value)) for key, value in options.toDict().items() if key not in _RUN_TIME_OPTIONS)


@contextlib.contextmanager
def locked(slot: Slot) -> Iterator[None]:
    """Let one process at a time load or compile the programs of a slot.

    The lock is the kernel's and ends with its process, however that ends; the file itself means nothing.
    """
    folder = slot.folder
    if folder is None:
        yield
        return
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        file = open(os.path.join(folder, slot._key + _LOCK), "a", encoding="utf-8")  # noqa: SIM115  # closed below
    except OSError as error:
        logger.debug("The executable cache is not locked: %s", error)
        yield
        return
    with file:
        _wait_for(file)
        _remove_partial(folder, slot._key)
        yield


def _wait_for(file: Any) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("Waiting for another process that compiles the same program")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # a file system without locks
        logger.debug("The executable cache is not locked: %s", error)


def _remove_partial(folder: str, key: str) -> None:
    """Remove what a process left that was killed while it wrote; nobody else writes while the lock is held."""
    for name in os.listdir(folder):
        if name.startswith(key) and name.endswith(PARTIAL):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, name))


@contextlib.contextmanager
def cache_lock(model: Any, options: Any) -> Iterator[None]:
    """Let one process of a distributed program compile at a time, so that others can reuse its executable."""
    if options.Distributed.numProcesses < 2:
        yield
        return
    folder = _folder(options)
    if folder is None:
        logger.warning(
            "Every process compiles the model: use poptorch.Options().enableExecutableCaching to compile once."
        )
        yield
        return
    os.makedirs(folder, exist_ok=True)
    name = hashlib.md5(repr(model).encode()).hexdigest()
    with open(os.path.join(folder, f"{name}.lock"), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        logger.debug("Process %d: cache file locked", options.Distributed.processId)
        try:
            yield
        finally:
            logger.debug("Process %d: released the cache lock", options.Distributed.processId)
            fcntl.flock(file, fcntl.LOCK_UN)


def _folder(options: Any) -> Optional[str]:
    settings = options._Popart.options
    return settings.get("cachePath") if settings.get("enableEngineCaching", False) else None


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
