from __future__ import annotations

import io
import os
import re
from typing import List

import pytest

from ipurun.log.screen import PlainScreen, SilentScreen, error_screen, fit, make_screen, narrowed
from ipurun.log.style import draws_blocks, folded, print_table
from ipurun.log.terminal import TerminalScreen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _lines(stream: io.StringIO) -> List[str]:
    return stream.getvalue().splitlines()


def test_a_pipe_gets_plain_lines_and_a_terminal_is_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert type(make_screen(io.StringIO())) is PlainScreen
    assert type(make_screen(Terminal())) is TerminalScreen
    assert type(make_screen(Terminal(), quiet=True)) is SilentScreen


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_screen(Terminal())) is PlainScreen


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    make_screen(coloured).panel("title", [("label", "text")])
    monkeypatch.setenv("NO_COLOR", "1")
    make_screen(plain).panel("title", [("label", "text")])
    assert "\x1b[" in coloured.getvalue() and "36m" in coloured.getvalue()
    assert "36m" not in plain.getvalue()


def test_live_lines_are_limited_in_time() -> None:
    stream, clock = io.StringIO(), Clock()
    screen = PlainScreen(stream, interval_seconds=10, clock=clock)
    for second in range(25):
        clock.now = float(second)
        screen.live([f"at {second}"])
    assert _lines(stream) == ["at 0", "at 10", "at 20"]


def test_every_tenth_of_a_quick_run_is_shown() -> None:
    stream = io.StringIO()
    screen = PlainScreen(stream, clock=lambda: 0.0)
    for step in range(1, 101):
        screen.live([f"step {step}"], step / 100)
    assert _lines(stream) == ["step 1"] + [f"step {step}" for step in range(10, 101, 10)]


def test_a_phase_is_written_only_when_it_changes() -> None:
    stream = io.StringIO()
    screen = PlainScreen(stream)
    screen.begin("compiling")
    for phase in ("tracing", "tracing", "lowering"):
        screen.phase(phase)
    screen.end("compiled in 2.0 s")
    assert _lines(stream) == ["compiling ...", "  tracing", "  lowering", "compiled in 2.0 s"]


def test_a_closed_pipe_does_not_end_a_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        screen = PlainScreen(stream)
        for number in range(3):
            screen.line(f"line {number}")
        assert stream.writable()


def test_long_rows_wrap_under_their_text() -> None:
    stream = io.StringIO()
    PlainScreen(stream).panel("title", [("label", "word " * 40)])
    lines = _lines(stream)
    assert len(lines) > 2 and max(map(len, lines)) <= 112
    assert lines[2].startswith("  " + " " * 12 + "word")


def test_a_narrow_terminal_keeps_the_most_important_parts() -> None:
    assert fit(["step 1/10", "loss 0.5", "lr 0.1", "12 samples/s"], 20) == "step 1/10  loss 0.5"
    assert fit(["step 1/10", "a part that is far too long", "lr 0.1"], 20) == "step 1/10  lr 0.1"


def test_the_terminal_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    screen = make_screen(terminal)
    screen.begin("compiling for training")
    screen.end("compiled")
    screen.live(["step 1"])
    screen.close()
    screen.close()
    text = terminal.getvalue()
    assert text.count("\x1b[?25h") >= text.count("\x1b[?25l") >= 1  # the cursor is shown again
    assert "compiled" in text


def test_a_long_wait_is_shown_from_time_to_time() -> None:
    now = [0.0]
    stream = io.StringIO()
    screen = PlainScreen(stream, interval_seconds=10, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        if screen.wants_waiting():
            screen.waiting(f"eval: {second} of 25 samples", second / 25)
    assert _lines(stream) == ["  eval: 10 of 25 samples", "  eval: 20 of 25 samples"]


def test_a_wait_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    screen = make_screen(terminal)
    assert screen.wants_waiting()
    screen.waiting("eval: 5 of 10 samples", 0.5)
    assert not screen.wants_waiting()  # a moment later
    screen.close()
    assert "############............ eval: 5 of 10 samples" in terminal.getvalue()


def test_a_locale_without_utf_8_gets_no_block_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")  # what Python gives for the locale C
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("LC_ALL", "C")
    screen = TerminalScreen(stream)
    screen.panel("run: finished", [("steps", "200")])
    screen.notes(["a note"])
    stream.flush()
    shown = stream.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]
    assert shown.isascii() and "a note" in shown and "+-" in shown


