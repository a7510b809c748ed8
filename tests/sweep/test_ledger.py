from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Sequence

import pytest

from ipurun.config.compose import Point
from ipurun.config.schema import RunConfig, SweepConfig
from ipurun.errors import ConfigError
from ipurun.sweep.ledger import FAILED, FINISHED, Ledger, Record, find_earlier, point_id


def _ledger(folder: Path, statuses: Sequence[str]) -> Ledger:
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        Record(f"id{index}", index, "digits", {"lr": str(index)}, [f"lr={index}"], status)
        for index, status in enumerate(statuses)
    ]
    return Ledger(folder, ["-m", "lr=0,1"], records)


def test_a_saved_ledger_is_read_back(tmp_path: Path) -> None:
    written = _ledger(tmp_path, [FINISHED, FAILED])
    written.records[1].reason = "out of memory"
    written.save()
    read = Ledger.load(tmp_path)
    assert read.argv == ["-m", "lr=0,1"] and read.records == written.records
    assert [record.index for record in read.unfinished] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("text", [None, "{", '{"points": 3}', "[]"])
def test_a_folder_without_a_readable_ledger_is_refused(tmp_path: Path, text: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a sweep folder"):
        Ledger.load(tmp_path)


def test_resuming_keeps_finished_points_in_any_order(tmp_path: Path) -> None:
    earlier = _ledger(tmp_path, [FINISHED, FAILED])
    earlier.records[0].results = {"best": 0.5}
    now = _ledger(tmp_path, ["pending", "pending", "pending"])
    now.records = [now.records[2], now.records[0], now.records[1]]
    for index, record in enumerate(now.records):
        record.index = index
    now.adopt(earlier)
    assert [record.status for record in now.records] == ["pending", FINISHED, FAILED]
    assert now.records[1].index == 1 and now.records[1].results == {"best": 0.5}


def test_the_newest_sweep_of_the_same_points_is_found(tmp_path: Path) -> None:
    for name, statuses in (("1", [FAILED]), ("2", [FINISHED, FAILED])):
        _ledger(tmp_path / name, statuses).save()
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "manifest.json").write_text("cut sho")
    found = find_earlier([tmp_path / "nowhere", tmp_path], ["id0"])
    assert found is not None and found.folder.name == "2"
    assert find_earlier([tmp_path], ["another"]) is None
    assert find_earlier([tmp_path / "nowhere"], ["id0"]) is None


def test_resume_and_sweep_keys_do_not_change_the_identity_of_a_point() -> None:
    config = RunConfig(devices=8)
    same = replace(config, resume="auto", sweep=SweepConfig(on_error="stop"))
    assert point_id(Point(config)) == point_id(Point(same))
    assert point_id(Point(config)) != point_id(Point(replace(config, devices=4)))
