"""The live view of training in a terminal: colours, narrow and limited terminals."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
from typing import Any, Callable, List

import pytest
from rich.console import Console as RichConsole

from ipurun.cli.common import show_problems
from ipurun.errors import ConfigError
from ipurun.log.console import Console
from ipurun.log.screen import TrainingState, make_screen
from ipurun.log.style import block_bar, paint_plan, plot, print_table, sparkline
from ipurun.log.terminal import TrainingView
from ipurun.planning.plan import Plan
from ipurun.training.events import CheckpointSaved, CompileEnd, CompileStart, EvalEnd, EvalProgress, StepEnd
from ipurun.training.interrupts import Interrupts


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def _drawn(state: TrainingState, width: int, blocks: bool = True) -> List[str]:
    console = RichConsole(file=io.StringIO(), width=width, color_system=None)
    console.print(TrainingView(state, blocks).draw(width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def _state(step: Callable[..., StepEnd]) -> TrainingState:
    best = EvalEnd(32, 1.0, "test", {"loss": 0.31, "accuracy": 0.93}, 1000, 0.4, "accuracy", True)
    event = step(step=40, data_wait=0.25)
    return TrainingState(event, best, None, best, saved_step=32, save_intervals=[32, 50])


def test_eighty_columns_have_all_that_matters_with_the_eta_first(step: Callable[..., StepEnd]) -> None:
    lines = _drawn(_state(step), 80)
    assert lines[0] == "ETA 1:23  ███████████████░░░░░░░░░  62%  step 40/64  epoch 0.25"
    assert lines[1] == "loss 2.303  ▁  51,234 samples/s  lr 0.05  data wait 25%"
    assert lines[2] == "test accuracy 0.9300  best accuracy 0.9300 at 32  next save at 50"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100])
@pytest.mark.parametrize("blocks", [True, False])
def test_no_line_reaches_the_edge_and_the_eta_stays(step: Callable[..., StepEnd], width: int, blocks: bool) -> None:
    state = _state(step)
    state.evaluating = EvalProgress("test", 500, 1000)
    state.message = "SIGINT: saving after this host call; again to stop now"
    lines = _drawn(state, width, blocks)
    assert lines[0].startswith("ETA 1:23") and "62%" in lines[0]
    assert any(line.startswith("loss 2.30") for line in lines)
    assert max(map(len, lines)) <= width - 4  # ^C is echoed there
    if not blocks:
        assert "".join(lines).isascii()


def test_a_stream_without_an_end_has_neither_bar_nor_eta(step: Callable[..., StepEnd]) -> None:
    lines = _drawn(TrainingState(step(total_steps=None, eta_seconds=None)), 80)
    assert lines[0].startswith("step 8  epoch") and "ETA" not in lines[0]


def test_the_loss_is_smoothed_and_its_history_stays_short(step: Callable[..., StepEnd]) -> None:
    state = TrainingState(step())
    view = TrainingView(state)
    for number in range(1000):
        state.step = step(step=number, loss=float(number % 2))
        view.draw(80)
    assert 0.3 < float(re.search(r"loss ([\d.]+)", str(view.draw(80).renderables[1]))[1]) < 0.7  # type: ignore[index]
    assert len(view._losses) <= 241


def test_the_loss_of_a_fast_run_does_not_lag(step: Callable[..., StepEnd]) -> None:
    state = TrainingState(step())
    view = TrainingView(state)
    for call, loss in ((1, 2.0), (50, 0.5), (100, 0.1), (150, 0.1)):  # many host calls between redraws
        state.step = step(step=call, call=call, loss=loss)
        shown = str(view.draw(80).renderables[1])
    assert float(re.search(r"loss ([\d.]+)", shown)[1]) < 0.2  # type: ignore[index]


def test_a_followed_run_draws_no_line_for_a_step(step: Callable[..., StepEnd], plan: Plan) -> None:
    terminal = Terminal()
    screen = make_screen(terminal)
    console = Console(screen, plan=plan)
    console.on_step(step())
    calls: List[Any] = []
    screen.live = lambda *args: calls.append(args)  # type: ignore[method-assign]
    for number in range(9, 64):
        console.on_step(step(step=number))
    console.on_checkpoint(CheckpointSaved(16, "x.pt", 0.1))
    screen.close()
    assert calls == [] and "ETA 1:23" in terminal.getvalue()


def test_the_live_view_is_back_when_an_evaluation_has_compiled(step: Callable[..., StepEnd]) -> None:
    screen = make_screen(Terminal())
    console = Console(screen)
    console.on_compile_end(CompileEnd("training", 0.1, "off"))
    assert not console._is_followed  # there is nothing to show yet
    console.on_step(step())
    console.on_compile_start(CompileStart("inference"))
    assert not console._is_followed
    console.on_compile_end(CompileEnd("inference", 0.1, "off"))
    assert console._is_followed
    screen.close()


def test_live_lines_are_not_redrawn_while_another_line_is_written(step: Callable[..., StepEnd]) -> None:
    screen: Any = make_screen(Terminal())
    screen.follow(TrainingState(step()))
    redraw = threading.Thread(target=screen._live.refresh)
    with screen._console:
        redraw.start()
        redraw.join(0.3)
        assert redraw.is_alive()
    redraw.join(30)
    assert not redraw.is_alive()
    screen.close()


def test_an_interrupt_is_announced_in_the_live_view_and_not_across_it(
    step: Callable[..., StepEnd], plan: Plan, capfd: Any, summary: Any
) -> None:
    terminal = Terminal()
    console = Console(make_screen(terminal), plan=plan)
    console.on_step(step())
    with Interrupts() as interrupts:
        interrupts.arm()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested
    assert "saving after this host call" in console._state.message
    assert capfd.readouterr().err == ""
    console.on_end(summary)
    with Interrupts() as interrupts:
        interrupts.arm()
        os.kill(os.getpid(), signal.SIGINT)
    assert "saving after this host call" in capfd.readouterr().err


def test_a_panel_overwrites_an_echoed_interrupt() -> None:
    terminal = Terminal()
    terminal.write("^C")
    make_screen(terminal).panel("digits: interrupted", [("steps", "8")])
    assert terminal.getvalue().startswith("^C\r\x1b[2K")


def test_an_error_is_red_with_its_key_marked(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("unknown key `device`", "command line: device=8", fix="devices=8", key="device")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    show_problems(error)
    text = stream.getvalue()
    assert (
        "\x1b[1;31merror:\x1b[0m" in text and "\x1b[1;33m`device`\x1b[0m" in text and "\x1b[1;33mdevice=\x1b[0m" in text
    )
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == f"{error}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr", Terminal())
    show_problems(error)
    import sys

    assert sys.stderr.getvalue() == f"{error}\n"  # type: ignore[attr-defined]


def test_what_an_error_says_on_its_next_lines_has_the_same_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr", stream)
    show_problems(ConfigError("`model.hiden`: " + "word " * 6 + "`hiden`", seen="x " * 30, fix="do " * 20))
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("  \x1b[1m") and "\x1b[1;33m`hiden`\x1b[0m" in lines[1]
    assert [line for line in lines if " x x" in line][1].startswith(" " * 9 + "x")
    assert all("\x1b[32mdo" in line for line in lines if "do do" in line)


PLAN = """plan of toy
  devices    8 IPUs = 8 replicas x 1 IPU, 1 stage and many more words than fit in one line

