"""What a run says of PopART's cache, which itself says nothing: judged by files, records and times."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest

from ipurun.build import cached_executables
from ipurun.build.cached_executables import compile_and_report
from ipurun.config.schema import RunConfig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> List[float]:
    """Let each compilation take as long as the list says."""
    durations: List[float] = []
    times = itertools.count()

    def perf_counter() -> float:
        return 1000.0 * (next(times) // 2) + (durations.pop(0) if next(odd) else 0.0)

    odd = itertools.cycle([0, 1])
    monkeypatch.setattr(cached_executables.time, "perf_counter", perf_counter)
    return durations


def _compiled(folder: Path, makes: str = "", **config: Any) -> Any:
    """Report a compilation that leaves a file, or none."""

    def compile_model(*args: Any) -> None:
        if makes:
            (folder / makes).write_bytes(b"an executable")

    return compile_and_report(
        SimpleNamespace(  # type: ignore[arg-type]  # what of a run it reads
            config=RunConfig(**config),
            plan=SimpleNamespace(name="digits", cache_dir=str(folder)),
            engine=SimpleNamespace(kind="ipu", version="PopTorch 3.4.0"),
            training_model=SimpleNamespace(compile=compile_model),
            inference_model=None,
            model_with_loss=SimpleNamespace(tracing_flag=SimpleNamespace(retry=lambda call: call())),
        ),
        "training",
        [],
        {},
    )


def test_a_hit_saves_what_the_first_compilation_took(tmp_path: Path, clock: List[float]) -> None:
    clock += [400.0, 28.0, 390.0, 30.0]
    assert _compiled(tmp_path, makes="a.popef").cache == "miss"
    found = _compiled(tmp_path, optimizer={"lr": 5.0})
    assert (found.cache, found.saved_seconds) == ("hit", 372.0)
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "about").iterdir())
    assert (record["hits"], record["compile_seconds"], record["name"]) == (1, 400.0, "digits")
    assert _compiled(tmp_path).cache == ""  # no file was added, but it took as long as before
    other = _compiled(tmp_path, device_iterations=7)  # no record to compare with
    assert (other.cache, other.saved_seconds) == ("hit", None)


def test_secrets_are_not_in_records(tmp_path: Path, clock: List[float]) -> None:
    clock += [1.0]
    _compiled(tmp_path, makes="a.popef", data={"api_key": "sk-very-secret-value-0123456789"})
    assert "very-secret" not in (tmp_path / "about" / "a.json").read_text()


def test_popart_that_stores_nothing_is_not_called_a_hit(tmp_path: Path, clock: List[float]) -> None:
    clock += [5.0]
    assert _compiled(tmp_path).cache == "uncached"
