"""Failures of a model or data set as one readable problem."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ipurun import emulator
from ipurun.errors import RunError
from ipurun.training.failures import explained


class _Torn(Dataset):
    def __init__(self, readable: int = 0) -> None:
        self._readable = readable

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        if index < self._readable:
            return torch.zeros(2), index
        raise OSError(f"picture {index} is torn")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_sample_is_reported_in_one_line_with_its_source(workers: int) -> None:
    with pytest.raises(RunError) as caught, explained(emulator, "reading the training data"):
        next(iter(DataLoader(_Torn(), num_workers=workers)))
    (problem,) = caught.value.problems
    assert problem.what == "reading the training data failed"
    assert "OSError: picture 0 is torn" in problem.seen
    assert "Traceback" not in str(problem)
    assert problem.where.rpartition(":")[0].endswith("test_failures.py")


def test_a_failed_process_of_an_asynchronous_loader_is_named() -> None:
    loader = emulator.DataLoader(emulator.Options(), _Torn(readable=2), mode=emulator.DataLoaderMode.Async)
    with pytest.raises(RunError) as caught, explained(emulator, "reading the training data", lambda: "resume=runs/a"):
        list(loader)
    (problem,) = caught.value.problems
    assert "AsynchronousDataAccessor" in problem.seen and "asynchronous loader" in problem.where
    assert problem.fix == "loader.mode=sync shows it without that process; then resume=runs/a"
