"""`ipurun cp` of recipes with several modules and with model options that also set other keys."""

import sys
from pathlib import Path

import pytest

from ipurun.cli.main import main


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("recipe", ["bert", "gpt", "resnet", "vit"])
def test_a_copy_trains_on_its_own_code(recipe):
    copy = f"copied_{recipe}"
    assert main(["cp", recipe, copy, "--quiet"]) == 0
    assert (Path(copy) / "README.md").is_file()
    for path in [*Path("conf").rglob("*.yaml"), *Path(copy).glob("*.py")]:
        assert f"ipurun.recipes.{recipe}." not in path.read_text()
    assert main(["train", f"+recipe={copy}", "max_steps=1", "eval.max_samples=8", "--quiet"]) == 0
    assert f"{copy}.model" in sys.modules
