import json
import subprocess
import sys
from pathlib import Path

import pytest

from ipurun.cli.main import main

BUILT_IN = Path(__file__).parents[2] / "conf"
RECIPES = sorted(path.stem for path in (BUILT_IN / "recipe").glob("*.yaml"))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A command puts the working folder there; the next test has another one.
    monkeypatch.setattr(sys, "path", list(sys.path))


def output(capsys, *words):
    assert main(list(words)) == 0
    return capsys.readouterr().out


def error(capsys, *words):
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def own_recipe(name="mine", comment="# Of my own."):
    path = Path("conf/recipe") / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{comment}\nmodel:\n  _target_: mymodel.Net\n")
    return path


def test_ls_shows_every_recipe_with_its_comment(capsys):
    shown = output(capsys, "ls")
    assert all(recipe in shown for recipe in RECIPES)
    assert "Handwritten digits" in shown
    assert "@package" not in shown


def test_ls_finds_recipes_of_the_working_folder(capsys):
    own_recipe()
    assert "mine (yours)" in output(capsys, "ls")
    listed = {entry["name"]: entry for entry in json.loads(output(capsys, "ls", "--json"))}
    assert sorted(listed) == sorted([*RECIPES, "mine"])
    assert listed["mine"]["summary"] == "Of my own."
    assert (listed["mine"]["built_in"], listed["mnist"]["built_in"]) == (False, True)


def test_a_clone_lists_its_recipes_once(capsys, monkeypatch):
    monkeypatch.chdir(BUILT_IN.parent)
    assert output(capsys, "ls", "--quiet").split() == RECIPES


def test_recipes_in_sub_folders_go_by_their_path(capsys):
    path = own_recipe("team/ours")
    assert "team/ours (yours)" in output(capsys, "ls")
    assert output(capsys, "cat", "team/ours") == path.read_text()
    assert "ipurun train +recipe=my_team_ours" in output(capsys, "cp", "team/ours")


def test_a_recipe_without_a_comment_is_listed_all_the_same(capsys):
    own_recipe(comment="")
    assert "mine" in output(capsys, "ls")


def test_ls_keys_tells_type_default_and_meaning(capsys):
    shown = output(capsys, "ls", "keys")
    assert "device_iterations=1  (int)" in shown
    assert "checkpoint.keep=2" in shown
    assert "engine=auto  (auto | ipu | ipu_model | cpu)" in shown
    assert "Samples per replica and forward pass." in shown


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("pipeline.stra", ["pipeline.strategy"]),
        ("*.every_steps", ["eval.every_steps", "checkpoint.every_steps"]),
        ("cache.*", ["cache.enabled", "cache.dir", "cache.max_size", "cache.min_seconds"]),
    ],
)
def test_ls_keys_takes_a_pattern(capsys, pattern, expected):
    assert output(capsys, "ls", "keys", pattern, "--quiet").split() == expected


def test_ls_keys_as_json_has_typed_defaults(capsys):
    keys = {entry["key"]: entry for entry in json.loads(output(capsys, "ls", "keys", "--json"))}
    assert keys["devices"]["default"] == "auto"
    assert keys["loader.shuffle"]["default"] is True
    assert all(entry["help"] and entry["type"] for entry in keys.values())


def test_a_pattern_that_matches_nothing_suggests_keys(capsys):
    message = error(capsys, "ls", "keys", "device_iteration_s")
    assert "no key matches `device_iteration_s`" in message
    assert "device_iterations" in message


def test_ls_groups_shows_every_option_with_its_comment(capsys):
    listed = json.loads(output(capsys, "ls", "groups", "--json"))
    on_disk = {
        folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
        for folder in BUILT_IN.iterdir()
        if any(folder.glob("*.yaml"))
    }
    assert {group: [entry["name"] for entry in entries] for group, entries in listed.items()} == on_disk
    assert [entry for entries in listed.values() for entry in entries if not entry["summary"]] == []
    assert "optimizer=adamw" in output(capsys, "ls", "groups", "optimizer")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "kyes"], "cannot list `kyes`"),
        (["ls", "groups", "optimiser"], "ipurun ls groups optimizer"),
        (["ls", "keys", "a", "b"], "too many words for `ls keys`"),
        (["cat"], "`cat` takes one name"),
        (["cat", "mnits"], "unknown recipe `mnits`"),
        (["cat", "optimizer/addam"], "unknown option `addam` of group `optimizer`"),
        (["cat", "optimise/adam"], "unknown group `optimise`"),
        (["cp"], "`cp` takes a recipe and the name of the copy"),
        (["cp", "nothing"], "unknown recipe `nothing`"),
        (["cp", "optimizer/adam", "x"], "`optimizer/adam` is not a recipe"),
    ],
)
def test_a_wrong_word_is_explained(capsys, words, message):
    assert message in error(capsys, *words)


