"""The process that runs cases, started with the arguments JOB DESCRIPTOR. It sends a line of JSON for each event."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List

from ipurun.engine import Engine, load, probe
from ipurun.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, IpurunError
from ipurun.module_search import append_working_folder
from ipurun.selftest.cases import Case, chosen
from ipurun.selftest.outcome import FAILED, Outcome, time_limit
from ipurun.selftest.run import describe, run_case

__all__ = ["console", "main"]


def console() -> None:
    """Run the cases of the command line; what `run_cases` starts."""
    append_working_folder()
    sys.exit(main(sys.argv[1:]))


def main(argv: List[str]) -> int:
    """Run the cases of a job file one after the other."""
    job: Dict[str, Any] = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    descriptor = int(argv[1])
    faulthandler.enable()
    try:
        engine = load(job["engine"])
    except ConfigError as error:
        _send(descriptor, problems=[problem.to_dict() for problem in error.problems])
        return EXIT_CONFIG
    _send(descriptor, engine={"kind": engine.kind, "version": engine.version, "ipus": engine.available_ipus})
    _send(descriptor, machine=probe())
    if job["describe"]:  # a case that has ended the process before this one
        _send(descriptor, described=describe(chosen([job["describe"]])[0], engine.kind, Path(job["folder"])))
    for case in chosen(job["cases"]) if job["cases"] else []:
        _send(descriptor, begin=case.name)
        # Shows in the log where a case hangs, just before its process is ended.
        faulthandler.dump_traceback_later(max(1.0, time_limit(engine.kind, job["time_limit"]) - 1.0))
        try:
            outcome = _guarded(case, engine, Path(job["folder"]) / case.name)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        _send(descriptor, outcome=outcome.to_dict())
    return 0


def _guarded(case: Case, engine: Engine, folder: Path) -> Outcome:
    sides: List[str] = [""]
    begun = time.monotonic()
    try:
        return run_case(case, engine, folder, sides.append)
    except Exception as error:  # whatever it is, it belongs to this case and into the table
        problems = error.problems if isinstance(error, IpurunError) else ()
        reason = f"{type(error).__name__}: {error}"
        if problems:
            reason = ": ".join(filter(None, (problems[0].what, problems[0].seen)))
        reason = f"{sides[-1]}: {reason}" if sides[-1] else reason
        outcome = Outcome(case.name, FAILED, reason, time.monotonic() - begun)
        outcome.evidence["traceback"] = traceback.format_exc()
        with contextlib.suppress(Exception):
            outcome.evidence.update(describe(case, engine.kind, folder))
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _send(descriptor: int, **event: Any) -> None:
    data = (json.dumps(event, default=str) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]
