"""The folder of one run: its files, making a new one, and finding the newest one."""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Union

from ipurun import __version__
from ipurun.config.secrets import is_secret_file
from ipurun.errors import ConfigError, Problem
from ipurun.files import write_atomically
from ipurun.log.plan_text import plan_lines

if TYPE_CHECKING:
    from ipurun.config.compose import Point
    from ipurun.config.schema import RunConfig
    from ipurun.engine import Engine
    from ipurun.planning.plan import Plan

__all__ = ["RunFolder", "check_writable", "find_latest", "git_diff", "git_state", "new_folder", "timestamp", "versions"]


_SCHEMA = 2  # version of the files of a run folder; 1 lacks `origins.yaml` and has paths of modules that have moved
_TIMESTAMP = "%Y-%m-%d_%H-%M-%S"
_TIMESTAMP_LENGTH = 19


class RunFolder:
    """The files of one run. `create` makes a new folder, `open` takes one that exists.

    Args:
        path: The folder, relative or absolute, as the user would type it.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config_file(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def overrides_file(self) -> Path:
        """The overrides that were typed, as a YAML list."""
        return self.path / "overrides.yaml"

    @property
    def origins_file(self) -> Path:
        """The keys that were typed or written, with where, as a YAML mapping."""
        return self.path / "origins.yaml"

    @property
    def plan_file(self) -> Path:
        """The plan as `ipurun plan` prints it."""
        return self.path / "plan.txt"

    @property
    def initial_weights_file(self) -> Path:
        """Record of the weights that `init_from` loaded and skipped, with reasons."""
        return self.path / "initial_weights.json"

    @property
    def env_file(self) -> Path:
        """Versions, machine and git state."""
        return self.path / "env.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON object per line: training and evaluation metrics."""
        return self.path / "metrics.jsonl"

    @property
    def log_file(self) -> Path:
        """Everything that was shown, and the tracebacks that the terminal did not show."""
        return self.path / "log.txt"

    def instance_log(self, rank: int) -> Path:
        """Return the log of one of several processes; what the first shows is in `log_file`."""
        return self.path / "logs" / f"instance-{rank}.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary_file(self) -> Path:
        """Summary of the run."""
        return self.path / "summary.json"

    @classmethod
    def create(cls, config: RunConfig, point: Point, plan: Plan, engine: Engine) -> RunFolder:
        """Make a new folder and write down what is going to run.

        Args:
            config: The resolved config.
            point: Where the config came from; its `run_dir` overrides runs/<name>/<timestamp>.
            plan: The plan, stored as text.
            engine: The engine, for its version.

        Raises:
            ConfigError: The folder cannot be written.
        """
        wanted = Path(point.run_dir) if point.run_dir else Path(config.runs_dir) / slug(plan.name) / timestamp()
        folder = cls(new_folder(wanted))
        try:
            folder.checkpoints.mkdir()
            folder.describe(config, point, plan, engine)
        except OSError as err:  # a full disk, most likely
            folder.discard()
            raise ConfigError(_unwritable(wanted, str(err))) from err
        return folder

    def describe(self, config: RunConfig, point: Point, plan: Plan, engine: Engine) -> None:
        """Write down what is going to run; a resumed run may have other keys than when it began."""
        from ipurun.config.compose import to_yaml
        from ipurun.config.schema import canonical_precision

        # `resume` says how this process began and is not part of the run: a stored run never points at another.
        words = [word for word in point.overrides if not word.lstrip("+").startswith("resume=")]
        stored = replace(config, resume=None, precision=canonical_precision(config.precision))
        texts = {
            self.config_file: to_yaml(stored, point.hidden),
            self.overrides_file: _yaml(words),
            self.plan_file: "\n".join(plan_lines(plan)) + "\n",
            self.env_file: json.dumps(_environment(engine, plan), indent=2) + "\n",
        }
        if point.given is not None:
            texts[self.origins_file] = _yaml(dict(point.given))
        if plan.initial_weights is not None:
            texts[self.initial_weights_file] = json.dumps(asdict(plan.initial_weights), indent=2) + "\n"
        difference = git_diff()
        if difference:
            texts[self.path / "git.diff"] = difference
        for path, text in texts.items():
            write_atomically(path, point.without_secrets(text))

    @contextmanager
    def described_as(self, config: RunConfig, point: Point, plan: Plan, engine: Engine) -> Iterator[None]:
        """Describe the run for what happens inside; if that fails before it saves, put the old description back.

        A run whose config belongs to another model could no longer be evaluated or resumed.
        """
        files = (self.config_file, self.overrides_file, self.origins_file, self.plan_file, self.env_file)
        before = {path: path.read_bytes() for path in files if path.is_file()}
        saved = set(self.checkpoints.glob("*.json"))
        self.describe(config, point, plan, engine)
        try:
            yield
        except BaseException:
            if set(self.checkpoints.glob("*.json")) == saved:
                for path in files:
                    if path in before:
                        write_atomically(path, before[path])
                    elif path.is_file():
                        path.unlink()
            raise

    @classmethod
    def open(cls, path: Union[str, Path]) -> RunFolder:
        """Take an existing run folder.

        Raises:
            ConfigError: There is no run in it, or one of a newer version.
        """
        folder = cls(path)
        if _unusable_path(path):
            fix = "give the folder that a run printed"
            raise ConfigError("not the path of a run folder", seen=_unusable_path(path), fix=fix, key="resume")
        if folder.config_file.is_file():
            if folder.schema > _SCHEMA:
                raise ConfigError(
                    f"the run folder `{path}` was written by a newer ipurun",
                    str(folder.env_file),
                    seen=f"schema {folder.schema}; ipurun {__version__} reads up to schema {_SCHEMA}",
                    fix="install a newer ipurun",
                )
            return folder
        what = f"`{path}` is not a run folder"
        seen = "no config.yaml in it" if folder.path.is_dir() else "no such folder"
        if folder.path.is_file():
            seen = "a file"
        runs = [str(run) for run in _runs_in(folder.path)] or [run.name for run in _runs_in(folder.path.parent)]
        inside = next((above for above in folder.path.parents if cls(above).config_file.is_file()), None)
        fix = "give the folder that a run printed" if inside is None else f"give the run folder: {inside}"
        raise ConfigError(what, seen=seen, known=", ".join(runs[-5:]), fix=fix, key="resume")

    @property
    def schema(self) -> int:
        """Version of the files: 1 where none is written down."""
        try:
            return int(json.loads(self.env_file.read_text(encoding="utf-8"))["schema"])
        except (OSError, ValueError, TypeError, KeyError):
            return 1

    def overrides(self) -> List[str]:
        """Return what was typed to start this run."""
        stored = self._stored(self.overrides_file, list, "only what was typed is unknown then")
        return [str(word) for word in stored or ()]

    def origins(self) -> Optional[Dict[str, str]]:
        """Return the keys that were set when this run started, with where; None in a folder of the first edition.

        Raises:
            ConfigError: The file is damaged.
        """
        stored = self._stored(self.origins_file, dict, "keys that differ from their defaults then count as set")
        return None if stored is None else {str(key): str(origin) for key, origin in stored.items()}

    def _stored(self, file: Path, kind: type, without: str) -> Any:
        """Read a YAML file of what was typed, where `${...}` is text; None if there is none."""
        if not file.is_file():
            return None
        stored = _load_yaml(file)
        if not isinstance(stored, kind):
            wanted = "mapping of keys" if kind is dict else "list of overrides"
            raise ConfigError(f"not a YAML {wanted}", str(file), fix=f"delete it: {without}")
        return stored

    def summary(self) -> Dict[str, Any]:
        """Return how the run ended; empty while it runs or when it was killed."""
        try:
            return dict(json.loads(self.summary_file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store how the run ended."""
        write_atomically(self.summary_file, json.dumps(summary, indent=2, default=str) + "\n")

    @property
    def last_started(self) -> float:
        """Time of the last start or resume, in seconds since 1970; earlier versions recorded only the name."""
        try:
            return float(json.loads(self.env_file.read_text(encoding="utf-8"))["started"])
        except (OSError, ValueError, TypeError, KeyError):
            pass
        try:
            return datetime.datetime.strptime(self.path.name[:_TIMESTAMP_LENGTH], _TIMESTAMP).timestamp()
        except ValueError:
            return 0.0

    @property
    def finished(self) -> bool:
        """Whether the run reached its planned end."""
        return self.summary().get("status") == "done"

    def discard(self) -> None:
        """Remove the folder, and folders above it that are empty then."""
        shutil.rmtree(self.path)
        for parent in list(self.path.parents)[:2]:
            if parent == Path() or any(parent.iterdir()):
                return
            parent.rmdir()

    def log(self, text: str) -> None:
        """Append lines to the log."""
        with self.log_file.open("a", encoding="utf-8") as stream:
            stream.write(text.rstrip("\n") + "\n")


def find_latest(runs_dir: Union[str, Path], name: str) -> Optional[RunFolder]:
    """Return the run of a name for ``resume=auto``: of those with a checkpoint that have not reached their planned end,
    the one that was started or resumed last.

    Args:
        runs_dir: The folder of all runs.
        name: The name of the run.
    """
    from ipurun.checkpoint import latest  # deferred: it loads torch

    candidates = [RunFolder(file.parent) for file in (Path(runs_dir) / slug(name)).glob("*/config.yaml")]
    candidates.sort(key=lambda folder: (folder.last_started, folder.path.name), reverse=True)
    return next((folder for folder in candidates if not folder.finished and latest(folder) is not None), None)


def timestamp() -> str:
    """Return the local time as a folder name that sorts."""
    return datetime.datetime.now().strftime(_TIMESTAMP)


def slug(name: str) -> str:
    """Return the name of a run as a folder name."""
    return re.sub(r"[^\w.+=,@-]+", "_", name).strip(".") or "run"


def new_folder(wanted: Path) -> Path:
    """Make a folder that did not exist: the wanted name, or the name followed by -2, -3, ...

    Raises:
        ConfigError: It cannot be made.
    """
    number = 1
    while True:
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                raise ConfigError(_unwritable(wanted, f"{path} is a file")) from None
            number += 1
        except OSError as err:
            raise ConfigError(_unwritable(wanted, str(err))) from err


def check_writable(runs_dir: Union[str, Path]) -> List[Problem]:
    """Return what would keep a run folder from being made, without making anything."""
    if not str(runs_dir):
        return [
            Problem("`runs_dir` is empty", fix="runs_dir=runs, or runs_dir=. for the working folder", key="runs_dir")
        ]
    wanted = Path(runs_dir)
    if _unusable_path(wanted):
        fix = "runs_dir=runs, or another folder with a shorter, printable name"
        return [Problem("`runs_dir` is not the path of a folder", seen=_unusable_path(wanted), fix=fix, key="runs_dir")]
    existing = wanted.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [_unwritable(wanted, f"{existing} is not a folder")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [_unwritable(wanted, f"no permission to write in {existing}")]
    return []


def _unwritable(wanted: Path, seen: str) -> Problem:
    return Problem(
        f"the run folder `{wanted}` cannot be made",
        seen=seen,
        fix="runs_dir=<a folder you can write to, on a disk with room>",
        key="runs_dir",
    )


def _unusable_path(path: Union[str, Path]) -> str:
    """Return why the system takes no such path: it is too long, or has a character that paths cannot have."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
            return str(error)[:200]
    return ""


def _runs_in(folder: Path) -> List[Path]:
    """Return the run folders directly in a folder, the oldest first."""
    return sorted(child.parent for child in folder.glob("*/config.yaml")) if folder.is_dir() else []


def _environment(engine: Engine, plan: Plan) -> Dict[str, Any]:
    from ipurun.engine import watched_variables

    return {
        "schema": _SCHEMA,
        "started": time.time(),
        "engine": {"kind": engine.kind, "version": engine.version, "available_ipus": engine.available_ipus},
        "versions": versions(),
        "git": git_state(),
        # What Graphcore's libraries read, and what each value comes from: a key and where it was set, or the shell.
        "variables": {
            name: {"value": value, "from": plan.environment_origins.get(name, "environment")}
            for name, value in {**watched_variables(), **plan.environment}.items()
        },
    }


def _load_yaml(path: Path) -> Any:
    """Return the data of a YAML file, None if it is damaged."""
    import yaml

    from ipurun.config.documents import load_text

    try:
        return load_text(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


def _yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, default_flow_style=False, allow_unicode=True))


_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "poptorch", "rich", "torchmetrics", "transformers")
_LARGEST_DIFF = 1_000_000


