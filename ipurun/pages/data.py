"""Readers of run and sweep folders for pages and tables; folders may be in use, damaged or copied from elsewhere.

Nothing here raises for a file that is missing or damaged: what can be read is shown, and what is wrong is named.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ipurun.errors import ConfigError, nearest
from ipurun.runs.folder import RunFolder
from ipurun.runs.lock import is_held
from ipurun.sweep.ledger import INTERRUPTED, PENDING, RUNNING, Ledger, Record
from ipurun.sweep.table import Ranking, rank

__all__ = [
    "Curve",
    "RunData",
    "SweepData",
    "TITLES",
    "age_text",
    "curves_of",
    "find",
    "flat",
    "is_sweep",
    "number",
    "read_run",
    "read_sweep",
    "read_text",
    "runs_below",
    "size_of",
]

TITLES = {"lr": "learning rate", "samples_per_second": "samples/s", "data_wait": "time waiting for data, %"}
_NOT_METRICS = {"split", "step", "call", "epoch", "samples", "time", "seconds", "is_best"}
_RECENT = 200  # records, for the speed of a run in progress
_LARGEST_LOG = 4_000_000  # bytes of its end that are read
_RESUMED = re.compile(r"^resuming after step ([\d,]+), from ")
_ROLLED_BACK = re.compile(r"^warning: (.*); back to step ([\d,]+), from ")


@dataclass(frozen=True)
class Curve:
    """The values of one quantity over steps.

    Args:
        split: ``train`` or the name of a split.
        name: Name of the quantity: ``loss``, ``lr``, a metric.
        steps: Weight updates, ascending.
        values: The values; NaN or infinite where the run's were.
    """

    split: str
    name: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclass
class RunData:
    """One run folder.

    Args:
        folder: Its path.
        status: ``running``, ``finished``, ``interrupted``, ``failed`` or ``killed`` (no summary and nobody runs it).
        summary: How it ended; empty while it runs.
        env: Versions, machine, git state.
        config: The resolved config as nested data.
        origins: Key -> where it was set.
        overrides: What was typed.
        records: The lines of metrics.jsonl.
        resumes: Steps after which it was resumed, as its log says.
        rollbacks: Steps to which it returned, with the reasons.
        faults: Files that could not be read, and why.
    """

    folder: Path
    status: str = "killed"
    summary: Dict[str, Any] = field(default_factory=dict)
    env: Dict[str, Any] = field(default_factory=dict)
    config: Dict[str, Any] = field(default_factory=dict)
    origins: Dict[str, str] = field(default_factory=dict)
    overrides: List[str] = field(default_factory=list)
    records: List[Dict[str, Any]] = field(default_factory=list)
    resumes: List[int] = field(default_factory=list)
    rollbacks: List[Tuple[int, str]] = field(default_factory=list)
    faults: List[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.summary.get("name") or self.config.get("name") or self.folder.parent.name)

    @property
    def label(self) -> str:
        """A name that tells it from its neighbours: that of the run, and the folder's."""
        return f"{self.name} {self.folder.name}"

    @property
    def recipes(self) -> List[str]:
        """Recipes that were typed."""
        return [word.partition("=")[2] for word in self.overrides if word.lstrip("+").startswith("recipe=")]

    @property
    def started(self) -> Optional[float]:
        """Time of the last start or resume, in seconds since 1970."""
        return number(self.env.get("started")) or RunFolder(self.folder).last_started or None

    @property
    def monitor(self) -> Optional[str]:
        """Name of the monitored metric; before the end of a run, as evaluation chooses it: its first metric."""
        found = self.summary.get("monitor") or self.config.get("monitor")
        if not found:
            names = next((list(record) for record in self.records if "is_best" in record), [])
            metrics = [name for name in names if name not in _NOT_METRICS and name != "loss"]
            found = metrics[0] if metrics else "loss" if names else None
        return str(found) if found else None

    @property
    def progress(self) -> Optional[float]:
        """Share of the epochs or steps that are done, None if the config says neither."""
        last: Mapping[str, Any] = self.records[-1] if self.records else {}
        pairs = (("epoch", self.config.get("epochs")), ("step", self.config.get("max_steps")))
        shares = [(number(last.get(name)) or 0.0) / total for name, end in pairs for total in [number(end)] if total]
        return min(1.0, max(shares)) if shares else None

    @property
    def eta_seconds(self) -> Optional[float]:
        """Seconds to the end of a run in progress, at the speed of its last records."""
        recent = self.records[-_RECENT:]
        share = self.progress
        if self.status != "running" or not share or len(recent) < 2:
            return None
        steps, times = ([number(record.get(name)) for record in (recent[0], recent[-1])] for name in ("step", "time"))
        if None in steps or None in times or not steps[0] < steps[1]:  # type: ignore[operator]
            return None
        left = self.step * (1 - share) / share
        return left * max(0.0, times[1] - times[0]) / (steps[1] - steps[0])  # type: ignore[operator]

    @property
    def best(self) -> Optional[float]:
        """The best value of the monitored metric so far."""
        if number(self.summary.get("best")) is not None:
            return number(self.summary["best"])
        marked = [record for record in self.records if record.get("is_best") is True]
        return number(marked[-1].get(self.monitor or "loss")) if marked else None

    @property
    def step(self) -> int:
        """Weight updates done."""
        stored = number(self.summary.get("step"))
        last = number(self.records[-1].get("step")) if self.records else None
        return int(max(stored or 0, last or 0))

    @property
    def samples_per_second(self) -> Optional[float]:
        """Mean throughput; while it runs, of the last records."""
        stored = number(self.summary.get("samples_per_second"))
        if stored:
            return stored
        recent = [number(record.get("samples_per_second")) for record in self.records[-50:]]
        known = [speed for speed in recent if speed]
        return sum(known) / len(known) if known else None

    @property
    def total_seconds(self) -> Optional[float]:
        """Wall time of its last process."""
        stored = self.summary.get("seconds")
        return number(stored.get("total")) if isinstance(stored, dict) else None

    @property
    def reason(self) -> str:
        """Why it failed or stopped early."""
        return str(self.summary.get("reason") or self.summary.get("stop_reason") or "")

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of its log."""
        return "\n".join(_end_of(self.folder / "log.txt").splitlines()[-lines:])


@dataclass
class SweepData:
    """One sweep folder with its points, best first."""

    folder: Path
    argv: List[str]
    ranking: Ranking
    is_running: bool
    started: float

    @property
    def records(self) -> List[Record]:
        """All points, best first, those that did not finish at the end."""
        return self.ranking.records

    @property
    def is_complete(self) -> bool:
        """Whether no point is left to run."""
        return not any(record.status in (PENDING, RUNNING, INTERRUPTED) for record in self.records)

    @property
    def keys(self) -> List[str]:
        """The swept keys."""
        return list(dict.fromkeys(key for record in self.records for key in record.swept))

    def folder_of(self, record: Record) -> Optional[Path]:
        """Return the run folder of a point: where the sweep is now, or where it was written down."""
        named = Path(record.folder).name if record.folder else f"{record.index:03d}"
        for candidate in (self.folder / named, Path(record.folder or "/nowhere")):
            if (candidate / "config.yaml").is_file():
                return candidate
        return None


def number(value: Any) -> Optional[float]:
    """Return a value of a file as a number: NaN and infinity are stored as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / "manifest.json").is_file()


