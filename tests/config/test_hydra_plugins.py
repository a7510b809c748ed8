"""Launchers, sweepers and other keys of Hydra: those that work, and the message for each that does not."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from ipurun.config.compose import points
from ipurun.errors import ConfigError, Problem


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems_of(*argv: str) -> List[Problem]:
    try:
        found = points(argv)
    except ConfigError as error:
        return list(error.problems)
    return [problem for point in found.points[:1] for problem in point.problems]


def test_keys_of_a_launcher_have_hydras_names_and_defaults() -> None:
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=ipu", "hydra.launcher.timeout_min=90"]
    launching = points(["-m", "+recipe=mnist", "seed=1,2", *words]).launching
    assert launching.launcher == "submitit_slurm" and launching.sweeper == "basic"
    assert launching.launcher_keys["partition"] == "ipu" and launching.launcher_keys["timeout_min"] == 90
    assert launching.launcher_keys["array_parallelism"] == 256


def test_a_recipe_may_choose_launcher_sweeper_and_parameters() -> None:
    Path("conf/recipe").mkdir(parents=True)
    lines = [
        "# @package _global_",
        "defaults: [override /hydra/launcher: joblib, override /hydra/sweeper: optuna]",
        "model: {_target_: a.B}",
        "hydra:",
        "  launcher: {n_jobs: 3}",
        "  sweeper:",
        "    n_trials: 7",
        "    sampler: {seed: 5}",
        "    params: {optimizer.lr: 'tag(log, interval(0.001, 0.1))', seed: 'choice(1, 2)'}",
    ]
    Path("conf/recipe/mine.yaml").write_text("\n".join(lines) + "\n")
    found = points(["-m", "+recipe=mine"])
    assert found.launching.launcher_keys["n_jobs"] == 3
    assert found.launching.sweeper_keys["n_trials"] == 7 and found.launching.sweeper_keys["sampler"]["seed"] == 5
    assert [override.key for override in found.searched] == ["optimizer.lr", "seed"]
    assert found.searched[0].interval is not None and found.searched[0].interval.log


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("hydra.job.chdir=true", "relative to the folder"),
        ("hydra.job.name=x", "name=NAME"),
        ("hydra.verbose=true", "debug.log_level=DEBUG"),
        ("hydra.sweep.subdir=x", "numbered folders"),
        ("hydra.sweeper.max_batch_size=2", "sweep.jobs=N"),
        ("hydra.job.env_set.A=1", "NAME=VALUE ipurun"),
        ("hydra.searchpath=[file:///x]", "--config-dir"),
        ("hydra/job_logging=disabled", "log.txt"),
    ],
)
def test_keys_without_an_effect_are_refused(word: str, fix: str) -> None:
    (problem,) = problems_of("+recipe=mnist", word)
    assert "has no effect" in problem.what and fix in problem.fix and word in problem.where


@pytest.mark.parametrize("word", ["hydra.job.chdir=false", "hydra.verbose=false", "hydra.output_subdir=null"])
def test_values_that_say_what_happens_anyway_pass(word: str) -> None:
    assert problems_of("+recipe=mnist", word) == []


def test_a_recipe_that_sets_such_a_key_is_refused_with_its_line() -> None:
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mine.yaml").write_text("# @package _global_\nepochs: 1\nhydra: {job: {chdir: true}}\n")
    (problem,) = problems_of("+recipe=mine")
    assert problem.what.startswith("`hydra.job.chdir`") and problem.where.endswith("mine.yaml:3")


def test_hydra_mode_multirun_means_m() -> None:
    assert len(points(["+recipe=mnist", "hydra.mode=MULTIRUN", "seed=1,2"]).points) == 2


def test_folders_may_have_interpolations() -> None:
    found = points(["+recipe=mnist", "seed=5", "hydra.run.dir=out/${seed}-${now:%Y}"])
    assert str(found.points[0].run_dir).startswith("out/5-20")
    (problem,) = problems_of("+recipe=mnist", "hydra.run.dir=out/${nowhere}")
    assert problem.what == "`hydra.run.dir` cannot be resolved" and "nowhere" in problem.seen


def test_an_interval_needs_a_sweeper_that_searches() -> None:
    (problem,) = problems_of("-m", "+recipe=mnist", "optimizer.lr=tag(log, interval(0.001, 0.1))")
    assert problem.what.startswith("`optimizer.lr` is a range to search")
    assert "hydra/sweeper=optuna" in problem.fix and "optimizer.lr=0.001,0.1" in problem.fix
    (problem,) = problems_of("+recipe=mnist", "optimizer.lr=interval(0.001, 0.1)")
    assert problem.fix.startswith("-m optimizer.lr=") and "hydra/sweeper=optuna" in problem.fix


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("optimizer.lr=interval(1, 1)", "the range of `optimizer.lr` is empty"),
        ("optimizer.lr=tag(log, interval(0, 1))", "larger than 0"),
        ("device_iterations=interval(0.5, 2.5)", "`device_iterations` takes a whole number"),
    ],
)
def test_intervals_are_checked(word: str, what: str) -> None:
    assert any(what in problem.what for problem in problems_of("-m", "+recipe=mnist", word, "hydra/sweeper=optuna"))


def test_a_search_checks_the_ends_of_ranges_and_every_choice() -> None:
    words = ["optimizer.lr=interval(0.001, 0.1)", "seed=range(1,6,2)", "optimizer=sgd,adam", "device_iterations=4"]
    found = points(["-m", "+recipe=mnist", *words, "hydra/sweeper=optuna"])
    swept = [tuple(point.swept.values()) for point in found.points]
    assert swept == [
        ("0.001", "1", "sgd"),
        ("0.1", "1", "sgd"),
        ("0.001", "5", "sgd"),
        ("0.001", "1", "adam"),
    ]
    assert found.composer is not None
    point = found.composer({"optimizer.lr": "0.02", "seed": "3", "optimizer": "adam"})
    assert point.config.optimizer["lr"] == 0.02 and point.config.seed == 3 and point.config.device_iterations == 4
    assert "Adam" in point.config.optimizer["_target_"] and "optimizer.lr=0.02" in point.overrides


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("hydra/launcher=joblib hydra.launcher.jobs=2", "hydra/launcher=joblib has no key `jobs`", "launcher.n_jobs"),
        ("+hydra.launcher.jobs=2", "hydra/launcher=basic has no key `jobs`", "remove it"),
        ("hydra.launcher.n_jobs=2", "hydra/launcher=basic has no key `n_jobs`", "hydra/launcher=joblib"),
        ("hydra.sweeper.sampler.seed=1", "hydra/sweeper=basic has no key `sampler`", "hydra/sweeper=optuna"),
        ("hydra.launcher=joblib", "`hydra.launcher` is a group of keys", "hydra/launcher=joblib"),
        ("hydra/launcher=joblib hydra.launcher.n_jobs=two", "`hydra.launcher.n_jobs` does not fit", "sweeps.md"),
    ],
)
def test_keys_that_the_launcher_or_sweeper_does_not_have_are_refused(words: str, what: str, fix: str) -> None:
    (problem,) = problems_of("-m", "+recipe=mnist", "seed=1,2", *words.split())
    assert problem.what.startswith(what) and fix in problem.fix


def test_a_recipe_with_keys_of_a_launcher_that_it_does_not_choose_is_refused() -> None:
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mine.yaml").write_text("# @package _global_\nepochs: 1\nhydra: {launcher: {n_jobs: 2}}\n")
    (problem,) = problems_of("+recipe=mine")
    assert "has no key `n_jobs`" in problem.what and problem.where.endswith("mine.yaml")
    assert problem.fix.endswith("hydra/launcher=joblib")


def test_a_plus_before_a_key_of_the_launcher_is_not_needed_and_does_no_harm() -> None:
    found = points(["-m", "+recipe=mnist", "seed=1,2", "hydra/launcher=joblib", "+hydra.launcher.n_jobs=2"])
    assert found.launching.launcher_keys["n_jobs"] == 2
