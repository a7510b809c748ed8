"""The asynchronous modes of the DataLoader, with real worker processes."""

import multiprocessing

import pytest
import torch
from data_sources import (
    ChangingTypes,
    Counting,
    CountingDict,
    CountingIterable,
    CountingIterableWithLength,
    ProcessIds,
    StartMethods,
    divide_between_workers,
    flat,
    labels,
)
from torch.utils.data import BatchSampler

from ipurun.emulator import enums
from ipurun.emulator._data.accessor import AsynchronousDataAccessor
from ipurun.emulator._dataloader import DataLoader
from ipurun.emulator.options import Options
from ipurun.emulator.poptorch_core import Error

Mode = enums.DataLoaderMode
# Forking is fast; the default start method has separate tests.
FORK = {"sharing_strategy": enums.SharingStrategy.Fork}
DEFAULT_START = {"sharing_strategy": enums.SharingStrategy.ForkServer}


@pytest.fixture
def load():
    made = []

    def make(dataset, mode=Mode.Async, device_iterations=1, async_options=None, opts=None, **arguments):
        opts = opts or Options().deviceIterations(device_iterations)
        loader = DataLoader(opts, dataset, mode=mode, async_options={**FORK, **(async_options or {})}, **arguments)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.terminate()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_over_epochs(load, num_workers):
    loader = load(Counting(13), batch_size=2, device_iterations=2, num_workers=num_workers)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(loader) == 3
    assert [labels(loader) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("strategy", list(enums.SharingStrategy))
def test_every_start_method(load, strategy):
    loader = load(Counting(6), batch_size=2, async_options={"sharing_strategy": strategy})
    assert labels(loader) == [[0, 1], [2, 3], [4, 5]]


def test_runs_in_another_process(load):
    import os

    (batch,) = list(load(ProcessIds(1)))
    assert batch.item() != os.getpid()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_abandoned_epoch_starts_again(load, num_workers, persistent_workers):
    keep = persistent_workers and num_workers > 0
    loader = load(Counting(10), num_workers=num_workers, persistent_workers=keep)
    for consumed, batch in enumerate(loader):
        if consumed == 4:
            assert batch[1].tolist() == [4]
            break
    assert flat(labels(loader)) == list(range(10))
    next(iter(loader))
    assert flat(labels(loader)) == list(range(10))


def test_shuffle_differs_between_epochs(load):
    loader = load(Counting(64), batch_size=8, shuffle=True)
    first, second = flat(labels(loader)), flat(labels(loader))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


def test_shuffle_with_several_processes(load):
    opts = Options().randomSeed(42)
    opts.Distributed.configureProcessId(1, 2)
    loader = load(Counting(20), opts=opts, batch_size=2, shuffle=True, async_options={**DEFAULT_START})
    seen = flat(labels(loader))
    assert len(seen) == len(set(seen)) == 10


def test_workers_of_the_loader_start_the_same_way_without_the_accessor(load):
    loader = load(StartMethods(4), batch_size=1, num_workers=1, async_options={**DEFAULT_START})
    assert {int(item) for item in loader} == {
        multiprocessing.get_all_start_methods().index(multiprocessing.get_start_method())
    }


def test_dictionaries(load):
    found = [(sorted(batch), batch["label"].tolist()) for batch in load(CountingDict(4), batch_size=2)]
    assert found == [(["data", "label"], [0, 1]), (["data", "label"], [2, 3])]


def test_unbatched_iterable(load):
    loader = load(CountingIterable(5), batch_size=None, drop_last=False)
    assert [[int(batch[1]) for batch in loader] for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(TypeError, match="has no len"):
        len(loader)


def test_partitioned_between_processes(load):
    found = []
    for process in range(3):
        opts = Options()
        opts.Distributed.configureProcessId(process, 3)
        loader = load(Counting(28), batch_size=4, opts=opts)
        assert len(loader) == 2
        found.append(flat(labels(loader)))
    assert found == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]


class TestRebatched:
    def test_short_last_batch_turns_it_on(self, load):
        loader = load(Counting(10), batch_size=4, drop_last=False)
        assert len(loader) == 3
        assert [labels(loader) for _ in range(2)] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 2

    @pytest.mark.parametrize("rebatched_worker_size", [None, 1, 3])
    @pytest.mark.parametrize("drop_last", [True, False])
    def test_map_style(self, load, rebatched_worker_size, drop_last):
        loader = load(
            Counting(21),
            mode=Mode.AsyncRebatched,
            batch_size=2,
            device_iterations=2,
            num_workers=2,
            rebatched_worker_size=rebatched_worker_size,
            drop_last=drop_last,
        )
        expected = [list(range(start, start + 4)) for start in range(0, 20, 4)]
        if not drop_last:
            expected.append([20])
        assert labels(loader) == expected
        assert len(loader) == len(expected)

    def test_iterable_uses_the_remainder_of_all_workers(self, load):
        loader = load(
            CountingIterableWithLength(13),
            mode=Mode.AsyncRebatched,
            batch_size=4,
            num_workers=2,
            worker_init_fn=divide_between_workers,
        )
        # Seven and six items: one full batch from each worker separately, three from both together.
        found = labels(loader)
        assert [len(batch) for batch in found] == [4, 4, 4]
        assert len(set(flat(found))) == 12
        assert len(loader) == 3

    def test_partitioned(self, load):
        opts = Options()
        opts.Distributed.configureProcessId(1, 2)
        loader = load(Counting(11), mode=Mode.AsyncRebatched, batch_size=2, drop_last=False, opts=opts)
        assert labels(loader) == [[6, 7], [8, 9], [10]]
        assert len(loader) == 3


def test_terminated_loader_returns_nothing(load):
    loader = load(Counting(4))
    loader.terminate()
    with pytest.raises(AssertionError, match="terminated"):
        next(iter(loader))


def test_second_accessor_is_refused(load):
    with pytest.raises(Error, match="already"):
        AsynchronousDataAccessor(load(Counting(4)))


def test_batch_sampler(load):
    loader = load(Counting(8), device_iterations=2, batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7]])
    assert labels(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("mode", [Mode.Async, Mode.AsyncRebatched])
@pytest.mark.parametrize("first", [0, 4])
def test_items_get_the_types_of_the_first_batch(load, mode, first):
    """PopTorch copies later batches into memory that is made for the first one."""
    order = [*range(first, 8), *range(first)]
    sampler = BatchSampler(order, batch_size=2, drop_last=True)
    loader = load(ChangingTypes(8), mode=mode, device_iterations=2, batch_sampler=sampler)
    batches = [(data.dtype, data[:, 0].tolist(), label.tolist()) for data, label in loader]
    dtype = torch.float64 if first == 0 else torch.float32
    assert batches == [(dtype, order[:4], order[:4]), (dtype, order[4:], order[4:])]


def test_rebatched_pieces_get_the_types_of_the_first_piece(load):
    loader = load(ChangingTypes(8), mode=Mode.AsyncRebatched, batch_size=4, rebatched_worker_size=1)
    assert [data.dtype for data, _ in loader] == [torch.float64] * 2
