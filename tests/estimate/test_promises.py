"""What `ipurun plan` suggests, typed after the same command: the new plan has the verdict and figures that were shown.

The suggestions are read from the printed text, and each is planned by a separate command.
"""

from __future__ import annotations

import html
import random
import re
import shlex
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple
from unittest import mock

import pytest

import ipurun
from ipurun.cli.main import main
from ipurun.estimate import plan_estimate
from ipurun.estimate.search import Search
from ipurun.estimate.types import Verdict
from ipurun.planning import artifacts

# Recipes, sizes and pipelines that are quick to trace; the others are models of the same classes.
MODELS = {
    "digit_net": "mnist",
    "clothes_net": "fashion_mnist",
    "bert_tiny": "bert",
    "bert_demo": "bert",
    "gpt_tiny": "gpt",
    "resnet_tiny": "resnet",
    "vit_digits": "vit",
}
PIPELINES = {"digit_net": "mnist_2ipu", "bert_demo": "bert_demo_4ipu", "gpt_tiny": "gpt_tiny_4ipu"}
# Tiles so small that these models do not fit, or only just: memory decides as it does for large ones.
TILES = ("machine.tile_bytes=51000", "machine.tile_bytes=44000", "machine.tile_bytes=36000")


class Shown(NamedTuple):
    """A suggestion as printed: what to type, and what it promises."""

    words: List[str]
    verdict: str
    fullest: str
    speed: str


def _plan(words: List[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *words]) in (0, 3), words
    return capsys.readouterr().out


def _remedies(text: str) -> Iterator[Shown]:
    (throughput,) = re.findall(r"^  throughput +([\d,.]+) samples/s", text, re.MULTILINE)
    pattern = r"^  \d\. .*\((\d[\d,]*%)\), ([\d.]+)x the speed, ([a-z ]+)\n     (.*)$"
    for fullest, speed, verdict, line in re.findall(pattern, text, re.MULTILINE):
        yield Shown(shlex.split(line), verdict, fullest, f"{speed}x {throughput}")


def _solutions(text: str) -> Iterator[Shown]:
    figures = r".*?: ([a-z ]+), fullest IPU (\d[\d,]*%), ([\d,.]+) samples/s.*"
    first = re.search(rf"^  1\. {figures}", text, re.MULTILINE)
    typed = text.partition("\ntype\n")[2]
    if first and typed:
        yield Shown(shlex.split(typed), *first.groups())
    faster = re.search(rf"^  faster, if it fits{figures}\n((?:    .*\n)+)", text, re.MULTILINE)
    if faster:
        yield Shown(shlex.split(faster[4]), *faster.groups()[:3])


def _check(words: List[str], capsys: pytest.CaptureFixture[str], solve: bool = True) -> int:
    """Type everything that a plan suggests; return the number of suggestions."""
    text = _plan([*words, "--solve"] if solve else words, capsys)
    suggestions = [*_remedies(text.partition("\nsolve:")[0]), *_solutions(text.partition("\nsolve:")[2])]
    for shown in suggestions:
        with pytest.MonkeyPatch.context() as patch:  # what the new plan suggests in turn takes most of its time
            patch.setattr(plan_estimate, "remedies_for", lambda *_, **__: [])
            patch.setattr(Search, "requirements", lambda *_: None)
            quiet = _plan([*words, *shown.words, "--quiet"], capsys)
        found = re.search(r"estimate: ([a-z ]+), fullest IPU (\d[\d,]*%), ([\d,.]+) samples/s", quiet)
        assert found, (words, shown, quiet)
        assert found.groups()[:2] == (shown.verdict, shown.fullest), (words, shown)
        if "x " in shown.speed:
            factor, before = shown.speed.split("x ")
            ratio = float(found[3].replace(",", "")) / float(before.replace(",", ""))
            assert ratio == pytest.approx(float(factor), abs=0.006 + 0.006 * ratio), (words, shown, quiet)
        else:
            assert found[3] == shown.speed, (words, shown)
    return len(suggestions)


@pytest.fixture(name="folder", autouse=True)
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")  # one suggestion is one line
    # A plan shows what the disk has free, which other processes change between two plans.
    monkeypatch.setattr(artifacts.shutil, "disk_usage", lambda folder: mock.Mock(free=10**11))