def versions() -> Dict[str, str]:
    """Return the versions of what computes, without importing any of it."""
    found = {"ipurun": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["os"] = _operating_system()
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs"
    found["executable"] = sys.executable
    return found


def git_state(folder: str = ".") -> Dict[str, Any]:
    """Return commit, branch and changed files of the repository of a folder; empty outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    status = _git(folder, "status", "--porcelain", "--", ".") or ""
    changed: List[str] = [line[3:] for line in status.splitlines()]
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "",
        "dirty": bool(changed),
        "changed_files": changed[:100],
    }


def git_diff(folder: str = ".") -> str:
    """Return the changes in the working folder since its commit; empty for none, or for too many to keep.

    Files that look like secrets by their name are left out, and named in the first line.
    """
    arguments = ("diff", "HEAD", "--no-renames", "--no-ext-diff")
    names = (_git(folder, *arguments, "--name-only", "-z", "--relative", "--", ".") or "").split("\0")
    secret = [name for name in names if is_secret_file(name)]
    left_out = [f":(exclude,literal){name}" for name in secret]
    difference = _git(folder, *arguments, "--", ".", *left_out) or ""
    if secret:
        difference = f"left out, because they may hold secrets: {', '.join(secret)}\n{difference}"
    return difference + "\n" if 0 < len(difference) < _LARGEST_DIFF else ""


def _git(folder: str, *arguments: str) -> Optional[str]:
    try:
        done = subprocess.run(
            ("git", "-C", folder) + arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip("\n")


def _operating_system() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8") as stream:
            fields = dict(line.rstrip().split("=", 1) for line in stream if "=" in line)
        return f"{fields['PRETTY_NAME'].strip(chr(34))}, {platform.system()} {platform.release()}"
    except (OSError, KeyError, ValueError):
        return platform.platform()
