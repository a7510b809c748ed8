"""The process of one point, started with the arguments JOB RESULT DESCRIPTOR."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.config.compose import ChangedKey, Point, from_yaml, to_yaml
from ipurun.config.secrets import mask_text
from ipurun.errors import EXIT_FAILED, EXIT_INTERRUPTED, IpurunError
from ipurun.files import write_atomically
from ipurun.module_search import append_working_folder

__all__ = ["console", "job_environment", "main", "read_job", "write_job"]

_SECRETS = "IPURUN_POINT_SECRETS"  # of one point, so that no file has them
_TEXTS = ("reason", "detail")


def write_job(
    path: Path, point: Point, run_dir: str, resume_folder: Optional[str], began: Optional[float] = None
) -> None:
    """Write a point to a file for its process; `read_job` reads it."""
    document = {
        "config": to_yaml(point.config, point.hidden),
        "overrides": list(point.overrides),
        "recipes": list(point.recipes),
        "changed": [[change.key, change.value, change.origin] for change in point.changed],
        "given": point.given,
        "swept": dict(point.swept),
        "hidden": dict(point.hidden),
        "run_dir": run_dir,
        "resume_folder": resume_folder,
        "began": began,
    }
    write_atomically(path, json.dumps(document, indent=2, default=str) + "\n")


def job_environment(point: Point) -> Dict[str, str]:
    """Return the variables with which a process reads the job of a point."""
    return {_SECRETS: json.dumps(point.secrets)} if point.hidden else {}


def read_job(path: Path, secrets: Mapping[str, Any]) -> Tuple[Point, Optional[str], Optional[float]]:
    """Return the point of a job file, the folder to resume or None, and when the time of the sweep began or None."""
    document: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config_file = path.with_suffix(".yaml")
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
    return point, document["resume_folder"], document["began"]


def console() -> None:
    """Run the point of the command line; what `run_child` starts."""
    append_working_folder()
    sys.exit(main(sys.argv[1:]))


def main(argv: List[str]) -> int:
    """Run the point of a job file and write its result."""
    job_file, result_file, descriptor = Path(argv[0]), Path(argv[1]), int(argv[2])
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _interrupt)
    secrets: Dict[str, Any] = json.loads(os.environ.pop(_SECRETS, "{}"))
    try:
        result = _run(job_file, secrets, descriptor)
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


def _run(job_file: Path, secrets: Mapping[str, Any], descriptor: int) -> Dict[str, Any]:
    from ipurun.runs.folder import RunFolder
    from ipurun.runs.job import run_job
    from ipurun.runs.prepare import prepare
    from ipurun.sweep.remote import RemoteScreen

    point, resume_folder, began = read_job(job_file, secrets)
    finished = run_job(
        prepare(point, has_checkpoint=bool(resume_folder)),
        RemoteScreen(descriptor),
        RunFolder.open(resume_folder) if resume_folder else None,
        began,
    )
    if finished.summary.status == "interrupted":
        return {"status": "interrupted", "folder": str(finished.folder), "code": EXIT_INTERRUPTED}
    results = {**finished.summary.to_dict(), "higher_is_better": finished.higher_is_better}
    return {"status": "finished", "folder": str(finished.folder), "results": results, "code": 0}


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
