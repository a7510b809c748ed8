"""The command line itself: help, unknown words, Hydra's own flags and tab completion."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, List

import pytest

from ipurun import __version__
from ipurun.cli.main import COMMANDS, collect_as_usual, console, main
from ipurun.config import completion
from ipurun.training.failures import DeviceFault


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "ipurun", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ipurun {__version__}\n"


def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture) -> None:
    assert main(["trian"]) == 2
    text = capsys.readouterr().err
    assert "unknown command `trian`" in text
    assert "ipurun train" in text


def test_a_config_error_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "+recipe=mnist", "device=8", "--json"]) == 2
    captured = capsys.readouterr()
    assert '"what": "unknown key `device`"' in captured.out
    assert captured.err == ""


def test_hydra_shows_the_resolved_config() -> None:
    shown = run("train", "+recipe=mnist", "devices=4", "--cfg", "job", "--resolve")
    assert shown.returncode == 0, shown.stderr
    assert "devices: 4" in shown.stdout
    assert "_target_: ipurun.recipes.mnist.model" in shown.stdout


def test_hydra_shows_the_defaults_tree() -> None:
    shown = run("plan", "--info", "defaults-tree", "+recipe=mnist")
    assert shown.returncode == 0, shown.stderr
    assert "recipe: mnist" in shown.stdout


def test_hydra_is_not_asked_about_a_config_with_problems() -> None:
    shown = run("train", "+recipe=mnist", "device=4", "--cfg", "job")
    assert shown.returncode == 2
    assert "unknown key `device`" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_flag_without_the_one_it_belongs_to(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "+recipe=mnist", "--resolve"]) == 2
    assert "`--resolve` goes with --cfg" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    script = run("-sc", f"install={shell}")
    assert script.returncode == 0, script.stderr
    assert "complete" in script.stdout


def completed(line: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, shell: str = "bash") -> str:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", f"query={shell}"]) == 0
    return str(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ipurun tr", "train"),
        ("ipurun train +recipe=mn", "+recipe=mnist"),
        ("ipurun compile +recipe=mn", "+recipe=mnist"),
        ("ipurun train device_it", "device_iterations="),
        ("ipurun train device_iterations=", "device_iterations=1"),
        ("ipurun plan optimizer=adamw loader.shu", "loader.shuffle="),
        ("ipurun plan optimizer=adamw optimizer.we", "optimizer.weight_decay="),
        ("ipurun train loader.shuffle=", "loader.shuffle=true loader.shuffle=false"),
        ("ipurun train --quiet loader.mode=async_", "loader.mode=async_rebatched"),
        ("ipurun train init_from=./we", "init_from=./weights.pt"),
        ("ipurun train seed=1", ""),
        ("ipurun cat mn", ""),
    ],
)
def test_completion_answers_below_the_commands(
    line: str, expected: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("weights.pt").touch()
    assert completed(line, capsys, monkeypatch) == expected + "\n"


def test_completion_for_fish_has_an_answer_on_each_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed("ipurun train dev", capsys, monkeypatch, "fish") == "device_iterations=\ndevices=\n"


def test_completion_without_hydra_answers_as_hydra_does(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("recipe/mine", "recipe/sub/deep", "parts/one/first", "model/my_model"):
        path = Path("conf", f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    words = ["", "+", "~", "opt", "+recipe", "recipe=m", "+recipe/", "model=", "+parts/", "-m loader.s", "unknown"]
    words += [f"+recipe=bert pipeline=bert_base_4ipu {section}" for section in ("pipeline.", "inference.", "security.")]
    words += [
        f"+recipe={recipe} {section}"
        for recipe in ("gpt", "resnet")
        for section in ("model.", "metrics.", "optimizer.w")
    ]
    words += [
        "+recipe=gpt model=gpt2_small model.",
        "optimizer=sgd optimizer.",
        "callbacks.",
        "+optimizer.new=1 optimizer.n",
    ]
    lines = [f"ipurun train {word}" for word in words]
    ours = [completed(line, capsys, monkeypatch) for line in lines]
    monkeypatch.setattr(completion, "answer", lambda *_: None)
    assert ours == [completed(line, capsys, monkeypatch) for line in lines]


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m ipurun ls keys | head -n 1"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


def test_cfg_shows_what_a_run_would_get_where_a_group_was_chosen(capsys: pytest.CaptureFixture) -> None:
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mine.yaml").write_text(
        "# @package _global_\noptimizer:\n  _target_: poptorch.optim.AdamW\n  lr: 0.5\n  betas: [0.8, 0.9]\n"
    )
    assert main(["train", "+recipe=mine", "optimizer=sgd", "--cfg", "job", "--package", "optimizer"]) == 0
    shown = capsys.readouterr().out
    assert "poptorch.optim.SGD" in shown
    assert "betas" not in shown


def test_cfg_shows_patterns_that_hydra_cannot_read(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "+recipe=mnist", 'precision_rules={"*.norm": 32}', "--cfg", "job"]) == 0
    assert "'*.norm': '32'" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "validate", "train"])
def test_advice_names_the_command_that_was_typed(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([command, "+recipe=mnist", "device=8"]) == 2
    assert f"ipurun {command} +recipe=mnist devices=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "what", "shown"),
    [
        ("validate --devices 8", "unknown flag `--devices`", "devices=VALUE, without dashes"),
        ("train --devices=8", "unknown flag `--devices=8`", "devices=8, without dashes"),
        ("train +recipe=mnist --cfg nope", "`--cfg` cannot be `nope`", "job, hydra, all"),
        ("train --config-name nope", "no config `nope`", "nope.yaml"),
    ],
)
def test_a_wrong_flag_gets_one_block(line: str, what: str, shown: str, capsys: pytest.CaptureFixture) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and what in error and shown in error


def test_an_unknown_engine_is_reported_once(capsys: pytest.CaptureFixture) -> None:
    assert main(["validate", "+recipe=mnist", "engine=gpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "auto, ipu, ipu_model, cpu" in error


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["validate", "+recipe=mnist"]) == 2
    assert "the working folder no longer exists" in capsys.readouterr().err


def test_bytes_that_are_not_text(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "+recipe=mnist", os.fsdecode(b"name=caf\xe9")]) == 2
    message = capsys.readouterr().err
    assert "not UTF-8 text" in message
    assert "caf\\xe9" in message


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("metrics.x=3", "`metrics.x` takes a mapping"),
        ("metrics.accuracy.on=3", "`metrics.accuracy.on`: `3` is not a phase of a run"),
        ("optimizer.groups=3", "`optimizer.groups` takes a list"),
        ("optimizer.groups=abc", "`optimizer.groups` takes a list"),
        ("logger.x=3", "`logger.x` takes a mapping"),
        ("logger.x={}", "`logger.x` has no `_target_`"),
        ("data._eval_=1.5", "`data._eval_` takes a mapping of arguments"),
        ("epochs=soon", "`epochs` takes a whole number or null"),
    ],
)
def test_a_value_of_the_wrong_kind_gets_one_message(word: str, what: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["validate", "+recipe=mnist", word]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {what}")


def test_validate_does_not_take_a_config_folder_for_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["validate", "--config-dir", str(tmp_path), "mnist"]) == 0
    assert "mnist" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("words", "code"), [(["ls", "keys"], 1), (["cat", "mnist"], 1), (["validate", "nope=1"], 2), (["cp", "mnist"], 0)]
)
def test_full_standard_output_is_reported_by_commands_whose_result_it_is(
    words: List[str], code: int, tmp_path: Path
) -> None:
    """`ls keys` prints more than Python buffers."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ipurun", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == code and "Traceback" not in ended.stderr
    message = "error: standard output cannot be written: No space left on device"
    assert ended.stderr.count(message) == (0 if words[0] == "cp" else 1)


