"""The state of a sweep on disk, so that the same command can resume it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Union

from ipurun.config.compose import Point, to_yaml
from ipurun.config.schema import SweepConfig
from ipurun.errors import ConfigError
from ipurun.files import write_atomically

__all__ = [
    "ENDED",
    "FAILED",
    "FINISHED",
    "INTERRUPTED",
    "PENDING",
    "PRUNED",
    "RUNNING",
    "Ledger",
    "Record",
    "find_earlier",
    "point_id",
]

PENDING = "pending"
RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"
INTERRUPTED = "interrupted"
PRUNED = "pruned"  # ended early, as what it had reached was worse than other points
ENDED = (FINISHED, PRUNED)  # with results: not run again
_FILE_NAME = "manifest.json"
# Words of a command that do not change what is searched.
_OF_THE_RUN = (
    "resume=",
    "sweep.",
    "hydra.sweeper.n_trials=",
    "hydra.sweeper.n_jobs=",
    "hydra.launcher.",
    "hydra/launcher=",
)


@dataclass
class Record:
    """One point of a sweep and its result.

    Args:
        id: Identity of its config, apart from `resume` and `sweep`.
        index: Position in the sweep, from 0.
        name: Name of the run.
        swept: Swept key -> value, as text.
        overrides: The overrides to run this point alone.
        status: One of the constants above.
        reason: Why it failed, in one line.
        folder: Its run folder.
        results: Metrics and times of its summary.
        at_once: The most points that ran at the same time as this one, itself included.
        job: How a batch system calls its job.
        trial: Its number in an Optuna study.
    """

    id: str
    index: int
    name: str
    swept: Dict[str, str]
    overrides: List[str]
    status: str = PENDING
    reason: str = ""
    folder: Optional[str] = None
    results: Dict[str, Any] = field(default_factory=dict)
    at_once: int = 1
    job: Optional[str] = None
    trial: Optional[int] = None


class Ledger:
    """The records of a sweep and the folder they are kept in."""

    def __init__(
        self, folder: Union[str, Path], argv: Sequence[str], records: Iterable[Record], started: Optional[float] = None
    ) -> None:
        self.folder = Path(folder)
        self.argv = list(argv)
        self.records = list(records)
        self.started = time.time() if started is None else started  # or resumed; in seconds since 1970

    def save(self) -> None:
        """Write the records."""
        document = {"argv": self.argv, "started": self.started, "points": [asdict(record) for record in self.records]}
        self.write(_FILE_NAME, json.dumps(document, indent=2, default=str) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file of the sweep folder."""
        write_atomically(self.folder / name, text)

    @classmethod
    def load(cls, folder: Union[str, Path]) -> Ledger:
        """Read the ledger of a sweep folder.

        Raises:
            ConfigError: If the folder does not have a readable ledger.
        """
        path = Path(folder) / _FILE_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            records = [Record(**point) for point in document["points"]]
            return cls(folder, document["argv"], records, float(document.get("started", 0.0)))
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ConfigError(
                f"`{folder}` is not a sweep folder",
                where="resume",
                seen=f"{path}: {err}",
                fix="use the folder that the sweep printed, or resume=auto",
            ) from err

    def adopt(self, earlier: Ledger) -> None:
        """Copy the status and results of points that an earlier sweep also has."""
        known = {record.id: record for record in earlier.records}
        for place, record in enumerate(self.records):
            before = known.get(record.id)
            if before is not None:
                self.records[place] = replace(
                    before, index=record.index, swept=record.swept, overrides=record.overrides
                )

    @property
    def unfinished(self) -> List[Record]:
        return [record for record in self.records if record.status not in ENDED]


def find_earlier(sweeps: Sequence[Path], ids: Sequence[str]) -> Optional[Ledger]:
    """Return the sweep below some folders that has points in common with these and was started or resumed last."""
    return _newest(sweeps, lambda ledger: bool(set(ids) & {record.id for record in ledger.records}))


def find_same_command(sweeps: Sequence[Path], argv: Sequence[str]) -> Optional[Ledger]:
    """Return the search below some folders that was started or resumed last with the same command.

    Where points run, how many, and how many trials there are may differ.
    """
    return _newest(sweeps, lambda ledger: _searched(ledger.argv) == _searched(argv))


def _newest(sweeps: Sequence[Path], is_wanted: Callable[[Ledger], bool]) -> Optional[Ledger]:
    found: List[Ledger] = []
    for path in (path for folder in sweeps for path in folder.glob(f"*/{_FILE_NAME}")):
        with contextlib.suppress(ConfigError):
            found.append(Ledger.load(path.parent))
    wanted = [ledger for ledger in found if is_wanted(ledger)]
    wanted.sort(key=lambda ledger: (ledger.started, ledger.folder.name))
    return wanted[-1] if wanted else None


def _searched(argv: Sequence[str]) -> List[str]:
    return sorted(
        word for word in argv if not word.lstrip("+").startswith(_OF_THE_RUN) and word not in ("-m", "--multirun")
    )


def point_id(point: Point) -> str:
    """Return the identity of a point: a hash of its config without secrets and the keys that only concern the sweep."""
    bare = replace(point.config, resume=None, sweep=SweepConfig())
    hidden = {key: text for key, text in point.hidden.items() if key not in point.swept}
    return hashlib.sha256(to_yaml(bare, hidden).encode()).hexdigest()[:16]
