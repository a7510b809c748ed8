"""The HTML page of an estimate: self-contained, and true to the estimate."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any, List

import pytest
from test_estimate_text import inference_of, toy_estimate

from ipurun.estimate.advice import Remedy
from ipurun.estimate.types import Verdict
from ipurun.inspect.facts import Facts
from ipurun.pages.plan import MEMORY_PARTS, plan_page
from ipurun.planning import make_plan
from ipurun.planning.plan import Plan


class _Tags(HTMLParser):
    """Collect open tags, and all attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.links: List[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "wbr", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _plan() -> Plan:
    from ipurun.config.schema import RunConfig

    config = RunConfig(name="toy <b>", micro_batch_size=1)
    return make_plan(config, Facts("cpu", "emulator"))


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    page = plan_page(_plan(), toy_estimate())
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.links == ["data:,"]  # an icon, so that a browser asks for none
    assert "@import" not in page and "https:" not in page
    assert re.findall(r"url\((?!#)", page) == []  # only parts of the page itself
    assert set(re.findall(r"http://[^\"]+", page)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_names_are_escaped() -> None:
    remedy = Remedy("a < b", ("x=<y>",), Verdict.FITS, 0, 1.5, 10.0, 0.4)
    page = plan_page(_plan(), toy_estimate(remedies=(remedy,)))
    assert "toy &lt;b&gt;" in page and "toy <b>" not in page
    assert "x=&lt;y&gt;" in page


def test_bars_are_as_long_as_the_memory_they_show() -> None:
    plan_estimate = toy_estimate()
    page = plan_page(_plan(), plan_estimate)
    ipu = plan_estimate.estimate.ipus[0]
    widths = {label: float(width) for width, label in re.findall(r'width:([\d.]+)%;[^"]*" title="IPU 0 ([^:]+):', page)}
    assert widths["code"] / widths["uneven tiles"] == pytest.approx(ipu.code / ipu.imbalance, rel=0.01)


def test_every_module_is_coloured_by_its_ipu() -> None:
    page = plan_page(_plan(), toy_estimate())
    tree = page[page.index('class="tree"') :]
    marks = re.findall(r'<i class="ipu" style="background:([^"]+)">(\d)</i>', tree)
    assert [number for _, number in marks] == ["0", "1", "0", "1"]  # `layer` is on both, its layers on one each
    assert len({colour for colour, _ in marks}) == 2


def test_the_chart_has_a_bar_for_each_pass() -> None:
    page = plan_page(_plan(), toy_estimate())
    assert len(re.findall("<title>forward of micro-batch", page)) == 2 * 8
    assert len(re.findall("<title>backward of micro-batch", page)) == 2 * 8


def test_inference_has_its_own_section() -> None:
    plan_estimate = toy_estimate()
    assert "<h2>Inference (estimate)</h2>" not in plan_page(_plan(), plan_estimate)
    page = plan_page(_plan(), dataclasses.replace(plan_estimate, inference=inference_of(plan_estimate)))
    section = page[page.index("<h2>Inference (estimate)</h2>") :]
    assert "samples/s in 4 batches of 1 per host call" in section
    assert len(re.findall('title="IPU 0 weights:', page)) == 2


def test_the_page_names_its_command_the_verdict_and_the_fullest_ipu() -> None:
    plan_estimate = toy_estimate()
    page = plan_page(_plan(), plan_estimate, ["+recipe=mine", "devices=2"])
    assert "<code>ipurun plan +recipe=mine devices=2</code>" in page
    verdict = plan_estimate.estimate.verdict.value
    assert re.search(rf'<h1>.*<span class="badge \w+">{verdict}</span></h1>', page)
    fullest = max(plan_estimate.estimate.ipus, key=lambda ipu: ipu.share)
    assert re.search(rf'fullest">IPU {fullest.ipu}</span>', page)


def test_a_remedy_is_a_whole_command_in_which_each_key_is_typed_once() -> None:
    remedy = Remedy("less", ("micro_batch_size=2",), Verdict.FITS, 0, 1.5, 10.0, 0.4)
    words = ["+recipe=mine", "micro_batch_size=8"]
    page = plan_page(_plan(), toy_estimate(remedies=(remedy,)), words)
    assert "<code>ipurun plan +recipe=mine micro_batch_size=2</code>" in page


def test_only_what_is_drawn_is_in_the_legend() -> None:
    plan_estimate = toy_estimate()
    page = plan_page(_plan(), plan_estimate)
    ipus = plan_estimate.estimate.ipus
    for name, label, _ in MEMORY_PARTS:
        assert (f"</i>{label}</span>" in page) == any(getattr(ipu, name) for ipu in ipus)
