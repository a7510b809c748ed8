"""Pages and tables of runs, from files written by hand: complete, escaped, and of use when files are damaged."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, List

import pytest
from stored_runs import HOSTILE, write_run, write_sweep

from ipurun.cli.main import main
from ipurun.pages.charts import Series, line_chart, nice_ticks, smoothed, thinned
from ipurun.pages.compare import compare_page, differing_keys, labels_of
from ipurun.pages.data import read_run, read_sweep
from ipurun.pages.parts import tiles
from ipurun.pages.report import changes_from_recipe, run_page, sweep_page, value_by_key

_VOID = ("meta", "br", "wbr", "link", "input")


class _Tags(HTMLParser):
    """Check that tags are closed, and collect what could run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.risky: List[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.risky += [
            f"{tag} {name}={value}" for name, value in attrs if name in ("src", "srcdoc") or name[:2] == "on"
        ]
        self.risky += [tag] if tag in ("img", "iframe", "object", "embed", "base") else []
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass


def _check(page: str) -> None:
    tags = _Tags()
    tags.feed(page)
    assert (tags.open, tags.risky) == ([], [])
    scripts = re.findall(r"<script([^>]*)>", page)
    assert scripts.count("") == 1 and set(scripts) <= {"", ' type="application/json"'}
    assert "\x1b" not in page and "\u202e" not in page
    assert "default-src 'none'" in page


def test_the_page_of_a_run_is_whole_and_true(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    page = run_page(run, recipe={"name": "digits", "devices": 1, "monitor": "accuracy", "optimizer.lr": 0.002})
    _check(page)
    assert '<span class="badge good">finished</span>' in page
    assert "resumed after step 60" in page
    data = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    losses = next(one for chart in data for one in chart["series"] if one["name"] == "train")
    assert losses["y"][0] == pytest.approx(run.records[0]["loss"], rel=1e-4)
    assert len(losses["x"]) == 120
    assert "training 15 s (75.0%)" in page
    row = page[page.index('<td class="mono">devices</td>') :][:300]
    assert '<td class="old">1</td><td class="new">8</td>' in row and "command line: devices=8" in row


def test_hostile_names_and_values_stay_text(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", HOSTILE, "failed", data={HOSTILE: HOSTILE}))
    _check(run_page(run))
    _check(sweep_page(read_sweep(write_sweep(tmp_path / "sweep", name=HOSTILE))))
    _check(compare_page([run, read_run(write_run(tmp_path / "other"))]))


def test_hostile_names_and_values_cannot_change_the_terminal(tmp_path: Path, capsys: Any) -> None:
    runs = [str(write_run(tmp_path / f"run{HOSTILE.replace('/', '')}", HOSTILE, data={HOSTILE: HOSTILE + "\n"}))]
    runs += [str(write_run(tmp_path / "failed", HOSTILE, "failed")), str(write_run(tmp_path / "other"))]
    sweep = str(write_sweep(tmp_path / "sweep", name=HOSTILE))
    shows = [["runs", "show", folder] for folder in [*runs, sweep]]
    for words in (["runs", "ls", str(tmp_path)], ["compare", *runs], *shows):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert "\\x1b[31m" in shown or words[-1] == runs[-1]
        assert "\x1b" not in shown and "\u202e" not in shown
    assert main(["report", f"no{HOSTILE}"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_run_is_labelled_by_what_tells_it_from_the_others(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name / time, name)) for name, time in (("a", "1"), ("a", "2"), ("b", "3"))]
    assert labels_of(runs) == ["a 1", "a 2", "b 3"]
    assert labels_of(runs[:2]) == ["1", "2"] and labels_of(runs[1:]) == ["a", "b"]


def test_a_failed_run_shows_its_reason_and_its_log(tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "run", status="failed")))
    assert "it broke: digits" in page and '<details id="log" open>' in page and "the first line" in page


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "env.json").write_text("{", encoding="utf-8")
    (folder / "summary.json").write_text("[]", encoding="utf-8")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"half\n[1]\nnull\nnot json\n{"split": "train", "step": "x", "loss": [1]}\n')
    run = read_run(folder)
    page = run_page(run)
    _check(page)
    assert run.status == "killed" and "env.json cannot be read" in page and "summary.json is not a JSON object" in page
    assert "2 lines are not JSON" in page and "<h2>Curves</h2>" in page


