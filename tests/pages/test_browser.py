"""Pages in Chromium: wide and narrow, light and dark, with hostile names; values under the pointer, and zoom."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator

import pytest
from browser import CHROMIUM, WHY_SKIPPED, Browser
from stored_runs import HOSTILE, write_run, write_sweep

import ipurun
from ipurun.pages.compare import compare_page
from ipurun.pages.data import read_run, read_sweep
from ipurun.pages.listing import entries_below, index_page
from ipurun.pages.plan import plan_page
from ipurun.pages.report import run_page, sweep_page

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=WHY_SKIPPED)

STATE = """JSON.stringify({
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  hacked: window.hacked === 1,
  charts: document.querySelectorAll('figure.chart').length,
  dark: getComputedStyle(document.body).backgroundColor,
  small: Math.min(...Array.from(document.querySelectorAll('td, p, li'),
    (one) => parseFloat(getComputedStyle(one).fontSize))),
})"""
HOVER_AND_ZOOM = """(() => {
  const figure = document.querySelector('figure.chart'), svg = figure.querySelector('svg');
  const box = svg.getBoundingClientRect();
  svg.setPointerCapture = () => {};
  const fire = (kind, share) => svg.dispatchEvent(new PointerEvent(kind, {
    clientX: box.left + box.width * share, clientY: box.top + box.height / 2, bubbles: true, pointerType: 'mouse'}));
  const labels = () => Array.from(svg.querySelectorAll('.labels text'), (one) => one.textContent).join(' ');
  const before = labels();
  fire('pointermove', 0.5);
  const tip = figure.querySelector('.tip').textContent;
  fire('pointerdown', 0.5); fire('pointermove', 0.7); fire('pointerup', 0.7);
  const zoomed = figure.classList.contains('zoomed'), after = labels();
  figure.querySelector('.reset').click();
  const whole = !figure.classList.contains('zoomed');
  const drawn = () => svg.querySelector('path.line').getAttribute('d');
  const linear = drawn(), log = figure.querySelector('button.log');
  log.click();
  const is_log = drawn() !== linear;
  log.click();
  const key = figure.querySelector('[data-key=train]'), line = figure.querySelector('path[data-name=train]');
  key.click();
  const hidden = getComputedStyle(line).display === 'none';
  key.click();
  return JSON.stringify({tip, zoomed, changed: before !== after, whole, is_log, hidden,
    back: getComputedStyle(line).display !== 'none'});
})()"""


@pytest.fixture(name="browser", scope="module")
def fixture_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(str(tmp_path_factory.mktemp("chromium")))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture(name="pages", scope="module")
def fixture_pages(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [read_run(write_run(folder / "a", HOSTILE + "x" * 200)), read_run(write_run(folder / "b"))]
    planned = ipurun.plan("mnist", devices=2, name=HOSTILE)
    assert planned.estimate is not None
    texts = {
        "run": run_page(runs[0], recipe={HOSTILE: 1}),
        "sweep": sweep_page(read_sweep(write_sweep(folder / "sweep", name=HOSTILE, with_runs=True))),
        "compare": compare_page(runs),
        "plan": plan_page(planned.plan, planned.estimate, [f"name={HOSTILE}", "+recipe=mnist", "devices=2"]),
        "list": index_page(folder, entries_below(folder), lambda path: path.name),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def _open(browser: Browser, page: Path, width: int, is_dark: bool) -> str:
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = str(browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
    scheme = "dark" if is_dark else "light"
    browser.call(
        "Emulation.setDeviceMetricsOverride", session, width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    browser.call("Emulation.setEmulatedMedia", session, features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Page.navigate", session, url=page.as_uri())
    loaded = "new Promise(r => document.readyState === 'complete' ? r(1) : window.addEventListener('load', () => r(1)))"
    for _ in range(50):
        if _evaluate(browser, session, "location.href") == page.as_uri():
            break
    _evaluate(browser, session, loaded)
    return session


def _evaluate(browser: Browser, session: str, expression: str) -> Any:
    answer = browser.call("Runtime.evaluate", session, expression=expression, awaitPromise=True, returnByValue=True)
    return answer["result"].get("value")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize(("name", "charts"), [("run", 2), ("sweep", 2), ("compare", 2), ("plan", 1), ("list", 0)])
def test_a_page_fits_and_runs_no_foreign_script(
    browser: Browser, pages: Dict[str, Path], name: str, charts: int, width: int, is_dark: bool
) -> None:
    import json

    session = _open(browser, pages[name], width, is_dark)
    state = json.loads(_evaluate(browser, session, STATE))
    assert not state["hacked"]
    assert state["overflow"] <= 0
    assert state["charts"] >= charts
    assert state["small"] >= 11
    assert (state["dark"] == "rgb(14, 19, 24)") == is_dark


def test_values_show_under_the_pointer_a_drag_zooms_and_a_name_hides_its_line(
    browser: Browser, pages: Dict[str, Path]
) -> None:
    import json

    session = _open(browser, pages["run"], 1280, False)
    found = json.loads(_evaluate(browser, session, HOVER_AND_ZOOM))
    assert found["tip"].startswith("step ") and "train" in found["tip"]
    assert found["zoomed"] and found["changed"] and found["whole"]
    assert found["is_log"] and found["hidden"] and found["back"]