def find(path: Union[str, Path]) -> Path:
    """Return the folder of a run or a sweep.

    Raises:
        ConfigError: There is none, or it was written by a newer ipurun.
    """
    folder = Path(path)
    try:
        if is_sweep(folder):
            return folder
        if (folder / "config.yaml").is_file():
            return RunFolder.open(folder).path
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("not the path of a run", seen=str(error)[:200], fix="ipurun runs ls") from error
    names = [str(found) for found in runs_below(Path("runs"))] if folder.name else []
    close = [name for name in names if folder.name and folder.name in name] or nearest(str(path), names)
    seen = "no config.yaml and no manifest.json in it" if folder.is_dir() else "no such folder"
    raise ConfigError(
        f"`{path}` is not the folder of a run or a sweep", seen=seen, known=", ".join(close[-5:]), fix="ipurun runs ls"
    )


def runs_below(folder: Path, most_deep: int = 6) -> List[Path]:
    """Return the folders of runs and sweeps below a folder, sorted; points of sweeps are left out."""
    found: List[Path] = []
    for where, folders, files in os.walk(str(folder)):
        if "manifest.json" in files or ("config.yaml" in files and ("env.json" in files or "plan.txt" in files)):
            found.append(Path(where))
            folders.clear()
        elif len(Path(where).relative_to(folder).parts) >= most_deep:
            folders.clear()
        folders.sort()
    return found


