from __future__ import annotations

import csv
import io
from typing import Any, Dict, List, Optional

import pytest

from ipurun.log.style import aligned
from ipurun.sweep.ledger import FAILED, FINISHED, INTERRUPTED, PRUNED, Record
from ipurun.sweep.table import Ranking, chart_lines, csv_text, rank, rows_as_data, table_cells, table_notes


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


def table_lines(ranking: Ranking) -> List[str]:
    return aligned(*table_cells(ranking)) + table_notes(ranking)


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


def test_the_ranked_value_is_drawn_against_the_swept_key(records: List[Record]) -> None:
    lines = chart_lines(rank(records))
    assert lines[0] == "accuracy by lr"
    bars = {line.split()[0]: line.count("#") for line in lines[1:4]}
    # 0.80 to 0.95: the bars begin a quarter of that below, which is said.
    assert bars == {"0.1": 22, "0.3": 30, "0.4": 6}
    assert lines[4] == "  bars begin at 0.7625" and len(lines) == 5


def test_speed_is_drawn_from_zero_where_it_ranks(records: List[Record]) -> None:
    lines = chart_lines(rank(records, "samples_per_second"))
    assert {line.split()[0]: line.count("#") for line in lines[1:]} == {"0.1": 8, "0.3": 4, "0.4": 30}


def test_swept_numbers_are_drawn_by_their_size() -> None:
    swept = [_record(place, {"lr": lr}, _result(0.5, 10)) for place, lr in enumerate(["1e-1", "0.01", "2"])]
    assert [line.split()[0] for line in chart_lines(rank(swept))[1:]] == ["0.01", "1e-1", "2"]


def test_two_swept_keys_give_a_grid() -> None:
    values = {("1", "x"): 0.5, ("1", "y"): 0.75, ("8", "x"): 0.25}
    grid = [_record(n, {"a": a, "b": b}, _result(value, 10)) for n, ((a, b), value) in enumerate(values.items())]
    lines = [line.split() for line in chart_lines(rank(grid))]
    assert lines[0] == ["accuracy", "by", "a", "and", "b"]
    assert lines[1] == ["a", "\\", "b", "x", "y"]
    assert lines[3] == ["1", "0.5000", "0.7500", "<"] and lines[4] == ["8", "0.2500", "-"]


def test_what_a_search_has_chosen_makes_no_grid() -> None:
    tried = [_record(n, {"a": f"0.{n}", "b": f"0.{n}"}, _result(0.5, 10)) for n in range(5)]
    assert chart_lines(rank(tried)) == []


def test_speeds_measured_side_by_side_are_marked(records: List[Record]) -> None:
    assert not any("*" in line for line in table_lines(rank(records)))
    records[0].at_once = 2
    marked = [line for line in table_lines(rank(records)) if " * " in line]
    assert len(marked) == 1 and "100 *" in marked[0]
    assert "* measured beside other points" in table_lines(rank(records))[-1]
    assert {row["point"]: row["points_at_once"] for row in rows_as_data(rank(records))} == {0: 2, 1: None, 2: 1, 3: 1}


def test_a_resumed_point_that_made_no_step_has_no_speed(records: List[Record]) -> None:
    records[0].results["samples_per_second"] = 0.0
    records[0].at_once = 2
    assert _order(records, "samples_per_second") == [3, 2, 0, 1]
    assert {row["point"]: row["samples_per_second"] for row in rows_as_data(rank(records))}[0] is None
    (line,) = [line for line in table_lines(rank(records)) if line.endswith("000")]
    assert " 0 " not in line and "*" not in line


def test_pruned_points_come_before_failed_ones_and_a_direction_can_be_given(records: List[Record]) -> None:
    records[3].status, records[3].reason = PRUNED, "MedianPruner stopped it at step 4"
    assert _order(records) == [2, 0, 3, 1]
    assert [record.index for record in rank(records, "accuracy", higher_is_better=False).records] == [0, 2, 3, 1]
    assert any("MedianPruner stopped it" in line for line in table_lines(rank(records)))


def test_numbers_with_all_their_digits_are_shown_shortly() -> None:
    tried = [_record(0, {"lr": "0.017826497151386938", "name": "a_long_name_of_something"}, _result(0.5, 10))]
    line = table_lines(rank(tried))[2]
    assert "0.01783 " in line and "a_long_name_of_something" in line


def test_unfinished_points_are_shown(records: List[Record]) -> None:
    records[0].status = INTERRUPTED
    records[0].results = {}
    assert "interrupted" in "\n".join(table_lines(rank(records)))