def test_an_unknown_recipe_lists_those_that_exist(capsys):
    message = error(capsys, "cat", "mnits")
    assert all(recipe in message for recipe in RECIPES)
    assert "try    mnist" in message


def test_cat_prints_the_file(capsys):
    assert output(capsys, "cat", "mnist") == (BUILT_IN / "recipe" / "mnist.yaml").read_text()
    assert output(capsys, "cat", "optimizer/adam") == (BUILT_IN / "optimizer" / "adam.yaml").read_text()
    path = own_recipe()
    assert output(capsys, "cat", "mine") == path.read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_cp_copies_yaml_and_code_that_point_to_the_copy(capsys, recipe):
    output(capsys, "cp", recipe, "copied")
    copied = "\n".join(path.read_text() for path in Path("conf").rglob("*.yaml"))
    assert f"ipurun.recipes.{recipe}" not in copied
    assert "_target_: copied.model." in copied
    assert Path("copied/model.py").is_file()
    program = "import copied.model, copied.dataset, sys; sys.stdout.write(copied.dataset.__file__)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=".")
    assert Path(found.stdout).resolve() == Path("copied/dataset.py").resolve()


def test_cp_takes_the_data_along(capsys):
    output(capsys, "cp", "mnist", "copied")
    assert len(list(Path("copied/data").glob("*-ubyte.gz"))) == 4


def test_cp_finds_a_name_by_itself_and_copies_a_copy(capsys):
    assert "ipurun train +recipe=my_mnist" in output(capsys, "cp", "mnist")
    output(capsys, "cp", "my_mnist", "third")
    assert "_target_: third.model." in Path("conf/model/third.yaml").read_text()
    assert "override /model: third" in Path("conf/recipe/third.yaml").read_text()
    assert Path("third/model.py").read_text() == Path("my_mnist/model.py").read_text()


def test_cp_of_a_recipe_with_code_in_a_module_shares_the_module(capsys):
    own_recipe()
    Path("mymodel.py").write_text("class Net: pass\n")
    made = json.loads(output(capsys, "cp", "mine", "other", "--json"))
    assert made == {"recipe": "other", "made": ["conf/recipe/other.yaml"]}
    assert "_target_: mymodel.Net" in Path("conf/recipe/other.yaml").read_text()


@pytest.mark.parametrize("taken", ["conf/recipe/copied.yaml", "conf/data/copied.yaml", "copied/model.py"])
def test_cp_overwrites_nothing(capsys, taken):
    path = Path(taken)
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert "would overwrite" in error(capsys, "cp", "mnist", "copied")
    assert path.read_text() == "mine"
    assert [found for found in Path().rglob("*") if found.is_file()] == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion_mnist", "`fashion_mnist` is a built-in recipe"),
        ("my-mnist", "`my-mnist` cannot name a recipe"),
        ("class", "`class` cannot name a recipe"),
        ("json", "`json` is already the name of an installed Python package"),
    ],
)
def test_cp_refuses_names_that_cannot_work(capsys, name, message):
    refused = error(capsys, "cp", "mnist", name)
    assert message in refused
    assert "ipurun cp mnist my_" in refused
    assert list(Path().iterdir()) == []


def test_a_binary_file_is_listed_and_refused(capsys):
    own_recipe("latin").write_bytes(b"# @package _global_\nname: caf\xe9\n")
    Path("conf/recipe/folder.yaml").mkdir()
    listed = output(capsys, "ls", "--quiet").split()
    assert "latin" in listed
    assert "folder" not in listed
    for command in ("cat", "cp"):
        message = error(capsys, command, "latin")
        assert "not UTF-8 text" in message
        assert "conf/recipe/latin.yaml" in message