def test_links_and_pipes_in_a_run_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("password", encoding="utf-8")
    (folder / "log.txt").unlink()
    (folder / "log.txt").symlink_to(secret)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    run = read_run(folder)  # a pipe without a writer would block for ever
    assert "password" not in run_page(run)
    assert any("metrics.jsonl" in fault for fault in run.faults)


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"split": "train", "step": 4, "loss": "nan"}\n{"split": "train", "step": 5, "loss": "inf"}\n')
    page = run_page(read_run(folder))
    _check(page)
    assert ",null,null]" in page


def test_the_page_of_a_sweep_ranks_draws_and_names_failures(tmp_path: Path) -> None:
    page = sweep_page(read_sweep(write_sweep(tmp_path / "sweep", with_runs=True)))
    _check(page)
    assert page.index('data-value="4">004') < page.index('data-value="0">000')  # best first
    assert "accuracy by optimizer.lr" in page and "accuracy by both keys" in page and "heat-cell" in page
    assert "why digits" in page[page.index("<h2>Failed points</h2>") :]
    assert "<b>test accuracy</b>" in page


def test_keys_that_differ_are_found_also_where_one_is_missing(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b", optimizer={"lr": 1.0, "beta": 2}))]
    assert differing_keys(runs) == [("optimizer.beta", ["(not set)", "2"]), ("optimizer.lr", ["0.002", "1.0"])]
    assert changes_from_recipe(runs[0], {"devices": 8, "optimizer.lr": 0.1, "monitor": "accuracy", "gone": 1}) == [
        ("gone", "1", ""),
        ("optimizer.lr", "0.1", "0.002"),
    ]


def test_a_long_curve_keeps_its_peaks() -> None:
    values = [0.0] * 10_000
    values[4321] = 9.0
    short = thinned(Series("loss", list(range(10_000)), values))
    assert len(short.xs) <= 1200 and max(short.ys) == 9.0 and list(short.xs) == sorted(short.xs)
    faint, mean = smoothed(Series("loss", list(range(100)), [1.0] * 50 + [float("nan")] * 50))
    assert faint.is_faint and mean.ys[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(("low", "high", "ticks"), [(0, 10, [0, 2, 4, 6, 8, 10]), (0.13, 0.27, [0.15, 0.2, 0.25])])
def test_ticks_are_round_numbers(low: float, high: float, ticks: List[float]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)


def test_runs_are_listed_filtered_and_sorted(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a/1", "first", steps=40)
    write_run(tmp_path / "runs/b/2", "second", "interrupted", optimizer={"lr": 0.5})
    write_run(tmp_path / "runs/c/3", "third", "")
    write_sweep(tmp_path / "runs/d/sweeps/4", with_runs=True)

    def listed(*words: str) -> List[str]:
        assert main(["runs", "ls", *words, "--json"]) == 0
        return [Path(entry["folder"]).name for entry in json.loads(capsys.readouterr().out)]

    assert listed() == ["2", "3", "1", "4"]  # the newest first; points of sweeps are left out
    assert listed("--status", "killed") == ["3"]
    assert listed("optimizer.lr=0.5") == ["2"]
    assert listed("--name", "first") == ["1"]
    assert listed("--sort", "name", "--limit", "2") == ["4", "1"]
    assert main(["runs", "ls"]) == 0
    assert "second  interrupted" in capsys.readouterr().out
    assert main(["runs", "ls", "--status", "odd"]) == 2


def test_a_run_is_removed_only_when_asked_and_not_in_use(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ipurun.runs.lock import locked

    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs/a/1")
    assert main(["runs", "rm", str(folder)]) == 2  # standard input is not a terminal
    with locked(folder, "run"):
        assert main(["runs", "rm", str(folder), "--yes"]) == 2
    assert folder.is_dir() and "is in use" in capsys.readouterr().err
    assert main(["runs", "rm", str(tmp_path), "--yes"]) == 2  # not a run
    assert main(["runs", "rm", str(folder), "--yes"]) == 0
    assert not folder.exists()


def test_report_and_compare_write_pages(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = write_run(tmp_path / "runs/a/1"), write_run(tmp_path / "runs/a/2", optimizer={"lr": 0.1})
    assert main(["report", str(one), "--no-plan", "--html", "page.html"]) == 0
    _check(Path("page.html").read_text(encoding="utf-8"))
    assert main(["compare", str(one), str(other), "--html", "both.html"]) == 0
    _check(Path("both.html").read_text(encoding="utf-8"))
    assert "optimizer.lr" in capsys.readouterr().out
    sweep = write_sweep(tmp_path / "runs/a/sweeps/3")
    assert main(["report", str(sweep), "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["page"]) == sweep / "report.html"
    assert main(["report", "nowhere"]) == 2
    assert main(["report", str(one), "--htm", "x"]) == 2
    assert main(["report", str(one), "--no-plan", "--html", "no/such/folder/page.html"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_model_that_cannot_be_made_here_leaves_only_the_estimate_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs/a/1", model={"_target_": "gone.Model"})
    assert main(["report", str(folder), "--quiet"]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    _check(page)
    assert "No estimate here:" in page and "<h2>Curves</h2>" in page


def test_a_running_run_shows_its_monitored_metric_and_its_eta(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    run.status, run.summary, run.config = "running", {}, {"epochs": 4, "devices": 8}
    run.records = [
        {"split": "train", "step": 10, "epoch": 0.5, "loss": 1.0, "time": 100.0},
        {"split": "test", "step": 10, "epoch": 0.5, "loss": 0.5, "accuracy": 0.75, "is_best": True, "time": 102.0},
        {"split": "train", "step": 20, "epoch": 1.0, "loss": 0.5, "time": 110.0},
    ]
    assert (run.monitor, run.best, run.progress) == ("accuracy", 0.75, 0.25)
    assert run.eta_seconds == pytest.approx(60.0)  # 60 steps, each of one second
    text = run_page(run)
    assert "<b>1:00</b><span>to go (ETA)</span>" in text
    assert "<b>0.7500</b><span>best accuracy</span>" in text
    assert "<b>20</b><span>weight updates of 80</span>" in text


def test_a_failed_run_begins_with_its_reason_and_what_to_try(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    log = "Traceback\nipurun.Error: error: the loss became nan\n  try    a smaller <lr>,\n         or another loss\n"
    (folder / "log.txt").write_text(log, encoding="utf-8")
    run = read_run(folder)
    run.status, run.summary = "failed", {"status": "failed", "reason": "the loss became nan"}
    text = run_page(run)
    assert text.index('class="outcome bad"') < text.index('class="tiles"')
    assert "<dt>try</dt><dd>a smaller &lt;lr&gt;, or another loss</dd>" in text  # one line: a page wraps it itself


def test_a_trace_below_the_reason_keeps_its_lines(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "log.txt").write_text("error: no <file>\nat line 1\n  in f\n", encoding="utf-8")
    run = read_run(folder)
    run.status, run.summary = "failed", {"status": "failed", "reason": "no <file>"}
    assert "<pre>at line 1\n  in f</pre>" in run_page(run)


def test_tiles_fill_their_rows() -> None:
    assert "--one-row:8;--two-rows:4" in tiles([(str(place), "x") for place in range(8)])
    assert "--one-row:7;--two-rows:4" in tiles([("setting", "y" * 21), *((str(place), "x") for place in range(5))])


@pytest.mark.parametrize(
    ("texts", "labels"),
    [(["0.001", "0.01", "0.1"], ["0.001", "0.01", "0.1"]), (["adam", "sgd"], ["adam", "sgd"])],
)
def test_a_swept_key_is_labelled_with_its_values(texts: List[str], labels: List[str]) -> None:
    points = [(text, 0.5 + place, f"point {place}") for place, text in enumerate(texts)]
    chart = value_by_key("optimizer.lr", "accuracy", points, 0)
    assert re.findall(r'text-anchor="middle">([^<]+)<', chart) == ["optimizer.lr", *labels]


def test_a_single_value_is_drawn_as_a_dot_at_a_whole_step() -> None:
    chart = line_chart("loss", [Series("train", [1], [2.5])], name="c")
    assert 'class="dots c0"' in chart
    assert re.findall(r'text-anchor="middle">([^<]+)<', chart) == ["step", "0", "1", "2"]


def test_only_values_that_have_a_logarithm_and_a_wide_range_offer_one() -> None:
    shown = [line_chart("loss", [Series("train", [1, 2], ys)], name="c") for ys in ([2, 0.01], [2, 1], [2, -0.01])]
    assert ['class="log"' in chart for chart in shown] == [True, False, False]


def test_values_that_cannot_be_drawn_are_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    losses = [record for record in run.records if record["split"] == "train"]
    losses[1]["loss"], losses[2]["loss"] = float("nan"), float("inf")
    step = losses[1]["step"]
    assert f"train loss: 2 of {len(losses)} values not finite, first at step {step}" in run_page(run)


def test_compared_curves_have_the_titles_of_a_report(tmp_path: Path) -> None:
    text = compare_page([read_run(write_run(tmp_path / name)) for name in "ab"])
    assert "<b>learning rate</b>" in text and "samples per second" not in text