def test_points_are_shortened_before_their_values_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    screen = TerminalScreen(stream)
    label = "[1/30] optimizer.lr=0.0005 device_iterations=16 gradient_accumulation=2"
    screen.live_table(["point", "done", ""], [[label, "50%", "ETA 12 s  loss 0.5  " + "x" * 60]], "0 of 30 finished")
    screen.close()
    row = next(line for line in stream.getvalue().splitlines() if "[1/30]" in line)
    assert "[1/30] 0.0005 16 2" in row and "50%" in row and "ETA 12 s" in row and "xxx" not in row


def test_a_dumb_terminal_wraps_notes_at_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    PlainScreen(stream).remark("note: " + "word " * 20)
    assert max(map(len, _lines(stream))) <= 40 and _lines(stream)[1].startswith("  word")


def test_one_long_name_leaves_the_other_columns_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    print_table(stream, ["run", "status", "steps"], [["x" * 300, "interrupted", "1,000"]], numeric=(2,))
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in _lines(stream)) <= 60
    assert "interrupted" in _lines(stream)[2] and "1,000" in _lines(stream)[2]
    assert stream.getvalue().count("x") == 300


def test_a_narrow_table_folds_headings_and_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    header = ["optimizer.lr", "gradient_accumulation", "best accuracy", "samples/s"]
    print_table(stream, header, [["0.0005", "16", "0.9770", "1,234,567"]], numeric=(2, 3))
    row = _lines(stream)[-1]
    assert all(text in row for text in ("0.0005", "16", "0.9770", "1,234,567"))


def test_what_is_too_long_is_broken_at_the_parts_of_a_name_and_not_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "44")
    stream = Terminal()
    header = ["optimizer.lr", "best", "folder"]
    print_table(stream, header, [["0.0005", "acc 0.9770", "runs/digits/2026-11-18_20-00-52"]])
    words = re.sub(r"\x1b\[[\d;]*m", " ", stream.getvalue()).split()
    assert {"optimizer.", "lr", "0.0005", "acc", "0.9770", "2026-11-18_", "20-00-52"} <= set(words)
    assert folded("loss of model.encoder.layer 0.9770", 13) == ["loss of", "model.", "encoder.layer", "0.9770"]
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    print_table(stream, header, [["0.0005", "acc 0.9770", "runs/digits/" + "x" * 45]])
    assert "runs/digits/" + "x" * 45 in stream.getvalue()  # there is room for it


def test_a_terminal_breaks_long_lines_between_words_but_not_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = "  resume  ipurun train resume=runs/digits epochs=3"
    for name in ("xterm-256color", "dumb"):
        monkeypatch.setenv("TERM", name)
        stream = Terminal()
        screen = make_screen(stream)
        screen.line(text, to_copy=True)
        screen.line(text)
        whole, *broken = stream.getvalue().replace("\r\x1b[2K", "").splitlines()
        assert whole == text
        assert broken == ["  resume  ipurun train", "    resume=runs/digits", "    epochs=3"]
    pipe = io.StringIO()
    make_screen(pipe).line(text * 9)
    assert len(_lines(pipe)) == 1


def test_a_table_fits_on_a_narrow_terminal_that_cannot_be_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    table = ["rank", "status", "loss", "reason"], [["1", "finished", "0.4105", "the loss became nan at step 2"]]
    for is_printed in (True, False):
        stream = Terminal()
        if is_printed:
            print_table(stream, *table, numeric=(0, 2))
        else:
            make_screen(stream).table(*table, numeric=(0, 2))
        assert max(map(len, _lines(stream))) <= 40 and "\x1b" not in stream.getvalue()
        assert "0.4105" in stream.getvalue() and "became nan" in " ".join(stream.getvalue().split())


