"""Run cases in a separate process, and start another one for the rest after a crash or a hang."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ipurun.errors import ConfigError, Problem, RunError
from ipurun.selftest.cases import Case
from ipurun.selftest.outcome import FAILED, Outcome, time_limit
from ipurun.sweep.child import run_process

__all__ = ["SelfTest", "run_cases"]

_START_SECONDS = 300.0  # to import the engine
_GRACE_SECONDS = 5.0  # after Ctrl-C
_LONGEST_LOG = 100_000  # characters


@dataclass
class SelfTest:
    """The outcomes so far.

    Args:
        engine: Kind, version and number of IPUs of the engine.
        machine: What `ipurun env` shows.
        outcomes: In the order of the cases.
        interrupted: Whether Ctrl-C ended the test before its last case.
    """

    engine: Dict[str, Any] = field(default_factory=dict)
    machine: Dict[str, Any] = field(default_factory=dict)
    outcomes: List[Outcome] = field(default_factory=list)
    interrupted: bool = False

    @property
    def wrong(self) -> List[Outcome]:
        """The cases that differ or failed."""
        return [outcome for outcome in self.outcomes if outcome.is_wrong]


def run_cases(
    engine: str,
    cases: Sequence[Case],
    limit_seconds: Optional[float],
    on_engine: Callable[[SelfTest], None],
    on_begin: Callable[[str], None],
    on_outcome: Callable[[Outcome], None],
) -> SelfTest:
    """Run cases on an engine.

    Args:
        engine: As in a config.
        cases: The cases.
        limit_seconds: Time limit of each case; None: one that suits the engine.
        on_engine: Called once the engine is known.
        on_begin: Called with the name of each case.
        on_outcome: Called with the outcome of each case.

    Raises:
        ConfigError: The engine is not available.
        RunError: The engine ends its process while it is loaded.
    """
    test = SelfTest()
    with tempfile.TemporaryDirectory(prefix="ipurun-selftest-") as folder:
        waiting = [case.name for case in cases]
        crashed: Optional[Outcome] = None
        while (waiting or crashed) and not test.interrupted:
            worker = _Worker(test, Path(folder), limit_seconds, on_engine, on_begin, on_outcome)
            crashed = worker.run(engine, waiting, crashed)
            done = {outcome.case for outcome in test.outcomes}
            waiting = [name for name in waiting if name not in done]
    return test


class _Worker:
    """One process, from its start to its end."""

    def __init__(
        self,
        test: SelfTest,
        folder: Path,
        limit_seconds: Optional[float],
        on_engine: Callable[[SelfTest], None],
        on_begin: Callable[[str], None],
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._test = test
        self._folder = folder
        self._output = folder / "output.txt"
        self._limit_seconds = limit_seconds
        self._on_engine = on_engine
        self._on_begin = on_begin
        self._on_outcome = on_outcome
        self._problems: List[Dict[str, str]] = []
        self._limit = _START_SECONDS
        self._case: Optional[str] = None
        self._described: Optional[Outcome] = None
        self._begun = time.monotonic()
        self._log_start = 0

    def run(self, engine: str, names: Sequence[str], crashed: Optional[Outcome]) -> Optional[Outcome]:
        """Run the cases with these names, up to the end of the process.

        Args:
            engine: As in a config.
            names: Names of cases.
            crashed: A case that has ended an earlier process: its config and plan are added.

        Returns:
            The case that has ended this process, if one has.
        """
        job = self._folder / "job.json"
        document = {
            "engine": engine,
            "cases": list(names),
            "folder": str(self._folder / "runs"),
            "time_limit": self._limit_seconds,
            "describe": crashed.case if crashed else None,
        }
        job.write_text(json.dumps(document), encoding="utf-8")
        self._output.write_bytes(b"")
        self._described = crashed
        code, ended_by = run_process(
            "ipurun.selftest.worker.console",
            (str(job),),
            self._output,
            {},
            self._receive,
            self._interrupt,
            lambda: self._begun + self._limit,
        )
        if self._problems:
            raise ConfigError([Problem(**problem) for problem in self._problems])
        if self._test.interrupted:
            return None
        how = self._how_it_ended(code, ended_by)
        if self._case is not None:
            outcome = Outcome(self._case, FAILED, how, time.monotonic() - self._begun)
            self._add(outcome)
            return outcome
        if (code or ended_by) and crashed is None:
            raise RunError(f"`engine={engine}` cannot be loaded: {how}", seen=self._log()[-2000:].strip())
        return None

    def _how_it_ended(self, code: int, ended_by: str) -> str:
        if ended_by == "timeout":
            return f"took longer than {self._limit:g} s"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with code {code} before its end"

    def _receive(self, line: str) -> None:
        event: Dict[str, Any] = json.loads(line)
        if "problems" in event:
            self._problems = event["problems"]
        elif "engine" in event:
            first = not self._test.engine
            self._test.engine = event["engine"]
            if first:
                self._on_engine(self._test)
        elif "machine" in event:
            self._test.machine = event["machine"]
        elif "described" in event:
            assert self._described is not None
            self._described.evidence.update(event["described"])
        elif "begin" in event:
            self._case, self._begun = event["begin"], time.monotonic()
            self._limit = time_limit(self._test.engine["kind"], self._limit_seconds)
            self._log_start = self._output.stat().st_size
            self._on_begin(event["begin"])
        elif "outcome" in event:
            self._add(Outcome(**event["outcome"]))
            # The next case begins, or the process ends, within seconds.
            self._case, self._begun, self._limit = None, time.monotonic(), _START_SECONDS

    def _add(self, outcome: Outcome) -> None:
        if outcome.is_wrong:
            outcome.evidence["log"] = self._log()
        self._test.outcomes.append(outcome)
        self._on_outcome(outcome)

    def _log(self) -> str:
        with self._output.open("rb") as stream:
            stream.seek(self._log_start)
            return stream.read().decode("utf-8", "replace")[-_LONGEST_LOG:]

    def _interrupt(self) -> None:
        self._test.interrupted = True
        self._begun, self._limit = time.monotonic(), _GRACE_SECONDS