@pytest.mark.parametrize(
    "line",
    [
        "cat nope",
        "cat conf/recipe/mnist.yaml",
        "cat a\0b",
        "cp mnist ;",
        "import list.json",
        "import " + "x" * 300,
        "predict nope",
        "eval nope",
        "eval loop",
        "selftest engine=ipu",
        "validate --nope",
        "validate --config-dir nope",
        "train --html x",
        "validate -m hydra.sweeper.params._args_=x",
    ],
)
def test_every_problem_has_a_place_and_advice(line: str, capsys: pytest.CaptureFixture) -> None:
    Path("list.json").write_text("[1]")
    Path("loop").symlink_to("loop")
    assert main(line.split(" ")) == 2
    for block in capsys.readouterr().err.strip().split("\n\n"):
        assert block.startswith("error: ") and "\n  at     " in block and "\n  try    " in block, block


def test_problems_of_every_kind_of_error_can_be_completed() -> None:
    fault = DeviceFault("training", "IPU_RESET", "seen", "start again")
    fault.set_problems(replace(problem, where="there") for problem in fault.problems)
    assert fault.problems[0].where == "there" and "at     there" in str(fault) and fault.action == "IPU_RESET"


def test_only_a_process_of_ipurun_changes_how_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    main(["ls"])
    collect_as_usual()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (usual, frozen)
    monkeypatch.setattr(sys, "argv", ["ipurun", "ls"])
    try:
        with pytest.raises(SystemExit):
            console()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


def test_a_run_collects_garbage_as_usual() -> None:
    usual = gc.get_threshold()
    try:
        gc.set_threshold(100_000, 50, 100)  # as `console` does
        collect_as_usual()
        assert gc.get_threshold() == usual
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