def test_a_problem_of_a_point_is_wrapped_below_its_labels_and_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    make_screen(stream).line(
        "[2/2] lr=1 failed\nerror: `lr` is too large\n  try    a smaller one, such as 0.001 or so\n"
    )
    text = stream.getvalue()
    assert "\x1b[1;31merror:" in text and "\x1b[32ma smaller one" in text
    plain = re.sub(r"\x1b\[[\d;]*[mK]|\r", "", text).splitlines()
    assert plain[:4] == [
        "[2/2] lr=1 failed",
        "error: `lr` is too large",
        "  try    a smaller one, such as 0.001 or",
        "         so",
    ]


def test_errors_do_not_cross_the_lines_that_a_terminal_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stderr", Terminal())
    drawn, quiet = make_screen(Terminal()), make_screen(Terminal(), quiet=True)
    assert error_screen(drawn) is drawn
    assert type(error_screen(quiet)) is TerminalScreen  # on standard error
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert type(error_screen(drawn)) is PlainScreen


def test_the_live_table_of_a_narrow_terminal_has_shares_in_place_of_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    for columns, expected in (
        ("40", "[1/2] lr=0.1  12%   ETA 3.0 s"),
        ("80", "[1/2] lr=0.1  2.0 s  #.......  12%  ETA 3.0 s"),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        stream = Terminal()
        screen = make_screen(stream)
        screen.live_table(["point", "time", "done", ""], [["[1/2] lr=0.1", "2.0 s", "12%", "ETA 3.0 s"]])
        screen.close()
        assert expected in stream.getvalue()


def test_escape_sequences_in_names_and_values_are_shown_and_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    evil = "\x1b[2Jname\x07"
    for stream in (Terminal(), io.StringIO()):
        screen = make_screen(stream)
        screen.panel(evil, [(evil, evil)])
        screen.line(evil)
        screen.remark(f"warning: {evil}")
        screen.notes([evil])
        screen.table([evil], [[evil]])
        screen.result(evil)
        screen.close()
        assert "\x1b[2J" not in stream.getvalue() and "\x07" not in stream.getvalue()
        assert stream.getvalue().count("\\x1b[2Jname\\x07") == 9


def test_a_dumb_terminal_keeps_the_eta_and_does_not_break_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    screen = make_screen(stream)
    screen.live(
        ["step 1/200", "loss 2.3", "lr 0.002", "1,701 samples/s", "data wait 10%", "ETA 1 min", "not saved yet"]
    )
    screen.result("step 50  epoch 1.00  test: loss 0.2650  accuracy 0.9280  [1,000 samples, 0.1 s]")
    first, second = _lines(stream)
    assert first == "step 1/200  loss 2.3  lr 0.002  1,701 samples/s  ETA 1 min"
    assert second == "step 50  epoch 1.00  test: loss 0.2650  accuracy 0.9280"


def test_python_setting_lc_ctype_does_not_make_a_c_locale_draw_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("LC_CTYPE", "C.UTF-8")
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    for language, blocks in (("C", False), ("POSIX", False), ("C.UTF-8", True), ("de_DE.UTF-8", True)):
        monkeypatch.setenv("LANG", language)
        assert draws_blocks(stream) is blocks


def test_the_line_of_an_evaluation_breaks_between_its_fields() -> None:
    text = "step 100  epoch 2.00  test: loss 0.1619  accuracy 0.9570  (best so far)  [1,000 samples, 0.1 s]"
    assert narrowed(text, 100) == text
    assert narrowed(text, 80) == "step 100  epoch 2.00  test: loss 0.1619  accuracy 0.9570  (best so far)"
    assert narrowed(text, 40) == "step 100  test: loss 0.1619\n  accuracy 0.9570  (best so far)"
