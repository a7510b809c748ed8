"""Padding and packing to one shape."""

import numpy as np
import pytest
import torch
from run_harness import Folder, config, trained
from torch.utils.data import Dataset

from ipurun.checkpoint import listed
from ipurun.datasets.collate import Pack, Pad, attention_mask, packs_of
from ipurun.errors import ConfigError
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


def test_a_sequence_of_nothing_is_all_padding():
    pad = Pad({"ids": 2}, value=3, mask="mask")
    batch = pad([{"ids": []}, {"ids": [4]}, {"ids": torch.zeros(0, dtype=torch.int64)}])
    assert batch["ids"].tolist() == [[3, 3], [4, 3], [3, 3]] and batch["ids"].dtype == torch.int64
    assert batch["mask"].tolist() == [[0, 0], [1, 0], [0, 0]] and pad.padding_share == 5 / 6


def _row(pack, *sequences):
    return {name: value[0].tolist() for name, value in pack([list(sequences)]).items()}


def test_a_row_keeps_its_sequences_apart():
    row = _row(Pack(7, value=9), [1, 2, 3], [4, 5])
    assert row["input_ids"] == [1, 2, 3, 4, 5, 9, 9]
    assert row["position_ids"] == [0, 1, 2, 0, 1, 0, 0]
    assert row["segment_ids"] == [1, 1, 1, 2, 2, 0, 0]
    assert row["labels"] == [2, 3, -100, 5, -100, -100, -100]
    allowed = attention_mask(torch.tensor(row["segment_ids"]))
    assert allowed[1].tolist() == [True, True, True, False, False, False, False] and not allowed[5:].any()


def test_labels_of_samples_are_packed_with_their_tokens():
    row = _row(Pack(5), {"input_ids": [1, 2], "labels": [7, 8]}, {"input_ids": [3], "labels": [9]})
    assert row["labels"] == [7, 8, 9, -100, -100]
    assert _row(Pack(4), ([1, 2], [7, 8]), ([3], [9]))["labels"] == [7, 8, 9, -100]
    with pytest.raises(ValueError, match="2 tokens have one number"):
        Pack(4)([[([1, 2], 3)]])


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
    pack = Pack(4, as_tuple=True, fields=["input_ids", "labels"])
    rows = pack.group([[1, 2, 3], [4], [5, 6]])
    assert [pack([row])[0][0].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert pack.padding_share == 0.25 and "25.0% is padding (one sequence per row: 50.0%)" in rows.notes[-1]
    with pytest.raises(ValueError, match="more than length=2"):
        Pack(2).group([[1, 2, 3]])
    assert _row(Pack(2, truncate=True), [1, 2, 3])["input_ids"] == [1, 2]


class Sentences(Dataset):
    """Ten sequences each of 2 to 6 tokens."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int):
        return torch.arange(2 + index % 5) + 1


class NextToken(torch.nn.Module):
    """Predicts the next token from the token alone, and returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(8, 8)

    def forward(self, input_ids, position_ids, segment_ids, labels):
        scores = self.scores(input_ids)
        return scores, torch.nn.functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100)


PACKED = {
    "model": {"_target_": "test_collate.NextToken"},
    "data": {"_target_": "test_collate.Sentences"},
    "loader__collate": "ipurun.datasets.collate.Pack",
    "loader__collate_args": {"length": 7},
    "loss__name": None,
    "metrics": {},
    "eval__split": "train",
}


@pytest.mark.parametrize("keys", [{}, {"device_iterations": 3, "devices": 2}, {"loader__workers": 2}])
def test_a_packed_run_learns_and_reports_the_share_of_padding(tmp_path, keys):
    run, summary, recorder = trained(tmp_path, epochs=8, **PACKED, **keys)
    assert len(run.splits["train"]) == 30 and summary.padding_share == pytest.approx(1 / 21, abs=0.02)
    losses = [event.metrics["loss"] for event in recorder.events["eval"]]
    assert losses[-1] < 0.8 * losses[0]


def test_a_packed_run_resumes_exactly(tmp_path):
    keys = {"device_iterations": 3, "epochs": 4, "checkpoint__keep": 9}
    straight, whole, _ = trained(tmp_path / "a", **{**PACKED, **keys})
    middle = listed(Folder(tmp_path / "a"))[1]
    again, rest, _ = trained(tmp_path / "b", resume_from=middle, **{**PACKED, **keys})
    assert 0 < middle.step < rest.step == whole.step
    assert torch.equal(straight.user_model.scores.weight, again.user_model.scores.weight)


def test_what_cannot_be_packed_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="a sequence has 6 tokens, more than length=3"):
        trained(tmp_path, **{**PACKED, "loader__collate_args": {"length": 3}})
    with pytest.raises(ConfigError, match=r"packs data that is read by\s+index"):
        trained(tmp_path, **{**PACKED, "data": {"_target_": "run_toys.Stream"}})


@pytest.mark.parametrize(
    "keys", [{}, {"device_iterations": 2, "devices": 2}, {"loader__workers": 2}, {"profile__kind": "trace"}]
)
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
