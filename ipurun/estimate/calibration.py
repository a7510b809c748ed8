"""Fit constants of a machine to measured throughputs, and report how well the fit predicts.

The logarithm of a throughput is nearly linear in the logarithms of the constants, so a few Gauss-Newton steps do.
Every constant is held near its physical value, the more so the more certain that is: a handful of measurements must
not move constants that hardly affect them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ipurun.estimate.machine import Machine
from ipurun.estimate.timing import estimate_time
from ipurun.estimate.types import Settings, StageLayout
from ipurun.inspect.traced_model import TracedModel

__all__ = ["FREE", "Measurement", "calibrate", "calibrate_to_run", "leave_one_out", "measured_throughput", "ratio"]

# Constant -> its physical value and the uncertainty of that, as a standard deviation of the logarithm.
FREE: Mapping[str, Tuple[float, float]] = {
    "product_efficiency": (0.75, 0.15),  # an inner loop also fetches and stores
    "exchange_efficiency": (0.5, 0.3),  # messages have headers, and not all tiles receive all the time
    "vector_bytes_per_cycle": (8.0, 0.3),  # a third of the 24 bytes a tile can load and store in a cycle
    "op_cycles": (3000.0, 0.5),  # a few synchronisations, calls and copies of 500 to 1000 cycles
    "streaming_bytes_per_second": (20e9, 0.3),  # one bank of DDR4 on a gateway
    "transfer_seconds": (50e-6, 0.5),  # a synchronisation with the host over PCIe
    "host_call_seconds": (3e-3, 0.5),  # Python, copies and a launch
}
_STEP = 0.05
_ITERATIONS = 3


@dataclass(frozen=True)
class Measurement:
    """One measured run.

    Args:
        name: Its name.
        family: Runs of the same model, which are left out together.
        traced: Its model.
        layout: The stages of its operations.
        settings: How it ran.
        clock_hz: Clock of the chip, the only difference between a Bow and a GC200.
        samples_per_second: Measured throughput.
        noise: Uncertainty of the throughput, as a standard deviation of its logarithm; by default the scatter between
            SDK releases.
    """

    name: str
    family: str
    traced: TracedModel
    layout: StageLayout
    settings: Settings
    clock_hz: float
    samples_per_second: float
    noise: float = 0.1


def ratio(row: Measurement, machine: Machine) -> float:
    """Return estimated over measured throughput."""
    own = dataclasses.replace(machine, clock_hz=row.clock_hz)
    found = estimate_time(row.traced, row.layout, row.settings, own).samples_per_second
    return found / row.samples_per_second


def calibrate(rows: Sequence[Measurement], machine: Machine, free: Mapping[str, Tuple[float, float]] = FREE) -> Machine:
    """Return the machine whose estimates are nearest to the measurements.

    Args:
        rows: The measurements; all rows of a family together count as one.
        machine: The machine that gives all other constants.
        free: Constants to fit, with their physical values and uncertainties.
    """
    names = list(free)
    weights = _weights(rows)
    physical: Dict[str, Any] = {name: value for name, (value, _) in free.items()}
    prior = machine = dataclasses.replace(machine, **physical)
    for _ in range(_ITERATIONS if rows else 0):
        residuals = [math.log(ratio(row, machine)) for row in rows]
        slopes = [_slopes(row, machine, names, before) for row, before in zip(rows, residuals)]
        moved = [math.log(getattr(machine, name) / getattr(prior, name)) for name in names]
        matrix = [[0.0] * len(names) for _ in names]
        right = [0.0] * len(names)
        for weight, slope, residual in zip(weights, slopes, residuals):
            for i in range(len(names)):
                right[i] -= weight * slope[i] * residual
                for j in range(len(names)):
                    matrix[i][j] += weight * slope[i] * slope[j]
        for i, name in enumerate(names):
            matrix[i][i] += 1 / free[name][1] ** 2
            right[i] -= moved[i] / free[name][1] ** 2
        changes = _solve(matrix, right)
        machine = _changed(machine, names, [max(-0.5, min(0.5, change)) for change in changes])
    return machine


def leave_one_out(
    rows: Sequence[Measurement], machine: Machine, free: Mapping[str, Tuple[float, float]] = FREE
) -> Dict[str, float]:
    """Return estimated over measured throughput of every row, with its family left out of the fit."""
    machines: Dict[str, Machine] = {}
    for family in dict.fromkeys(row.family for row in rows):
        machines[family] = calibrate([row for row in rows if row.family != family], machine, free)
    return {row.name: ratio(row, machines[row.family]) for row in rows}


def calibrate_to_run(row: Measurement, machine: Machine) -> Machine:
    """Return a machine whose estimate of one measured run is right, or as near as plausible constants allow.

    The fit starts from the constants of the given machine instead of the physical ones.
    """
    free = {name: (getattr(machine, name), spread) for name, (_, spread) in FREE.items()}
    return calibrate([row], machine, free)


def measured_throughput(folder: Path) -> float:
    """Return the samples per second of a run: the median of its steps, because the first ones compile and load.

    Args:
        folder: A run folder.

    Raises:
        ValueError: The metrics of the run have no throughput.
    """
    found: List[float] = []
    with open(folder / "metrics.jsonl", encoding="utf-8") as lines:
        for line in lines:
            value = json.loads(line).get("samples_per_second") if line.strip() else None
            if isinstance(value, (int, float)) and value > 0:
                found.append(float(value))
    if not found:
        raise ValueError(f"{folder}: no samples_per_second in metrics.jsonl")
    return statistics.median(found)


def _weights(rows: Sequence[Measurement]) -> List[float]:
    sizes: Dict[str, int] = {}
    for row in rows:
        sizes[row.family] = sizes.get(row.family, 0) + 1
    return [1 / (row.noise**2 * sizes[row.family]) for row in rows]


def _slopes(row: Measurement, machine: Machine, names: Sequence[str], before: float) -> List[float]:
    slopes = []
    for name in names:
        after = math.log(ratio(row, _changed(machine, [name], [_STEP])))
        slopes.append((after - before) / _STEP)
    return slopes


def _changed(machine: Machine, names: Sequence[str], logarithms: Sequence[float]) -> Machine:
    values: Dict[str, Any] = {
        name: getattr(machine, name) * math.exp(change) for name, change in zip(names, logarithms)
    }
    for name, value in values.items():
        if name.endswith("_efficiency"):
            values[name] = min(value, 1.0)
    return dataclasses.replace(machine, **values)


def _solve(matrix: List[List[float]], right: List[float]) -> List[float]:
    """Solve linear equations by elimination; the matrix is positive definite and needs no pivoting."""
    size = len(right)
    rows: List[Tuple[List[float], float]] = [(list(row), value) for row, value in zip(matrix, right)]
    for pivot in range(size):
        head, value = rows[pivot]
        for other in range(pivot + 1, size):
            row, at = rows[other]
            factor = row[pivot] / head[pivot]
            rows[other] = ([a - factor * b for a, b in zip(row, head)], at - factor * value)
    solution = [0.0] * size
    for index in reversed(range(size)):
        row, value = rows[index]
        known = sum(row[j] * solution[j] for j in range(index + 1, size))
        solution[index] = (value - known) / row[index]
    return solution
