"""The config that a run stored, with new overrides on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipurun.config.compose import one, to_yaml
from ipurun.errors import ConfigError
from ipurun.runs.folder import RunFolder
from ipurun.runs.reload import stored_point


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    point = one(["+recipe=mnist", "seed=7", "optimizer=adam", "optimizer.lr=0.5", "micro_batch_size=4"])
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text(to_yaml(point.config))
    run.overrides_file.write_text("- +recipe=mnist\n- seed=7\n")
    return run


def test_the_stored_config_comes_back_whole(folder: RunFolder) -> None:
    point = stored_point(folder, [])
    assert to_yaml(point.config) == folder.config_file.read_text()
    assert point.recipes == ("mnist",) and point.changed == ()
    assert point.overrides == ("+recipe=mnist", "seed=7")


def test_overrides_apply_on_top(folder: RunFolder) -> None:
    point = stored_point(folder, ["devices=4", "optimizer.lr=0.25", "data.root=/somewhere"])
    assert (point.config.devices, point.config.seed) == (4, 7)
    assert point.config.optimizer["lr"] == 0.25
    assert point.config.data["root"] == "/somewhere"
    assert {change.key for change in point.changed} == {"devices", "optimizer.lr", "data.root"}
    assert point.overrides == ("+recipe=mnist", "seed=7", "devices=4", "optimizer.lr=0.25", "data.root=/somewhere")


def test_keys_of_a_first_edition_count_as_set_where_they_differ_from_their_default(folder: RunFolder) -> None:
    given = stored_point(folder, ["device_iterations=1"]).given
    assert given is not None
    assert given["seed"] == "" and given["device_iterations"] == "command line: device_iterations=1"
    assert "gradient_accumulation" not in given and "pipeline.strategy" not in given


def test_keys_that_were_set_are_still_set(folder: RunFolder) -> None:
    folder.origins_file.write_text("device_iterations: 'conf/recipe/mine.yaml:3'\nseed: 'command line: seed=7'\n")
    given = stored_point(folder, ["seed=8", "~options"]).given
    assert given == {"device_iterations": "conf/recipe/mine.yaml:3", "seed": "command line: seed=8"}
    replaced = stored_point(folder, ["cache=off"]).given
    assert replaced is not None and replaced["cache.enabled"] == "ipurun/conf/cache/off.yaml:2"


@pytest.mark.parametrize("text", ["- a\n", "a: [\n"])
def test_damaged_origins_are_refused(folder: RunFolder, text: str) -> None:
    folder.origins_file.write_text(text)
    with pytest.raises(ConfigError, match=r"origins\.yaml"):
        stored_point(folder, [])


def test_another_choice_of_a_group_replaces_the_stored_one(folder: RunFolder) -> None:
    before = stored_point(folder, []).config
    config = stored_point(folder, ["data=synthetic", "data.samples=64"]).config
    fresh = one(["+recipe=mnist", "seed=7", "data=synthetic", "data.samples=64"]).config
    assert config.data == fresh.data
    assert config.optimizer == before.optimizer


def test_the_stored_recipe_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Path("conf/recipe/mine.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\nmodel:\n  _target_: torch.nn.Linear\n  in_features: 2\n  out_features: 1\n")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text(to_yaml(one(["+recipe=mine"]).config))
    recipe.unlink()
    point = stored_point(run, [])
    assert point.config.name == "mine" and point.config.model["out_features"] == 1


def test_wrong_overrides_are_explained_as_anywhere(folder: RunFolder) -> None:
    with pytest.raises(ConfigError) as caught:
        stored_point(folder, ["device=8"])
    assert "unknown key `device`" in str(caught.value) and "devices=8" in str(caught.value)


@pytest.mark.parametrize("word", ["+recipe=mnist", "recipe=mnist", "-m"])
def test_a_recipe_or_a_sweep_is_refused(folder: RunFolder, word: str) -> None:
    with pytest.raises(ConfigError, match="no recipe and no sweep"):
        stored_point(folder, [word])


def test_a_config_of_another_version_is_reported(folder: RunFolder) -> None:
    folder.config_file.write_text(folder.config_file.read_text() + "old_key: 1\n")
    with pytest.raises(ConfigError, match="does not fit this version"):
        stored_point(folder, [])


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe", "not UTF-8"), (b"", "is empty"), (b"a: [", "malformed")]
)
def test_a_damaged_stored_config_is_reported(folder: RunFolder, content: bytes, message: str) -> None:
    folder.config_file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        stored_point(folder, [])


def test_groups_of_a_run_of_an_earlier_version_match_what_they_matched(folder: RunFolder) -> None:
    config = one(["+recipe=mnist", "optimizer.groups=[{match: conv*.bias, lr: 0.1}]"]).config
    folder.config_file.write_text(to_yaml(config))
    assert stored_point(folder, []).config.optimizer["groups"] == [{"match": "conv**.bias", "lr": 0.1}]
