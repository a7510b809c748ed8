"""Odd values: each is answered at once, in our own words, with a place and advice."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import List

import pytest

import ipurun
from ipurun.config.compose import from_yaml, one
from ipurun.config.keys import all_keys
from ipurun.errors import ConfigError, Problem

RECIPE = "+recipe=mnist"
LONG = "x" * 300
VALUES = (
    ["null", "", "[]", "{}", "0", "-1", "1.5", "9" * 20, "nan", "-inf", "true", "text", LONG, "[a,b]", "[[1]]"]
    + ["[{a:1}]", "{a:1}", "{a:{b:1}}", "${seed}", "${nope}", "${oc.env:NOPE}", "${now:%Y}", "${.}", "${loss}"]
    + ["'\u00fc\u4e2d'", "???", "{_target_:1}", "{_target_:nope.Nope}", "{_partial_:x}", "{_convert_:1}"]
    + ["{_args_:3}", "{1:2}", "{_target_:torch.nn.Linear,_args_:[1,a]}"]
)
INSIDE = ("_target_", "_partial_", "_convert_", "_args_", "_eval_", "groups", "on", "a")
OPEN = (
    "model",
    "data",
    "optimizer",
    "schedule",
    "metrics",
    "logger",
    "callbacks",
    "options",
    "loss.args",
    "loader.sampler",
)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems_of(*words: str) -> List[Problem]:
    return ipurun.validate(overrides=list(words))


def only(*words: str) -> Problem:
    (problem,) = problems_of(RECIPE, *words)
    assert problem.where == f"command line: {words[-1]}"
    return problem


def test_every_odd_value_gets_a_place_and_advice_quickly() -> None:
    keys = [*all_keys(), *(f"{node}.{name}" for node in OPEN for name in INSIDE)]
    draw = random.Random(10)
    wrong = []
    for _ in range(16):
        word = f"{draw.choice(keys)}={draw.choice(VALUES)}"
        wrong += [(word, problem) for problem in problems_of(RECIPE, word) if not (problem.where and problem.fix)]
    assert wrong == []


def test_a_key_that_was_not_set_has_a_place_too() -> None:
    assert [problem.where for problem in problems_of()] == [
        "`model._target_`: not set, so the default applies",
        "`data._target_`: not set, so the default applies",
    ]


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        (
            "data._eval_=1.5",
            "`data._eval_` takes a mapping of arguments",
            "data._eval_={ARGUMENT: VALUE}, or ~data._eval_ removes it",
        ),
        (
            "+logger._convert_=1",
            "`logger` maps names to mappings with `_target_`, so `_convert_` belongs one level below",
            "logger.NAME._convert_=VALUE",
        ),
        (
            "metrics._partial_=x",
            "`metrics` maps names to mappings with `_target_`, so `_partial_` belongs one level below",
            "metrics.NAME._partial_=VALUE",
        ),
        ("metrics={a: 1}", "`metrics.a` takes a mapping: `_target_` and arguments", "metrics.a={}"),
        ("model._args_=3", "`model._args_` takes a list of arguments", "model._args_=[VALUE]"),
        ("pipeline.split={a: 1}", "`pipeline.split` takes a list", "pipeline.split=[]"),
        ("pipeline.blocks=[3]", "`pipeline.blocks` takes a mapping", "pipeline.blocks={}"),
        (
            "pipeline.layers={a: 1}",
            "`pipeline.layers` takes a module name or a list of them",
            "pipeline.layers=[NAME, ...]",
        ),
        (
            "sample=[3]",
            "`sample[0]` has no `shape`",
            "sample: [{shape: [3, 224, 224]}, {shape: [], dtype: int64, high: 1000}]",
        ),
        (f"resume={LONG}", "not the path of a run folder", "give the folder that a run printed"),
        (
            f"runs_dir={LONG}",
            "`runs_dir` is not the path of a folder",
            "runs_dir=runs, or another folder with a shorter, printable name",
        ),
        ("precision_rules.a=[1]", "`precision_rules.a` takes text", "~precision_rules.a removes it"),
        ("output={mood: 1}", "unknown key `output.mood`", "output.mode=VALUE, or another key of `output`"),
        ("pipeline.ipus=" + "9" * 20, "`pipeline.ipus` must be 65536 or less", "pipeline.ipus=65536"),
    ],
)
def test_the_answer_is_in_our_own_words(word: str, what: str, fix: str) -> None:
    problem = only(word)
    assert (problem.what, problem.fix.partition(";")[0]) == (what, fix.partition(";")[0])


def test_an_interpolation_of_the_wrong_type_is_answered_by_plan() -> None:
    with pytest.raises(ConfigError) as caught:
        ipurun.plan(overrides=[RECIPE, "++loader.batch_sampler=${now:%Y}"])
    (problem,) = caught.value.problems
    assert problem.what == "`loader.batch_sampler` takes a mapping" and problem.seen.startswith("${now:%Y}, which is 2")


def test_variables_of_the_environment_are_numbers_where_numbers_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "1e-2")
    monkeypatch.setenv("SEED", "3")
    config = one([RECIPE, "optimizer.lr=${oc.env:LR}", "seed=${oc.env:SEED}", "+data.root=${oc.env:SEED}"]).config
    assert (config.optimizer["lr"], config.seed, config.data["root"]) == (0.01, 3, "3")
    assert ipurun.validate(overrides=[RECIPE, "optimizer.lr=${oc.env:LR}"]) == []


def test_a_missing_environment_variable_names_what_to_set() -> None:
    assert only("seed=${oc.env:NOPE}").fix == ("export NOPE=VALUE, seed=VALUE, or a default: ${oc.env:NOPE,DEFAULT}")


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
TEXTS = {
    BOMB: "the file cannot be used: aliases (*name) add more than 10,000 values",
    "model: &m\n  a: *m\n": "the file cannot be used: an anchor (&name) contains an alias (*name) of itself",
    "model: {a: " + "[" * 400 + "]" * 400 + "}\n": "the file cannot be used: values are nested too deeply",
}


@pytest.mark.parametrize(("text", "what"), TEXTS.items(), ids=["bomb", "loop", "deep"])
def test_yaml_that_would_explode_is_refused_at_once(text: str, what: str) -> None:
    recipe = Path("conf/recipe/odd.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\n" + text)
    Path("config.yaml").write_text(text)
    begin = time.perf_counter()
    (problem,) = problems_of("+recipe=odd")
    with pytest.raises(ConfigError) as stored:
        from_yaml(Path("config.yaml"))
    assert problem.what == stored.value.problems[0].what == what
    assert problem.where.startswith("conf/recipe/odd.yaml") and problem.fix
    assert time.perf_counter() - begin < 120  # ten minutes before aliases were counted


@pytest.mark.parametrize(
    "reference",
    [
        "${data.a%d}${data.a%d}",
        "{p: '${data.a%d}', q: '${..a%d}'}",
        "'${oc.select:data.a%d}${.a%d}'",
        "'${data.${data.n%d}}${.${.n%d}}'",  # the name itself is computed
        "'${data.${data.m%d}}${oc.select:data.${.m%d}}'",  # and so is what it is computed from
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_interpolations_that_would_explode_are_refused_at_once(reference: str, is_reversed: bool) -> None:
    """Sixty keys that each name the one before twice."""
    lines = [f"  n{level}: a{level}\n  m{level}: ${{data.n{level}}}\n" for level in range(60)]
    lines += ["  a0: xxxxxxxxxx\n"] + [f"  a{level}: {reference % (level - 1, level - 1)}\n" for level in range(1, 61)]
    recipe = Path("conf/recipe/odd.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ndata:\n" + "".join(reversed(lines) if is_reversed else lines))
    (problem,) = problems_of("+recipe=odd")
    assert "interpolations of interpolations multiply" in problem.what
    assert problem.where.startswith("conf/recipe/odd.yaml:") and problem.fix.startswith("write the value itself")


def test_interpolations_that_cannot_be_read_are_named() -> None:
    recipe = Path("conf/recipe/odd.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ndata:\n  x: ${seed}\n  y: '${a${i}}'\n")
    (problem,) = problems_of("+recipe=odd")
    assert problem.what == "`data.y`: OmegaConf cannot read this interpolation" and "${a${i}}" in problem.seen
    assert problem.where == "conf/recipe/odd.yaml:4" and "${data.${name}}" in problem.fix


def test_interpolations_are_fine_in_moderation() -> None:
    words = [RECIPE, "+data.a=${data.b}", "+data.b=${data.c}${data.c}", "+data.c=${.d}", "+data.d=${seed}"]
    words += ["+data.lr0=${data.d}", "+data.e=${data.${data.d}}"]
    assert {problem.key for problem in problems_of(*words)} >= {"data.a", "data.b", "data.c", "data.d"}


def test_aliases_are_fine_in_moderation() -> None:
    recipe = Path("more/recipe/shared.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\nmodel: &m {_target_: nope.Net}\ndata: *m\n")
    assert {problem.what for problem in problems_of("--config-dir=more", "+recipe=shared")} == {
        "`model._target_`: no module named `nope`",
        "`data._target_`: no module named `nope`",
    }


class TestAllowedTargets:
    BUILT_IN = "security.allow_targets=[ipurun,poptorch.optim]"

    def test_listed_prefixes_are_allowed(self) -> None:
        assert problems_of(RECIPE, self.BUILT_IN) == []

    @pytest.mark.parametrize(
        "key",
        ["model._target_", "data._target_", "optimizer._target_", "schedule._target_", "loss.name", "loader.collate"]
        + ["metrics.mine._target_", "logger.mine._target_", "loader.sampler._target_"]
        + ["model.inner.deep._target_"],
    )
    def test_others_are_refused_before_they_are_imported(self, key: str) -> None:
        Path("ipurunaway.py").write_text("open('imported', 'w').close()\ndef f(*a, **k): ...\n")
        word = f"{key}=ipurunaway.f"
        problems = problems_of(RECIPE, self.BUILT_IN, word)
        assert [problem.what for problem in problems] == [
            f"`{key}`: `security.allow_targets` does not allow ipurunaway.f"
        ]
        assert problems[0].where == f"command line: {word}" and problems[0].fix and not Path("imported").exists()

    def test_custom_ops_are_targets_too(self) -> None:
        problem = problems_of(RECIPE, self.BUILT_IN, 'custom_ops.cpu={"x/Y": {forward: nope.f}}')[0]
        assert problem.what == "`custom_ops.cpu.x/Y`: `security.allow_targets` does not allow nope.f"

    def test_special_names_and_libraries_are_refused(self) -> None:
        problems = problems_of(
            RECIPE, self.BUILT_IN, "loss.name=ipurun.metrics.Accuracy.__init__", "custom_ops.libraries=[a.so]"
        )
        assert {problem.key for problem in problems} == {"loss.name", "custom_ops.libraries"}

    def test_a_module_is_reached_under_its_own_name_only(self) -> None:
        problem = only("loss.name=ipurun.metrics.torch.os.system")
        assert problem.what == "`loss.name`: ipurun.metrics only imports torch, it is the module torch"
        assert problem.fix == "loss.name=torch.os.system"