def read_run(folder: Path, with_metrics: bool = True) -> RunData:
    """Read the files of a run.

    Args:
        folder: The run folder.
        with_metrics: Whether to read metrics.jsonl and log.txt, which may be long.
    """
    run = RunData(folder)
    run.summary = _json(folder / "summary.json", run.faults, is_needed=False)
    run.env = _json(folder / "env.json", run.faults)
    config = _yaml(folder / "config.yaml", run.faults)
    run.config = config if isinstance(config, dict) else {}
    origins = _yaml(folder / "origins.yaml", run.faults, is_needed=False)
    run.origins = {str(key): str(where) for key, where in origins.items()} if isinstance(origins, dict) else {}
    overrides = _yaml(folder / "overrides.yaml", run.faults, is_needed=False)
    run.overrides = [str(word) for word in overrides] if isinstance(overrides, list) else []
    run.status = _status(folder, run.summary)
    if with_metrics:
        run.records = list(_records(folder / "metrics.jsonl", run.faults))
        for line in _end_of(folder / "log.txt").splitlines():
            resumed, rolled = _RESUMED.match(line), _ROLLED_BACK.match(line)
            if resumed:
                run.resumes.append(int(resumed[1].replace(",", "")))
            elif rolled:
                run.rollbacks.append((int(rolled[2].replace(",", "")), rolled[1]))
    return run


def read_sweep(folder: Path) -> SweepData:
    """Read the files of a sweep.

    Raises:
        ConfigError: Its manifest cannot be read.
    """
    ledger = Ledger.load(folder)
    document = _json(folder / "sweep.json", [], is_needed=False)
    ranking = rank(ledger.records, str(document["ranked_by"]) if document.get("ranked_by") else None)
    return SweepData(folder, [str(word) for word in ledger.argv], ranking, is_held(folder), ledger.started)


def curves_of(run: RunData) -> List[Curve]:
    """Return every quantity of a run over its steps."""
    found: Dict[Tuple[str, str], Tuple[List[float], List[float]]] = {}
    for record in run.records:
        step, split = number(record.get("step")), str(record.get("split"))
        if step is None:
            continue
        for name, stored in record.items():
            value = None if name in _NOT_METRICS else number(stored)
            if value is not None:
                steps, values = found.setdefault((split, str(name)), ([], []))
                steps.append(step)
                values.append(value)
    return [Curve(split, name, steps, values) for (split, name), (steps, values) in found.items()]


def flat(config: Any, path: str = "") -> Dict[str, Any]:
    """Return nested config as dotted keys with single values."""
    if isinstance(config, Mapping) and config:
        found: Dict[str, Any] = {}
        for key, inner in config.items():
            found.update(flat(inner, f"{path}.{key}" if path else str(key)))
        return found
    return {path: config} if path else {}


def _status(folder: Path, summary: Mapping[str, Any]) -> str:
    if is_held(folder):
        return "running"
    known = {"done": "finished", "interrupted": "interrupted", "failed": "failed"}
    return known.get(str(summary.get("status")), "killed")


def read_text(path: Path, most: Optional[int] = None) -> str:
    """Return the text of a plain file, or its end if it is longer.

    A run folder may come from elsewhere: a link could point at any file of the reader, and a pipe would never end.

    Raises:
        OSError: It cannot be read, or it is not a plain file.
    """
    descriptor = os.open(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if most is not None:
            stream.seek(max(0, os.fstat(descriptor).st_size - most))
        return stream.read().decode("utf-8", "replace")


def _json(path: Path, faults: List[str], is_needed: bool = True) -> Dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        if is_needed:
            faults.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{path.name} cannot be read: {str(error)[:100]}")
        return {}
    if not isinstance(found, dict):
        faults.append(f"{path.name} is not a JSON object")
        return {}
    return found


def _yaml(path: Path, faults: List[str], is_needed: bool = True) -> Any:
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return yaml.load(read_text(path), Loader=loader)
    except FileNotFoundError:
        if is_needed:
            faults.append(f"{path.name} is missing")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        faults.append(f"{path.name} cannot be read: {str(error)[:100]}")
    return None


def _records(path: Path, faults: List[str]) -> Iterator[Dict[str, Any]]:
    damaged = 0
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        faults.append(f"{path.name} cannot be read: {error.strerror}")
        return
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(record, dict):
            yield record
    if damaged > 1:  # the last line may be half written during a run
        faults.append(f"{path.name}: {damaged} lines are not JSON and were left out")


def _end_of(path: Path) -> str:
    try:
        return read_text(path, _LARGEST_LOG)
    except OSError:
        return ""


def size_of(folder: Path) -> int:
    """Return the bytes of a folder on disk."""
    total = 0
    for where, _, files in os.walk(str(folder)):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


def age_text(then: Optional[float]) -> str:
    """Return a moment as local time, or ``-``."""
    if not then or not math.isfinite(then) or not 0 < then < 1e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(then))
