"""What a run says of PopART's cache, which does not tell whether it loaded an executable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict

import pytest

from ipurun import executables
from ipurun.build.cached_executables import Compiled, _report_of_popart

CONFIG = {"devices": 1, "model.size": 3}


def _reported(folder: Path, seconds: float, **config: Any) -> Compiled:
    """Report a compilation after which there is no new file."""
    run: Any = SimpleNamespace(config=SimpleNamespace(cache=SimpleNamespace(max_size=None)), plan=None)
    about: Dict[str, Any] = {"mode": "training", "config": {**CONFIG, **config}, "versions": {}}
    before = {entry.path for entry in executables.entries(str(folder), "ipu")}
    return _report_of_popart(run, about, str(folder), before, seconds)


def _store(folder: Path, name: str, compile_seconds: float, mode: str = "training", **config: Any) -> None:
    path = folder / f"{name}.popef"
    path.write_text("an executable")
    about = {"mode": mode, "config": {**CONFIG, **config}, "versions": {}, "compile_seconds": compile_seconds}
    executables.write_about(path, {**about, "created": 0.0, "last_use": 0.0, "hits": 0})


def test_a_hit_saves_what_the_same_config_took(tmp_path: Path) -> None:
    _store(tmp_path, "a", 400.0)
    _store(tmp_path, "b", 900.0, devices=2)
    assert _reported(tmp_path, 10.0) == Compiled(10.0, "hit", 390.0)


def test_without_its_record_the_nearest_one_tells_about_how_long_it_took(tmp_path: Path) -> None:
    _store(tmp_path, "a", 400.0, devices=4)
    _store(tmp_path, "b", 900.0, devices=2, **{"model.size": 8})
    _store(tmp_path, "c", 70.0, mode="inference")
    found = _reported(tmp_path, 10.0)
    assert found.saved_seconds == 390.0 and found.why == "estimated: compiling took 400 s with 1 other key"


@pytest.mark.parametrize("seconds", [500.0, 10.0])
def test_nothing_is_saved_where_nothing_is_known(tmp_path: Path, seconds: float) -> None:
    (tmp_path / "a.popef").write_text("compiled by another program")
    _store(tmp_path, "c", 70.0, mode="inference")
    assert _reported(tmp_path, seconds) == Compiled(seconds, "hit")
