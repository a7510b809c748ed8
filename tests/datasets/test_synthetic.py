import pytest
import torch

from ipurun.datasets.synthetic import splits
from ipurun.errors import ConfigError

SAMPLE = [{"shape": [1, 4, 4]}, {"shape": [], "dtype": "int64", "high": 10}]


def test_samples_have_the_declared_shapes_types_and_ranges():
    data = splits(SAMPLE, train_samples=200, eval_samples=7)
    assert (len(data["train"]), len(data["eval"])) == (200, 7)
    items = list(data["train"])
    assert {(tuple(image.shape), image.dtype) for image, _ in items} == {((1, 4, 4), torch.float32)}
    labels = torch.stack([label for _, label in items])
    assert (labels.shape, labels.dtype) == ((200,), torch.int64)
    assert set(labels.tolist()) == set(range(10))


def test_a_sample_depends_on_its_index_and_the_seed_alone():
    first, again, other = (splits(SAMPLE, seed=seed)["train"] for seed in (3, 3, 4))
    torch.testing.assert_close(first[5], again[5])
    assert not torch.equal(first[5][0], first[6][0])
    assert not torch.equal(first[5][0], other[5][0])


def test_training_and_evaluation_data_differ():
    data = splits(SAMPLE)
    assert not torch.equal(data["train"][0][0], data["eval"][0][0])


def test_uniform_floats_stay_between_low_and_high():
    [item] = splits([{"shape": [1000], "dtype": "float16", "low": -2, "high": 3}])["train"][0]
    assert item.dtype == torch.float16
    assert -2 <= item.min() < -1.9
    assert 2.9 < item.max() <= 3


def test_named_items_make_mappings():
    sample = [
        {"name": "input_ids", "shape": [8], "dtype": "int32", "high": 100},
        {"name": "labels", "shape": [], "dtype": "bool"},
    ]
    item = splits(sample)["train"][0]
    assert {key: (tuple(value.shape), value.dtype) for key, value in item.items()} == {
        "input_ids": ((8,), torch.int32),
        "labels": ((), torch.bool),
    }


def test_a_note_says_that_the_data_are_synthetic():
    assert "synthetic" in splits(SAMPLE)["train"].notes[0]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([], "`sample` is not set"),
        ([{"dtype": "int64"}], "`sample[0]` has no `shape`"),
        ([{"shape": [0, 3]}], "`sample[0].shape` is not a list of positive numbers"),
        ([{"shape": 3}], "`sample[0].shape` is not a list of positive numbers"),
        ([{"shape": [], "dtype": "integer"}], "`sample[0].dtype` is not a tensor type"),
        ([{"shape": [], "hihg": 3}], "unknown key `hihg` in `sample[0]`"),
        ([{"shape": [], "low": 3, "high": 3}], "`sample[0].high` must be above `low`"),
        ([{"shape": [], "high": "ten"}], "`sample[0].low` and `high` must be numbers"),
        ([{"shape": [], "name": "x"}, {"shape": []}], "names only some of its items"),
    ],
)
def test_a_wrong_declaration_is_explained(sample, message):
    with pytest.raises(ConfigError) as caught:
        splits(sample)
    assert message in str(caught.value)


def test_all_problems_of_a_declaration_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        splits([{"shape": [-1]}, {"shape": [], "dtype": "int"}])
    assert len(caught.value.problems) == 2


def test_a_negative_length_is_refused():
    with pytest.raises(ConfigError, match=r"`data\.train_samples` is negative"):
        splits(SAMPLE, train_samples=-1)
