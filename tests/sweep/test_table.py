from __future__ import annotations

import csv
import io
from typing import Any, Dict, List, Optional

import pytest

from ipurun.sweep.ledger import FAILED, FINISHED, INTERRUPTED, Record
from ipurun.sweep.table import csv_text, rank, rows_as_data, table_lines, throughput_lines


def _record(index: int, swept: Dict[str, str], results: Optional[Dict[str, Any]] = None, **more: Any) -> Record:
    status = more.pop("status", FINISHED if results else FAILED)
    return Record(f"id{index}", index, "digits", swept, ["+recipe=mnist"], status, results=results or {}, **more)


def _result(accuracy: float, speed: float, loss: float = 1.0) -> Dict[str, Any]:
    return {
        "monitor": "accuracy",
        "best": accuracy,
        "metrics": {"loss": loss, "accuracy": accuracy - 0.01},
        "loss": 0.5,
        "samples_per_second": speed,
        "seconds": {"total": 12.0},
    }


@pytest.fixture
def records() -> List[Record]:
    return [
        _record(0, {"lr": "0.1"}, _result(0.90, 100, loss=0.3), folder="runs/x/000"),
        _record(1, {"lr": "0.2"}, reason="no data for `fashion_mnist`\nsecond line"),
        _record(2, {"lr": "0.3"}, _result(0.95, 50, loss=0.2), folder="runs/x/002"),
        _record(3, {"lr": "0.4"}, _result(0.80, 400, loss=0.4), folder="runs/x/003"),
    ]


def _order(records: List[Record], rank_by: Optional[str] = None) -> List[int]:
    return [record.index for record in rank(records, rank_by).records]


def test_the_monitored_metric_ranks_and_failures_come_last(records: List[Record]) -> None:
    assert rank(records).column == "accuracy"
    assert _order(records) == [2, 0, 3, 1]


def test_the_table_can_be_ranked_by_throughput(records: List[Record]) -> None:
    assert _order(records, "samples_per_second") == [3, 0, 2, 1]


def test_a_loss_ranks_from_small_to_large(records: List[Record]) -> None:
    assert _order(records, "loss") == [2, 0, 3, 1]


def test_the_fastest_ranks_first_by_time(records: List[Record]) -> None:
    records[0].results["seconds"] = {"total": 3.0}
    assert _order(records, "seconds")[0] == 0


def test_a_column_that_no_result_has_falls_back_to_the_metric(records: List[Record]) -> None:
    assert rank(records, "acuracy").column == "accuracy"
    assert _order(records, "acuracy") == [2, 0, 3, 1]


def test_without_a_metric_throughput_ranks() -> None:
    plain = [_record(0, {}, {"samples_per_second": 5.0}), _record(1, {}, {"samples_per_second": 9.0})]
    assert rank(plain).column == "samples_per_second"
    assert _order(plain) == [1, 0]


def test_nan_ranks_last_of_the_finished(records: List[Record]) -> None:
    records[2].results["best"] = float("nan")
    assert _order(records) == [0, 3, 2, 1]


def test_no_point_is_best_when_all_failed() -> None:
    assert rank([_record(0, {"lr": "1"}, reason="x")]).best is None


def test_the_table_shows_failed_rows_with_their_reason(records: List[Record]) -> None:
    lines = table_lines(rank(records))
    assert " ".join(lines[0].split()) == "rank lr status best accuracy loss samples/s time folder or reason"
    assert lines[2].split() == ["1", "0.3", "finished", "0.9500", "0.2000", "50", "12", "s", "002"]
    assert lines[5].split()[:3] == ["-", "0.2", "failed"]
    assert lines[5].endswith("no data for `fashion_mnist`")


def test_csv_has_a_row_for_each_point(records: List[Record]) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(rows_as_data(rank(records))))))
    assert [row["lr"] for row in rows] == ["0.3", "0.1", "0.4", "0.2"]
    assert [row["rank"] for row in rows] == ["1", "2", "3", ""]
    assert rows[0]["best_accuracy"] == "0.95" and rows[3]["best_accuracy"] == ""
    assert rows[3]["status"] == "failed" and rows[3]["reason"].startswith("no data")


def test_throughput_is_drawn_against_the_swept_key(records: List[Record]) -> None:
    lines = throughput_lines(records)
    assert lines[0] == "samples/s by lr"
    bars = {line.split()[0]: line.count("#") for line in lines[1:]}
    assert bars == {"0.1": 8, "0.3": 4, "0.4": 30}
    assert "0.2" not in bars


def test_throughput_is_not_drawn_for_two_swept_keys() -> None:
    grid = [_record(0, {"a": "1", "b": "2"}, _result(0.5, 10)), _record(1, {"a": "1", "b": "3"}, _result(0.5, 20))]
    assert throughput_lines(grid) == []


def test_unfinished_points_are_shown(records: List[Record]) -> None:
    records[0].status = INTERRUPTED
    records[0].results = {}
    assert "interrupted" in "\n".join(table_lines(rank(records)))
