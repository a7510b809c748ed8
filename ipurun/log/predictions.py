"""Write predictions to a file: tensors as .pt, .npy and .npz, tables as .csv, .jsonl and .parquet."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, cast

import numpy
import torch

from ipurun.errors import ConfigError, RunError, underlying_os_error
from ipurun.files import replacing

__all__ = ["COLUMNS", "check_file", "columns_of", "describe", "write_predictions"]

COLUMNS = ("index", "input", "target", "output")
_TABLES = (".csv", ".jsonl", ".parquet", ".npz")
_SUFFIXES = (".pt", ".npy", *_TABLES)
_ROWS_AT_ONCE = 4096

Progress = Callable[[int, int], None]  # rows written, rows in all


def columns_of(path: Path, asked: Optional[str]) -> Tuple[str, ...]:
    """Return the columns to write: those asked for, else all but the input for a table and the output for tensors.

    Raises:
        ConfigError: If there is no such column.
    """
    if asked is None:
        return ("index", "target", "output") if path.suffix in _TABLES else ("output",)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names:
        fix = "--columns index,target,output"
        raise ConfigError(f"`--columns={asked}` names no column of predictions", known=", ".join(COLUMNS), fix=fix)
    return tuple(dict.fromkeys(names))


def check_file(path: Path) -> None:
    """Check before the run that predictions can be written to a file.

    Raises:
        ConfigError: If the file type is unknown or its package is missing, or the folder is not writable.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"predictions cannot be written as `{path.suffix or path.name}`", "--out", known=", ".join(_SUFFIXES)
        )
    if path.suffix == ".parquet":
        _pyarrow()
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"`{path}` cannot be written", "--out", seen=f"the folder {path.parent}", fix="--out FILE")


def write_predictions(path: Path, columns: Mapping[str, Any], progress: Optional[Progress] = None) -> None:
    """Write the columns atomically.

    Args:
        path: The file; its ending is the format.
        columns: Name -> tensors with a row per sample, in any containers.
        progress: Called with the rows written and their total while a table is written.

    Raises:
        RunError: If the columns do not fit the file type, or the file cannot be written.
    """
    progress = progress or (lambda _done, _total: None)
    table = {} if path.suffix == ".pt" else _checked_table(path, columns)
    try:
        with replacing(path) as stream:
            if path.suffix == ".pt":
                torch.save(columns["output"] if tuple(columns) == ("output",) else dict(columns), stream)
            elif path.suffix == ".npy":
                numpy.save(stream, _as_array(table), allow_pickle=False)
            elif path.suffix == ".npz":
                numpy.savez(stream, **cast(Any, table))
            elif path.suffix == ".parquet":
                _write_parquet(stream, table, progress)
            else:
                _write_lines(stream, table, path.suffix == ".csv", progress)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        seen = str(underlying_os_error(error))
        fix = "--out FILE in a writable folder with enough free space"
        raise RunError("the predictions could not be written", str(path), seen=seen, fix=fix) from error


def describe(outputs: Any) -> str:
    """Describe shapes and types in one line: ``1000 x 10 float32``."""
    if isinstance(outputs, torch.Tensor):
        return f"{' x '.join(map(str, outputs.shape))} {str(outputs.dtype).replace('torch.', '')}"
    if isinstance(outputs, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in outputs.items()) + "}"
    if isinstance(outputs, (list, tuple)):
        return "[" + ", ".join(describe(value) for value in outputs) + "]"
    return "nothing" if outputs is None else type(outputs).__name__


def _checked_table(path: Path, columns: Mapping[str, Any]) -> Dict[str, numpy.ndarray]:
    """Return a named array for each tensor of the columns, all with a row per sample."""
    table: Dict[str, numpy.ndarray] = {}
    for name, value in columns.items():
        for label, tensor in _tensors(name, value):
            # NumPy has no bfloat16.
            array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
            table[label] = array
    rows = {len(array) if array.ndim else -1 for array in table.values()}
    if not table or len(rows) > 1 or -1 in rows or (path.suffix == ".npy" and _has_several_outputs(table)):
        what = "are not a single tensor" if path.suffix == ".npy" else "do not have a row for each sample"
        seen = ", ".join(f"{name}: {' x '.join(map(str, array.shape))}" for name, array in table.items())
        fix = "--out FILE.pt, which takes anything; --columns index,output leaves columns out"
        raise RunError(f"the predictions {what}, so they cannot be written as {path.suffix}", seen=seen, fix=fix)
    return table


