"""Every shipped config file, found by globbing and composed."""

import re
from pathlib import Path

import pytest

from ipurun.config.compose import one
from ipurun.config.schema import RunConfig, walk_keys

CONF = Path(__file__).parents[2] / "conf"
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if path.parent.name != "recipe")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_runs_on_synthetic_data(recipe):
    config = one([f"+recipe={recipe}"]).config
    assert config.name == recipe
    assert config.model["_target_"].startswith(f"ipurun.recipes.{recipe}.")
    made_up = one([f"+recipe={recipe}", "data=synthetic"]).config
    assert made_up.data["_target_"] == "ipurun.datasets.synthetic.splits"
    assert made_up.data["sample"] == config.sample != []
    assert "root" not in made_up.data


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes(option):
    group = option.split("=")[0]
    assert one(["+recipe=mnist", option]).problems == ()
    assert hasattr(RunConfig(), group)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_file_begins_with_its_comment(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ")
    assert lines[0].endswith((".", "?"))


def test_every_optimizer_of_poptorch_can_be_picked():
    files = [path.read_text() for path in (CONF / "optimizer").glob("*.yaml")]
    picked = {name for text in files for name in re.findall(r"_target_: poptorch\.optim\.(\w+)", text)}
    assert picked == {"SGD", "Adam", "AdamW", "RMSprop", "LAMB"}


def test_a_chosen_optimizer_takes_no_arguments_from_the_recipe():
    assert set(one(["+recipe=mnist", "optimizer=adam"]).config.optimizer) <= {"_target_", "lr"}


def test_loggers_can_be_combined():
    config = one(["+recipe=mnist", "logger=[csv,tensorboard]"]).config
    assert sorted(config.logger) == ["csv", "tensorboard"]


def test_debug_fast_shortens_any_recipe():
    config = one(["+recipe=gpt", "debug=fast"]).config
    assert (config.limit.calls, config.checkpoint.at_end, config.limit.eval_calls) == (2, False, 2)


def test_no_group_has_the_name_of_a_key_with_plain_values():
    """A folder `conf/precision` would make Hydra refuse `precision=16.16`."""
    nodes = {key.path.split(".")[0] for key in walk_keys(RunConfig) if "." in key.path or key.is_open}
    groups = {path.parent.name for path in CONF.glob("*/*.yaml")} - {"recipe"}
    assert groups <= nodes


def test_an_optimizer_written_into_a_recipe_inherits_no_arguments():
    assert set(one([]).config.optimizer) == {"_target_", "lr"}


def test_debug_overfit_trains_on_one_host_call_of_any_recipe():
    config = one(["+recipe=mnist", "debug=overfit"]).config
    assert (config.limit.calls, config.limit.train_calls, config.eval.split) == (200, 1, "train")
    assert not config.loader.shuffle


def test_only_the_small_gpt_is_averaged_and_writes_text():
    small, large = one(["+recipe=gpt"]).config, one(["+recipe=gpt", "model=gpt2_small"]).config
    assert (small.averaging.kind, list(small.callbacks)) == ("ema", ["text_samples"])
    assert (large.averaging.kind, list(large.callbacks)) == ("none", [])
