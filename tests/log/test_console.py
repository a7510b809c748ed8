from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Callable, List

from ipurun.config.compose import ChangedKey, Point
from ipurun.log.console import Console, final_line
from ipurun.log.screen import PlainScreen
from ipurun.planning.plan import Plan
from ipurun.training.events import (
    CheckpointSaved,
    CompileEnd,
    CompileStart,
    EvalEnd,
    Note,
    RunStart,
    StepEnd,
    Summary,
)


def _said(tell: Callable[[Console], None]) -> List[str]:
    stream = io.StringIO()
    tell(Console(PlainScreen(stream)))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_the_panel_shows_what_will_run(point: Point, plan: Plan) -> None:
    lines = _said(lambda console: console.show_panel(point, plan, "runs/digits/x"))
    assert lines == [
        "ipurun train: digits",
        "recipe mnist",
        "changed devices=8 (command line)",
        "epochs=2, loader.shuffle=false (conf/recipe/mnist.yaml)",
        "engine cpu: emulator of PopTorch 3.4.0",
        "devices 8 IPUs = 4 replicas x 2 IPUs, 1 stage",
        "batch micro-batch 16 x device_iterations 8 x accumulation 2 x replicas 4 = 1,024 samples per host call",
        "precision 16.16",
        "steps 64 weight updates in 8 host calls (2 epochs)",
        "run folder runs/digits/x",
        "note: max_steps is rounded up from 60 to 64",
    ]


def test_a_long_recipe_does_not_flood_the_panel(point: Point, plan: Plan) -> None:
    many = tuple(ChangedKey(f"data.a{number}", number, f"conf/recipe/big.yaml:{number}") for number in range(20))
    lines = _said(lambda console: console.show_panel(replace(point, changed=many), plan, "x"))
    assert "data.a5=5, and 14 more (conf/recipe/big.yaml)" in " ".join(lines)


def test_a_file_of_a_group_is_shown_as_a_choice(point: Point, plan: Plan) -> None:
    changed = (
        ChangedKey("name", "digits", "derived"),
        ChangedKey("model._target_", "ipurun.recipes.mnist.model.DigitNet", "ipurun/conf/model/digit_net.yaml:3"),
        ChangedKey("optimizer.lr", 0.1, "ipurun/conf/optimizer/adamw.yaml:2"),
        ChangedKey("optimizer.weight_decay", 0.5, "conf/recipe/mine.yaml:7"),
    )
    lines = _said(lambda console: console.show_panel(replace(point, changed=changed), plan, "x"))
    assert lines[2:4] == [
        "changed optimizer.weight_decay=0.5 (conf/recipe/mine.yaml)",
        "model=digit_net, optimizer=adamw (groups)",
    ]
    assert lines[4].startswith("engine")


def test_compilation_shows_its_time_and_what_the_cache_did() -> None:
    def tell(console: Console) -> None:
        console.on_compile_end(CompileEnd("training", 83.0, "miss"))
        console.on_compile_end(CompileEnd("training", 2.0, "hit", saved_seconds=372.0))
        console.on_compile_end(CompileEnd("inference", 0.5, "hit"))
        console.on_compile_end(CompileEnd("inference", 0.5, "uncached", why="compiling takes less than 2 s"))
        console.on_compile_end(CompileEnd("inference", 0.5))

    assert _said(tell) == [
        "compiled for training in 1:23; executable cache: miss for training",
        "loaded for training in 2.0 s; executable cache: hit for training, saved 6 min 12 s",
        "loaded for inference in 0.5 s; executable cache: hit for inference",
        "compiled for inference in 0.5 s",
        "compiled for inference in 0.5 s",
    ]


def test_only_one_compile_bar_is_drawn(tmp_path: Path) -> None:
    class Bars(PlainScreen):
        draws_over = True

        def begin(self, title: str) -> None:
            raise AssertionError("a bar")

    stream = io.StringIO()
    Console(Bars(stream), engine_draws_bar=True).on_compile_start(CompileStart("training"))
    assert stream.getvalue() == "compiling for training ...\n"


def test_the_live_line_has_everything(step: Callable[..., StepEnd]) -> None:
    def tell(console: Console) -> None:
        console.on_step(step())
        console.on_checkpoint(CheckpointSaved(8, "x.pt", 0.1))
        console.on_step(step(step=64, metrics={"accuracy": 0.5}, eta_seconds=0.0))

    first, last = _said(tell)
    assert first == ("step 8/64 loss 2.303 lr 0.05 51,234 samples/s 23.4 ms/call data wait 3% ETA 1:23 not saved yet")
    assert "saved at 8" in last and "accuracy 0.5000" in last


def test_a_stream_without_length_has_no_total(step: Callable[..., StepEnd]) -> None:
    (line,) = _said(lambda console: console.on_step(step(total_steps=None, eta_seconds=None)))
    assert line.startswith("step 8 loss") and "ETA -" in line


def test_an_evaluation_stays_on_the_screen() -> None:
    event = EvalEnd(32, 1.0, "test", {"loss": 0.31, "accuracy": 0.93}, 1000, 0.4, "accuracy", True)
    (line,) = _said(lambda console: console.on_eval(event))
    assert line == "step 32 epoch 1.00 test: loss 0.3100 accuracy 0.9300 (best so far) [1,000 samples, 0.4 s]"


def test_notes_and_resuming_are_shown() -> None:
    def tell(console: Console) -> None:
        console.on_start(RunStart("digits", "runs/x", 32, 64, "runs/x/step-32.pt"))
        console.on_note(Note("the loss scale is large", "warning"))

    assert _said(tell) == [
        "resuming after step 32, from runs/x/step-32.pt",
        "warning: the loss scale is large",
    ]


def test_the_summary_has_results_times_and_commands(summary: Summary) -> None:
    lines = _said(
        lambda console: console.show_summary(summary, "digits", "runs/digits/x", "ipurun train +recipe=mnist")
    )
    assert lines == [
        "digits: finished",
        "steps 64 weight updates, 2 epochs",
        "final train loss 0.03100 eval loss 0.2100 accuracy 0.9634",
        "best accuracy 0.9712 at step 32",
        "speed 51,000 samples/s, excluding compilation",
        "time 1:15: compile 1.5 s, train 1:02, eval 8.0 s, checkpoint 0.2 s, data wait 3.0 s",
        "checkpoint runs/digits/x/checkpoints/step-00000064.pt",
        "run folder runs/digits/x",
        "resume ipurun train resume=runs/digits/x",
        "reproduce ipurun train +recipe=mnist",
    ]


def test_a_quiet_run_has_one_line(summary: Summary) -> None:
    assert final_line(summary, "digits", "runs/digits/x") == (
        "digits: finished after 64 steps, loss 0.2100, accuracy 0.9634, best accuracy 0.9712, "
        "51,000 samples/s, 1:15, runs/digits/x"
    )
