"""Targets: real causes, nearest names, and no call before all arguments are checked."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ipurun.errors import ConfigError
from ipurun.inspect.targets import check_arguments, check_node, locate, make

built = []


class Widget:
    def __init__(self, width: int, height: int = 2, *, colour: str = "red") -> None:
        built.append(self)
        self.size = (width, height, colour)


class Open:
    def __init__(self, width: int, **rest: Any) -> None:
        self.rest = rest


class Plain:
    pass


def keeps_the_rest(function: Any) -> Any:
    """A decorator like that of transformers' configs: it keeps arguments that the function does not have."""

    @functools.wraps(function)
    def outer(self: Any, width: int, **rest: Any) -> None:
        function(self, width)
        self.rest = rest

    return outer


def passes_on(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


class Decorated:
    @keeps_the_rest
    def __init__(self, width: int) -> None:
        self.width = width


@passes_on
def widget(width: int) -> Widget:
    return Widget(width)


def refuse(width: int) -> None:
    raise ValueError(f"width {width} is odd")


def area(width: int, height: int) -> int:
    return width * height


HERE = __name__


def test_locates_classes_functions_and_attributes() -> None:
    assert locate(f"{HERE}.Widget", "model._target_") is Widget
    assert locate("os.path.join", "x") is __import__("os").path.join
    assert locate("torch.nn.functional.relu", "x").__name__ == "relu"


def test_a_function_is_preferred_to_a_module_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "zoo_of_one_name"
    package.mkdir()
    (package / "__init__.py").write_text("from zoo_of_one_name.lenet import *\n")
    (package / "lenet.py").write_text("def lenet():\n    return 5\n")
    monkeypatch.chdir(tmp_path)
    assert locate("zoo_of_one_name.lenet", "model._target_")() == 5


def test_poptorch_paths_resolve_in_the_engine() -> None:
    from ipurun import emulator

    assert locate("poptorch.optim.SGD", "optimizer._target_", emulator) is emulator.optim.SGD
    with pytest.raises(ConfigError, match="`SDG`") as caught:
        locate("poptorch.optim.SDG", "optimizer._target_", emulator)
    assert "SGD" in caught.value.problems[0].known


def test_a_missing_module_is_reported_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        locate("my_absent_module.Net", "model._target_")
    (problem,) = caught.value.problems
    assert "no module named `my_absent_module`" in problem.what
    assert "my_absent_module.py" in problem.fix and str(tmp_path) in problem.fix


def test_code_beside_the_recipe_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_me.py").write_text("class Net: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    assert locate("beside_me.Net", "model._target_").__name__ == "Net"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import json\nimport surely_not_there\nclass Net: pass\n", "No module named 'surely_not_there'"),
        ("raise RuntimeError('needs a licence')\n", "needs a licence"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_a_failing_import_is_reported_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, cause: str
) -> None:
    (tmp_path / "outer_of_targets.py").write_text("from inner_of_targets import Net\n")
    (tmp_path / "inner_of_targets.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        locate("outer_of_targets.Net", "model._target_")
    (problem,) = caught.value.problems
    assert cause in problem.seen
    assert "inner_of_targets.py" in problem.where
    assert "`model._target_`" in problem.what


def test_a_missing_attribute_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        locate(f"{HERE}.Wigdet", "model._target_")
    (problem,) = caught.value.problems
    assert "no `Wigdet`" in problem.what and problem.fix == f"model._target_={HERE}.Widget"


@pytest.mark.parametrize("path", ["", "a b", "1.2", "Net", "torch..nn", None, 3])
def test_values_that_are_not_paths(path: Any) -> None:
    with pytest.raises(ConfigError):
        locate(path, "model._target_")


def test_arguments_that_fit() -> None:
    assert check_arguments(Widget, {"width": 1, "colour": "blue"}, "model") == []
    assert check_arguments(Widget, {"height": 3}, "model", positional=1) == []
    assert check_arguments(Widget, {}, "model", given=("width",)) == []
    assert check_arguments(Open, {"width": 1, "anything": 2}, "model") == []
    assert check_arguments(Widget, {"_target_": "x", "_args_": [1, 2]}, "model") == []
    assert check_arguments(Widget, {"_partial_": True}, "model") == []
    assert check_arguments(dict, {"anything": 1}, "model") == []


def test_an_unknown_argument_suggests_the_nearest() -> None:
    (problem,) = check_arguments(Widget, {"width": 1, "heigth": 2}, "model")
    assert "`model.heigth`" in problem.what and problem.fix == "model.height=2"
    assert problem.known == "width, height, colour"


def test_a_class_without_arguments() -> None:
    (problem,) = check_arguments(Plain, {"width": 1}, "model")
    assert problem.known == "it takes no arguments"


def test_generic_classes_have_their_own_signature() -> None:
    import torch

    (problem,) = check_arguments(torch.utils.data.SequentialSampler, {"data_sorce": 1}, "s", positional=1)
    assert "data_sorce" in problem.what
    (problem,) = check_arguments(torch.utils.data.TensorDataset, {"tensor": 1}, "data")
    assert "tensor" in problem.what


def test_a_missing_argument() -> None:
    (problem,) = check_arguments(Widget, {"height": 3}, "model")
    assert "needs the argument `width`" in problem.what and "model.width" in problem.fix


def test_all_problems_at_once_and_nothing_is_called() -> None:
    built.clear()
    node = {
        "_target_": f"{HERE}.Widget",
        "heigth": 1,
        "colour": {"_target_": f"{HERE}.Nothing"},
        "width": [{"_target_": f"{HERE}.Widget"}],
    }
    problems = check_node(node, "model")
    assert len(problems) == 3 and built == []
    assert any("model.width.0" in problem.what for problem in problems)


def test_makes_nested_targets_first() -> None:
    node = {"_target_": f"{HERE}.Widget", "width": {"_target_": f"{HERE}.area", "width": 2, "height": 5}, "height": 4}
    assert make(node, "model").size == (10, 4, "red")


def test_partial_and_positional() -> None:
    assert make({"_target_": f"{HERE}.area", "_partial_": True, "width": 3}, "m")(height=4) == 12
    assert make({"_target_": f"{HERE}.area", "_args_": [3, 4]}, "m") == 12
    assert make({"_target_": f"{HERE}.area", "height": 4}, "m", 3) == 12


def test_a_target_that_fails_is_a_config_error_with_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        make({"_target_": f"{HERE}.refuse", "width": 3}, "model")
    (problem,) = caught.value.problems
    assert problem.seen == "ValueError: width 3 is odd" and "test_targets.py" in problem.where


def test_not_callable() -> None:
    (problem,) = check_node({"_target_": f"{HERE}.built"}, "model")
    assert "not callable" in problem.what


def test_a_decorator_may_accept_more_arguments_than_its_signature_shows() -> None:
    made = make({"_target_": f"{__name__}.Decorated", "width": 2, "num_labels": 3}, "model")
    assert (made.width, made.rest) == (2, {"num_labels": 3})


def test_an_argument_that_only_the_call_refuses_is_reported_like_any_other() -> None:
    with pytest.raises(ConfigError) as caught:
        make({"_target_": f"{__name__}.widget", "width": 2, "widht": 3}, "model")
    problem = caught.value.problems[0]
    assert problem.what == f"`model.widht`: {__name__}.widget has no argument `widht`"
