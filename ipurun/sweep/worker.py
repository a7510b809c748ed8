"""The process of one point, started with the arguments JOB RESULT MESSAGES: files, the last may be a descriptor."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Sequence

from ipurun.config.compose import ChangedKey, Point, from_yaml, to_yaml
from ipurun.config.secrets import mask_text
from ipurun.distributed.environment import LAUNCH_FOLDER, launched
from ipurun.distributed.notes import run_instance
from ipurun.errors import EXIT_FAILED, EXIT_INTERRUPTED, IpurunError
from ipurun.files import write_atomically
from ipurun.module_search import append_working_folder, python_command

if TYPE_CHECKING:
    from ipurun.runs.prepare import PreparedRun

__all__ = ["Job", "console", "import_all", "job_environment", "main", "read_job", "resumable", "write_job"]

_SECRETS = "IPURUN_POINT_SECRETS"  # of one point, so that no file has them
_TEXTS = ("reason", "detail")
_PR_SET_PDEATHSIG = 1  # of prctl


@dataclass(frozen=True)
class Job:
    """Settings passed to the process of a point.

    Args:
        point: The point.
        run_dir: Folder of its run.
        earlier_folders: Folders of earlier attempts: the first one that has a checkpoint is continued.
        began: When the time of the sweep began, by `time.monotonic`; None: with the process.
        trial: Storage, study and number of the Optuna trial that it is, for `ipurun.sweep.search.TrialReport`.
    """

    point: Point
    run_dir: str
    earlier_folders: Sequence[str] = ()
    began: Optional[float] = None
    trial: Optional[Mapping[str, Any]] = None


def write_job(path: Path, job: Job) -> None:
    """Write a job to a file for its process; `read_job` reads it."""
    point = job.point
    document = {
        "config": to_yaml(point.config, point.hidden),
        "overrides": list(point.overrides),
        "recipes": list(point.recipes),
        "changed": [[change.key, change.value, change.origin] for change in point.changed],
        "given": point.given,
        "swept": dict(point.swept),
        "hidden": dict(point.hidden),
        "run_dir": job.run_dir,
        "earlier_folders": list(job.earlier_folders),
        "began": job.began,
        "trial": job.trial,
    }
    write_atomically(path, json.dumps(document, indent=2, default=str) + "\n")


def job_environment(point: Point) -> Dict[str, str]:
    """Return the variables with which a process reads the job of a point."""
    return {_SECRETS: json.dumps(point.secrets)} if point.hidden else {}


def read_job(path: Path, secrets: Mapping[str, Any]) -> Job:
    """Return the job of a file."""
    document: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config_file = path.with_suffix(".yaml")
    if LAUNCH_FOLDER not in os.environ:  # the process that starts instances has done so for all of them
        write_atomically(config_file, document["config"])
    point = Point(
        from_yaml(config_file, secrets),
        overrides=tuple(document["overrides"]),
        recipes=tuple(document["recipes"]),
        changed=tuple(ChangedKey(*change) for change in document["changed"]),
        given=document["given"],
        swept=document["swept"],
        run_dir=document["run_dir"],
        hidden=document["hidden"],
    )
    others = (document[name] for name in ("run_dir", "earlier_folders", "began", "trial"))
    return Job(point, *others)


def import_all() -> None:
    """Import everything that a point needs, so that processes forked from this one need not."""
    import ipurun.runs.job
    import ipurun.sweep.remote  # noqa: F401  # both for those who ask for them later


def console() -> None:
    """Run the point of the command line; what a sweep starts."""
    _end_with_parent()
    append_working_folder()
    sys.exit(main(sys.argv[1:]))


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM when the sweep is gone, however that ended."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return  # not Linux: the next message to the sweep fails


def main(argv: List[str]) -> int:
    """Run the point of a job file and write its result."""
    job_file, result_file = Path(argv[0]), Path(argv[1])
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _interrupt)
    secrets: Dict[str, Any] = json.loads(os.environ.pop(_SECRETS, "{}"))
    if LAUNCH_FOLDER in os.environ:
        return run_instance(lambda: _run_instance(read_job(job_file, secrets), result_file, argv[2]))
    try:
        result = _run(read_job(job_file, secrets), argv)
    except KeyboardInterrupt:
        result = {"status": "interrupted", "code": EXIT_INTERRUPTED}
    except IpurunError as error:
        _print_traceback(secrets)
        result = {
            "status": "failed",
            "reason": error.problems[0].what if error.problems else str(error),
            "detail": str(error),
            "code": EXIT_FAILED,
        }
    except Exception as error:  # whatever it is, it belongs to this point and into the table
        _print_traceback(secrets)
        reason = f"{type(error).__name__}: {error}"
        result = {"status": "failed", "reason": reason, "detail": f"error: {reason}", "code": EXIT_FAILED}
    code = result.pop("code")
    result = {key: mask_text(value, secrets.values()) if key in _TEXTS else value for key, value in result.items()}
    write_atomically(result_file, json.dumps(result, default=str))
    return int(code)


def _print_traceback(secrets: Mapping[str, Any]) -> None:
    print(mask_text(traceback.format_exc(), secrets.values()), file=sys.stderr)


def _run(job: Job, argv: Sequence[str]) -> Dict[str, Any]:
    """Run a point, in this process or as the processes that it asks for; return its result."""
    prepared = _prepare(job)
    if not prepared.plan.instances.command:
        return _train(job, prepared, _messages(argv[2]))
    from ipurun.log.screen import PlainScreen
    from ipurun.runs.launch import launch_job

    # The first instance has messages and result; a descriptor of this process is a file to it.
    messages = f"/proc/{os.getpid()}/fd/{argv[2]}" if argv[2].isdigit() else argv[2]
    program = [*python_command("ipurun.sweep.worker.console"), argv[0], argv[1], messages]
    _, summary = launch_job(prepared, program, PlainScreen(sys.stdout), job_environment(job.point))
    result: Dict[str, Any] = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    return {**result, "code": EXIT_INTERRUPTED if summary.status == "interrupted" else 0}


def _run_instance(job: Job, result_file: Path, messages: str) -> bool:
    """Run a point as one of its processes, of which the first writes the result; return whether it was interrupted."""
    is_first = not _rank()
    result = _train(job, _prepare(job), _messages(messages if is_first else os.devnull))
    if is_first:
        write_atomically(result_file, json.dumps(result, default=str))
    return bool(result["code"])


def _rank() -> int:
    started = launched()
    return 0 if started is None else started.rank


def _messages(where: str) -> int:
    """Return the descriptor for messages to the sweep."""
    if where.isdigit():
        return int(where)
    try:
        return os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # the first process is on another machine than the sweep
        return os.open(os.devnull, os.O_WRONLY)


def _prepare(job: Job) -> PreparedRun:
    from ipurun.runs.prepare import prepare

    return prepare(job.point, has_checkpoint=_earlier(job) is not None)


def _earlier(job: Job) -> Optional[str]:
    return resumable((job.run_dir, *job.earlier_folders))


def _train(job: Job, prepared: PreparedRun, messages: int) -> Dict[str, Any]:
    from ipurun.runs.folder import RunFolder
    from ipurun.runs.job import run_job
    from ipurun.sweep.remote import RemoteScreen

    callbacks: Dict[str, Any] = {}
    if job.trial is not None:
        from ipurun.sweep.search import TrialReport
        from ipurun.training.callbacks import Callback

        # The first process reports, and what it asks for happens in all: the others must ask, too.
        callbacks["optuna"] = Callback() if _rank() else TrialReport(job.trial)
    earlier = _earlier(job)
    finished = run_job(
        prepared,
        RemoteScreen(messages),
        RunFolder.open(earlier) if earlier else None,
        job.began,
        callbacks,
    )
    if finished.summary.status == "interrupted":
        return {"status": "interrupted", "folder": str(finished.folder), "code": EXIT_INTERRUPTED}
    results = {**finished.summary.to_dict(), "higher_is_better": finished.higher_is_better}
    pruned = "".join(getattr(callback, "pruned", "") for callback in callbacks.values())
    status = {"status": "pruned", "reason": pruned} if pruned else {"status": "finished"}
    return {**status, "folder": str(finished.folder), "results": results, "code": 0}


def resumable(folders: Iterable[str]) -> Optional[str]:
    """Return the first folder of a run that has a checkpoint."""
    from ipurun.checkpoint import latest
    from ipurun.runs.folder import RunFolder

    for folder in folders:
        if (Path(folder) / "config.yaml").is_file() and latest(RunFolder(folder)):
            return folder
    return None


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
