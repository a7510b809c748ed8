"""Padding and packing to one shape."""

import numpy as np
import pytest
import torch
from run_harness import config, trained
from torch.utils.data import Dataset

from ipurun.datasets.collate import Pack, Packed, Pad, attention_mask, packed, packs_of
from ipurun.inspect.sampling import check_loader


def test_padding_by_key_with_a_mask():
    pad = Pad({"ids": 4, "labels": 4}, value={"labels": -100}, mask="mask")
    samples = [
        {"ids": torch.tensor([5, 6]), "labels": [1, 2], "kind": 0},
        {"ids": [7, 8, 9, 1], "labels": [3], "kind": 1},
    ]
    batch = pad(samples)
    assert batch["ids"].tolist() == [[5, 6, 0, 0], [7, 8, 9, 1]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [3, -100, -100, -100]]
    assert batch["mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]] and batch["kind"].tolist() == [0, 1]
    assert pad.padding_share == 7 / 16


def test_padding_of_tuples_and_what_is_too_long():
    batch = Pad(3, value=-1.0)([(torch.ones(2, 2), 4), (torch.ones(3, 2), 5)])
    assert batch[0].shape == (2, 3, 2) and batch[0][0, 2].tolist() == [-1, -1] and batch[1].tolist() == [4, 5]
    with pytest.raises(ValueError, match="a length of 3, more than length=2"):
        Pad(2)([torch.ones(3)])
    assert Pad(2, truncate=True)([torch.arange(3), torch.arange(1)]).tolist() == [[0, 1], [0, 0]]


def test_a_row_keeps_its_sequences_apart():
    row = Pack(7, value=9).row([[1, 2, 3], [4, 5]])
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 9, 9]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 0, 0]
    assert row["labels"].tolist() == [2, 3, -100, 5, -100, -100, -100]
    allowed = attention_mask(row["segment_ids"])
    assert allowed[1].tolist() == [True, True, True, False, False, False, False] and not allowed[5:].any()
    with pytest.raises(ValueError, match="do not fit a row of 4"):
        Pack(4)([[[1, 2, 3], [4, 5]]])


def test_packs_hold_every_sequence_once_and_little_padding():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    indices, ends = packs_of(lengths, 128)
    assert sorted(indices.tolist()) == list(range(2000))
    sizes = [int(lengths[part].sum()) for part in np.split(indices, ends[:-1])]
    assert max(sizes) <= 128 and len(sizes) <= 1.02 * -(-lengths.sum() // 128)


class Words(Dataset):
    """Sequences of 1 to 4 numbers and a class."""

    def __init__(self, samples: int = 32) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        return torch.arange(1.0, 2 + index % 4) / 4, index % 3


def test_packed_data_reports_its_padding():
    made = packed(
        {"train": [[1, 2, 3], [4], [5, 6]], "eval": ([1, 2],)}, 4, as_tuple=True, fields=["input_ids", "labels"]
    )
    train = made["train"]
    assert [row[0].tolist() for row in train] == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert train.padding_share == 0.25 and "25.0% is padding (one sequence per row: 50.0%)" in train.notes[-1]
    with pytest.raises(ValueError, match="more than length=2"):
        Packed([[1, 2, 3]], 2)


@pytest.mark.parametrize("keys", [{}, {"device_iterations": 2, "devices": 2}, {"loader__workers": 2}])
def test_a_padded_run_reports_the_share_of_padding(tmp_path, keys):
    pad = {"loader__collate": "ipurun.datasets.collate.Pad", "loader__collate_args": {"length": {0: 4}}}
    _, summary, recorder = trained(tmp_path, data={"_target_": "test_collate.Words"}, epochs=1, **pad, **keys)
    assert summary.padding_share == pytest.approx((3 + 2 + 1 + 0) / 16)
    assert recorder.events["end"][0].padding_share == summary.padding_share


def test_arguments_of_a_collate_function_are_checked():
    pad = {"loader__collate": "ipurun.datasets.collate.Pad"}
    (problem,) = check_loader(config(**pad, loader__collate_args={"lenght": 4}).loader)[:1]
    assert "lenght" in str(problem)
    assert "needs `loader.collate`" in str(check_loader(config(loader__collate_args={"length": 4}).loader)[0])
    assert not check_loader(config(**pad, loader__collate_args={"length": 4}).loader)