def _has_several_outputs(table: Mapping[str, Any]) -> bool:
    return sum(name.partition(".")[0] == "output" for name in table) > 1


def _tensors(name: str, value: Any) -> Iterator[Tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value.detach().cpu()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(f"{name}.{number}" if len(value) > 1 else name, inner)


def _as_array(table: Mapping[str, numpy.ndarray]) -> numpy.ndarray:
    """Return a single column as it is, and several as one array with a field for each."""
    if len(table) == 1:
        return next(iter(table.values()))
    fields: List[Any] = [(name, array.dtype, array.shape[1:]) for name, array in table.items()]
    joined = numpy.empty(len(next(iter(table.values()))), dtype=fields)
    for name, array in table.items():
        joined[name] = array
    return joined


def _write_lines(stream: IO[bytes], table: Mapping[str, numpy.ndarray], is_csv: bool, progress: Progress) -> None:
    total = len(next(iter(table.values())))
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    if is_csv:
        writer.writerow([label for name, array in table.items() for label in _labels(name, array.shape[1:])])
    for begin in range(0, total, _ROWS_AT_ONCE):
        part = {name: array[begin : begin + _ROWS_AT_ONCE] for name, array in table.items()}
        rows = len(next(iter(part.values())))
        if is_csv:
            cells = [_as_text(array.reshape(rows, -1)) for array in part.values()]
            writer.writerows(itertools.chain.from_iterable(row) for row in zip(*cells))
        else:
            lists = [array.tolist() for array in part.values()]
            text.writelines(_as_json(dict(zip(part, row))) + "\n" for row in zip(*lists))
        progress(begin + rows, total)
    text.detach()  # the stream is closed by whoever opened it


def _labels(name: str, shape: Sequence[int]) -> List[str]:
    """Return the names of the numbers of a column: ``output_0``, ``output_1`` for two in a row."""
    places = itertools.product(*(range(size) for size in shape))
    return ["_".join([name, *map(str, place)]) for place in places]


def _as_text(rows: numpy.ndarray) -> List[List[str]]:
    if not numpy.issubdtype(rows.dtype, numpy.floating):
        return [list(map(str, row)) for row in rows.tolist()]
    digits = 17 if rows.dtype == numpy.float64 else 9  # enough to read the same number again
    return [[f"{value:.{digits}g}" for value in row] for row in rows.tolist()]


def _as_json(record: Dict[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:  # NaN and infinity are not JSON: as text, as in metrics.jsonl
        return json.dumps(_finite(record))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write_parquet(stream: IO[bytes], table: Mapping[str, numpy.ndarray], progress: Progress) -> None:
    pyarrow, parquet = _pyarrow()
    total = len(next(iter(table.values())))
    writer: Any = None
    for begin in range(0, total, _ROWS_AT_ONCE):
        part = {name: _as_arrow(pyarrow, array[begin : begin + _ROWS_AT_ONCE]) for name, array in table.items()}
        batch = pyarrow.table(part)
        writer = writer or parquet.ParquetWriter(stream, batch.schema)
        writer.write_table(batch)
        progress(begin + len(batch), total)
    if writer is not None:
        writer.close()


def _as_arrow(pyarrow: Any, array: numpy.ndarray) -> Any:
    """Return rows as numbers, or as lists of numbers with as many levels as the rows have dimensions."""
    if array.dtype == numpy.float16:
        array = array.astype(numpy.float32)  # few readers of Parquet know half precision
    made = pyarrow.array(numpy.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        made = pyarrow.FixedSizeListArray.from_arrays(made, size)
    return made


def _pyarrow() -> Tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "writing .parquet needs a package that is not installed",
            "--out",
            seen=str(error),
            fix="pip install 'ipurun[parquet]', or --out FILE.csv",
        ) from error
    return pyarrow, pyarrow.parquet