memory of each IPU
    0  [######......] 50% fits
    1  [############] 97% tight
    2  [###########>] 140% does not fit

what would help
  1. less
     'pipeline.layers_per_ipu=[]' devices=16 and=a_command_that_is_longer_than_the_line
"""


def test_a_plan_has_verdicts_in_colours_and_bars_in_blocks() -> None:
    text = paint_plan(PLAN, 60)
    assert "\x1b[32m██████\x1b[0m\x1b[2m░░░░░░\x1b[0m 50% \x1b[32mfits\x1b[0m" in text
    assert "97% \x1b[33mtight\x1b[0m" in text and "140% \x1b[31mdoes not fit\x1b[0m" in text
    assert "'pipeline.layers_per_ipu=[]' devices=16 and=a_command_that_is_longer_than_the_line" in text
    plain = paint_plan(PLAN, 60, blocks=False, colour=False)
    assert "\x1b" not in plain and plain.isascii() and "[######......] 50% fits" in plain
    devices = [line for line in plain.splitlines() if "words" in line or "devices  " in line]
    assert devices[1].startswith(" " * 13)


def test_a_comment_in_the_code_of_a_plan_is_not_torn() -> None:
    code = f"  opts.setAvailableMemoryProportion({'x' * 20})  # memory.available_proportion"
    assert paint_plan(f"in PopTorch\n{code}", 70, colour=False).splitlines()[1:] == [
        code.partition("  # ")[0],
        "      # memory.available_proportion",
    ]


def test_curves_are_drawn_on_one_picture() -> None:
    steps = [float(step) for step in range(1, 101)]
    curves = [("falls", steps, [100.0 - step for step in steps]), ("stays", steps[:50], [50.0] * 50)]
    shown = plot("loss", curves, 40, height=5, blocks=False, colour=False)
    assert shown[0] == "loss" and shown[1].startswith("99 |aaaa") and shown[5].startswith(" 0 |") and "aaa" in shown[5]
    assert shown[3].strip(" |").startswith("b") and "*" in shown[3] and not shown[3].endswith("b")
    assert shown[7].split() == ["1", "step", "100"] and [line.strip() for line in shown[8:]] == ["a falls", "b stays"]
    assert max(map(len, shown)) <= 40 and "".join(shown).isascii()
    in_colour = "\n".join(plot("loss", [("one", steps, [10.0**-step for step in steps])], 40))
    assert "loss\x1b[0m (logarithmic)" in in_colour and "\x1b[36m\u2832\x1b[0m" in in_colour
    many = plot("loss", [(str(number), [0.0, 1.0], [1.0, 2.0]) for number in range(8)], 40)
    assert many[-1].strip() == "and 2 more"
    assert plot("loss", [("one", [1.0], [2.0]), ("none", [2.0], [float("nan")])], 40) == []


def test_bars_and_sparklines() -> None:
    assert block_bar(0.5, 4) == "██░░" and block_bar(2.0, 4) == "████" and block_bar(float("nan"), 2) == "░░"
    assert block_bar(0.5, 4, blocks=False) == "##.."
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([float("nan"), float("inf")], 8) == "" and len(sparkline(range(1000), 8)) == 8
    assert sparkline([1.0, 1.0], 8, blocks=False) == "__"


def test_a_table_drops_columns_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "20")
    print_table(stream, ["name", "long", "number"], [["run", "x" * 30, "1,234"]], numeric=(2,), droppable=(1,))
    assert "1,234" in stream.getvalue() and "xxx" not in stream.getvalue()
    plain = io.StringIO()
    print_table(plain, ["name", "number"], [["run", "1,234"]])
    assert plain.getvalue() == "name  number\n----  ------\nrun   1,234\n"