def _words(model: str, *more: str) -> List[str]:
    return [f"+recipe={MODELS[model]}", f"model={model}", "data=synthetic", "cache=off", *more]


@pytest.mark.parametrize("model", MODELS)
def test_suggestions_for_every_recipe_hold(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["machine.tile_bytes=44000", "precision=16", "devices=4", "gradient_accumulation=16"]
    assert _check(_words(model, *small), capsys)
    if model in PIPELINES:
        _check(_words(model, f"pipeline={PIPELINES[model]}", "gradient_accumulation=16", TILES[0]), capsys, False)


@pytest.mark.parametrize("seed", range(4))
def test_suggestions_for_random_configs_hold(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = random.Random(seed)
    choices: Dict[str, List[str]] = {
        "precision": ["16", "16.32", "32"],
        "devices": ["1", "2", "4", "8"],
        "gradient_accumulation": ["1", "9", "16", "null"],
        "micro_batch_size": ["1", "2", "4", "6"],
        "optimizer": ["sgd", "adam", "adamw", "lamb", "rmsprop"],
        "device_iterations": ["1", "1", "8"],
        "recompute.mode": ["null", "none"],
    }
    model = drawn.choice(list(MODELS))
    words = _words(model, drawn.choice(TILES), *(f"{key}={drawn.choice(values)}" for key, values in choices.items()))
    _check(words, capsys, solve=drawn.random() < 0.5)


def test_a_change_that_the_data_is_too_short_for_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The 4,000 digits hold one host call of 8 x 10 x 32 samples, and not two."""
    assert (
        "device_iterations="
        not in _plan(["+recipe=mnist", "devices=8", "device_iterations=32"], capsys).partition("what would")[2]
    )
    shown = _plan(["+recipe=mnist", "devices=8"], capsys).partition("what would")[2]
    assert "\n     device_iterations=16\n" in shown
    main(["plan", "+recipe=mnist", "devices=8", "device_iterations=8"])
    assert "\n     device_iterations=32\n" in capsys.readouterr().out  # 16 times as many would be too many


def test_text_json_page_and_python_show_the_same_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = _words("gpt_tiny", "machine.tile_bytes=44000", "gradient_accumulation=16")
    text = _plan(words, capsys)
    report = ipurun.plan(overrides=words)
    shown = [shown.words for shown in _remedies(text)]
    assert shown and shown == [list(remedy.overrides) for remedy in report.estimate.remedies]
    assert str(report) == text.rstrip("\n")
    document = report.to_dict()
    assert [remedy["overrides"] for remedy in document["estimate"]["remedies"]] == [tuple(words) for words in shown]
    page = html.unescape(report.html())
    commands = []
    for more in ([], *shown):
        changed = {word.partition("=")[0] for word in more}
        kept = [word for word in words if word.partition("=")[0] not in changed]
        commands.append(shlex.join(["ipurun", "plan", *kept, *more]))
    assert re.findall("<code>(ipurun plan .*?)</code>", page) == commands


def test_the_reason_is_given_where_no_config_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    """Training would fit, but inference is asked for a micro-batch that does not."""
    words = _words(
        "bert_tiny", "precision=16", "devices=2", "gradient_accumulation=8", "inference.micro_batch_size=8192"
    )
    text = _plan([*words, "--solve"], capsys).partition("\nsolve: ")[2]
    assert text.startswith("no combination of split, micro-batch, accumulation and replication fits (estimate)\n")
    assert "the best of those that were tried is refused: inference takes " in text
    assert main(["plan", *words, "--solve", "--quiet"]) == 3


def test_split_auto_prefers_a_split_that_fits_to_a_faster_one_that_is_tight() -> None:
    words = _words("bert_demo", "pipeline.split=auto", "devices=4", "precision=16", "gradient_accumulation=32")
    verdicts = set()
    for size in (74000, 128000):
        report = ipurun.plan(overrides=[*words, f"machine.tile_bytes={size}"])
        verdicts.add(report.estimate.verdict)
        if report.estimate.verdict is not Verdict.FITS:
            assert not any(
                "pipeline.split" in word
                for remedy in report.estimate.remedies
                for word in remedy.overrides
                if remedy.verdict is Verdict.FITS and remedy.devices == 4
            )
    assert len(verdicts) > 1
