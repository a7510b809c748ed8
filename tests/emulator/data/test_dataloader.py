"""The DataLoader in this process: sizes, order, partitions, samplers and invalid arguments."""

import pickle

import pytest
import torch
from data_sources import (
    Counting,
    CountingIterable,
    CountingIterableWithLength,
    Pair,
    collate_into_pair,
    divide_between_workers,
    flat,
    labels,
)

from ipurun.emulator import enums
from ipurun.emulator._capture import structures
from ipurun.emulator._dataloader import DataLoader
from ipurun.emulator.options import Options
from ipurun.emulator.poptorch_core import Error


def options(device_iterations=1, replicas=1, accumulation=1, process=(0, 1), group=1):
    made = Options().deviceIterations(device_iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    made.Distributed.configureProcessId(*process)
    if group > 1:
        made.inputReplicaGrouping(group, enums.CommGroupType.Consecutive)
    return made


class TestBatches:
    @pytest.mark.parametrize(
        ("arguments", "batch_size", "combined"),
        [
            ({}, 8, 8),
            ({"device_iterations": 4}, 2, 8),
            ({"device_iterations": 2, "accumulation": 3, "replicas": 2}, 4, 48),
            ({"replicas": 8, "group": 4}, 3, 6),
        ],
    )
    def test_combined_size(self, arguments, batch_size, combined):
        loader = DataLoader(options(**arguments), Counting(100), batch_size=batch_size)
        assert loader.combinedBatchSize == combined
        assert len(loader) == 100 // combined
        found = labels(loader)
        assert found == [list(range(k * combined, (k + 1) * combined)) for k in range(100 // combined)]

    def test_default_batch_size_is_one(self):
        assert labels(DataLoader(options(), Counting(3))) == [[0], [1], [2]]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_short_last_batch_is_kept_without_drop_last(self, num_workers, caplog):
        loader = DataLoader(options(2), Counting(10), batch_size=2, drop_last=False, num_workers=num_workers)
        assert labels(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert len(loader) == 3
        assert "not a multiple" in caplog.text

    def test_no_warning_if_batches_divide_the_dataset(self, caplog):
        DataLoader(options(2), Counting(8), batch_size=2, drop_last=False)
        assert not caplog.records

    def test_shuffle(self):
        torch.manual_seed(0)
        loader = DataLoader(options(), Counting(64), batch_size=8, shuffle=True)
        first, second = flat(labels(loader)), flat(labels(loader))
        assert sorted(first) == sorted(second) == list(range(64))
        assert first != second

    def test_unbatched(self):
        loader = DataLoader(options(4), Counting(3), batch_size=None, drop_last=False)
        assert loader.combinedBatchSize is None
        assert [int(label) for _, label in loader] == [0, 1, 2]
        with pytest.raises(AttributeError):
            _ = loader.options

    def test_unbatched_cannot_be_combined_with_drop_last(self):
        with pytest.raises(ValueError, match="drop_last"):
            DataLoader(options(), Counting(3), batch_size=None)

    def test_workers_persist_by_default(self):
        assert DataLoader(options(), Counting(3), num_workers=1).persistent_workers
        assert not DataLoader(options(), Counting(3)).persistent_workers
        assert not DataLoader(options(), Counting(3), num_workers=1, persistent_workers=False).persistent_workers

    def test_options_are_kept_and_frozen(self):
        opts = options()
        loader = DataLoader(opts, Counting(3))
        assert loader.options is opts
        with pytest.raises(AttributeError):
            opts.deviceIterations(2)

    def test_options_are_required(self):
        with pytest.raises(AssertionError, match="Options"):
            DataLoader({}, Counting(3))

    def test_terminate_does_nothing(self):
        loader = DataLoader(options(), Counting(2))
        loader.terminate()
        assert labels(loader) == [[0], [1]]

    def test_other_arguments_reach_torch(self):
        loader = DataLoader(options(2), Counting(4), collate_fn=len)
        assert list(loader) == [2, 2]


class TestIterable:
    def test_drops_the_remainder(self):
        assert labels(DataLoader(options(2), CountingIterable(7), batch_size=2)) == [[0, 1, 2, 3]]

    def test_drops_per_worker(self):
        loader = DataLoader(
            options(),
            CountingIterableWithLength(11),
            batch_size=4,
            num_workers=2,
            worker_init_fn=divide_between_workers,
        )
        # Six and five items: one full batch each.
        assert sorted(labels(loader)) == [[0, 1, 2, 3], [6, 7, 8, 9]]
        assert len(loader) == 2

    def test_length_needs_a_dataset_with_one(self):
        with pytest.raises(TypeError, match="has no len"):
            len(DataLoader(options(), CountingIterable(7)))

    def test_duplicates_cause_a_warning(self, caplog):
        DataLoader(options(), CountingIterable(7), num_workers=2)
        assert "worker_init_fn" in caplog.text

    def test_cannot_be_partitioned(self):
        with pytest.raises(AssertionError, match="iterable"):
            DataLoader(options(process=(0, 2)), CountingIterable(7))
        loader = DataLoader(options(process=(0, 2)), CountingIterable(2), auto_distributed_partitioning=False)
        assert labels(loader) == [[0], [1]]


class TestPartition:
    def loaders(self, length, processes, seed=None, **arguments):
        for process in range(processes):
            opts = options(process=(process, processes))
            if seed is not None:
                opts.randomSeed(seed)
            yield DataLoader(opts, Counting(length), **arguments)

    def test_equal_parts_of_full_batches(self):
        # 4 * (100 // 12) = 32 items for each of three processes.
        found = [flat(labels(loader)) for loader in self.loaders(100, 3, batch_size=4)]
        assert found == [list(range(0, 32)), list(range(32, 64)), list(range(64, 96))]

    def test_lengths_follow_the_part(self):
        assert [len(loader) for loader in self.loaders(100, 3, batch_size=4)] == [8, 8, 8]

    def test_everything_without_drop_last(self):
        found = [flat(labels(loader)) for loader in self.loaders(11, 3, batch_size=2, drop_last=False)]
        assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]

    def test_too_little_data(self):
        with pytest.raises(ZeroDivisionError):
            list(self.loaders(5, 3, batch_size=4))

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_shuffled_parts_are_disjoint_and_differ_between_epochs(self, num_workers):
        epochs = [
            (flat(labels(loader)), flat(labels(loader)))
            for loader in self.loaders(50, 3, seed=5, batch_size=4, shuffle=True, num_workers=num_workers)
        ]
        permutations = torch.Generator().manual_seed(5)
        first = torch.randperm(50, generator=permutations).tolist()
        second = torch.randperm(50, generator=permutations).tolist()
        # Each process has 16 items; the other 50 % 16 = 2 items are used in the first epoch.
        assert [one for one, _ in epochs] == [first[2:18], first[18:34], first[34:50]]
        assert [two for _, two in epochs] == [second[0:16], second[16:32], second[32:48]]

    def test_shuffling_needs_a_seed(self):
        with pytest.raises(AssertionError, match="randomSeed"):
            list(self.loaders(50, 2, shuffle=True))

    def test_batches_are_needed(self):
        with pytest.raises(AssertionError, match="batch_size"):
            list(self.loaders(50, 2, batch_size=None))

    def test_partitioning_can_be_turned_off(self):
        found = [flat(labels(loader)) for loader in self.loaders(4, 2, auto_distributed_partitioning=False)]
        assert found == [[0, 1, 2, 3], [0, 1, 2, 3]]


class TestBatchSampler:
    @staticmethod
    def sampler(sizes):
        start, batches = 0, []
        for size in sizes:
            batches.append(list(range(start, start + size)))
            start += size
        return batches

    @pytest.mark.parametrize(("drop_last", "expected"), [(True, [6]), (False, [6, 2])])
    def test_batches_are_joined(self, drop_last, expected):
        loader = DataLoader(options(3), Counting(8), batch_sampler=self.sampler([1, 2, 3, 2]), drop_last=drop_last)
        found = labels(loader)
        assert [len(batch) for batch in found] == expected
        assert flat(found) == list(range(sum(expected)))
        assert len(loader) == 4

    def test_one_micro_batch_is_passed_on(self):
        loader = DataLoader(options(), Counting(6), batch_sampler=self.sampler([1, 2, 3]))
        assert labels(loader) == [[0], [1, 2], [3, 4, 5]]

    def test_its_batch_size_is_used(self):
        sampler = torch.utils.data.BatchSampler(range(8), batch_size=2, drop_last=True)
        loader = DataLoader(options(2), Counting(8), batch_sampler=sampler)
        assert loader.combinedBatchSize == 4
        assert labels(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_batches_of_a_registered_class(self):
        class Parser(structures.ICustomArgParser):
            def yieldTensors(self, struct):
                yield struct.data
                yield struct.label

            def reconstruct(self, original_structure, tensor_iterator):
                return Pair(next(tensor_iterator), next(tensor_iterator))

        structures.registerCustomArgParser(Pair, Parser())
        try:
            loader = DataLoader(
                options(2), Counting(4), batch_sampler=self.sampler([2, 2]), collate_fn=collate_into_pair
            )
            (batch,) = list(loader)
        finally:
            structures.registerCustomArgParser(Pair, None)
        assert isinstance(batch, Pair)
        assert batch.label.tolist() == [0, 1, 2, 3]
        assert batch.data.shape == (4, 2)

    @pytest.mark.parametrize("arguments", [{"batch_size": 2}, {"shuffle": True}])
    def test_cannot_be_combined_with_batch_size_or_shuffle(self, arguments):
        with pytest.raises(Error, match="batch_sampler"):
            DataLoader(options(), Counting(4), batch_sampler=self.sampler([2, 2]), **arguments)

    def test_cannot_be_combined_with_partitioning(self):
        with pytest.raises(Error, match="auto_distributed_partitioning"):
            DataLoader(options(process=(0, 2)), Counting(4), batch_sampler=self.sampler([2, 2]))
        loader = DataLoader(
            options(process=(0, 2)),
            Counting(4),
            batch_sampler=self.sampler([2, 2]),
            auto_distributed_partitioning=False,
        )
        assert labels(loader) == [[0, 1], [2, 3]]


class TestRefusals:
    def test_rebatching_single_items(self):
        with pytest.raises(AssertionError, match="greater than 1"):
            DataLoader(options(), Counting(4), mode=enums.DataLoaderMode.AsyncRebatched)

    def test_workers_with_batches_larger_than_the_combined_size(self):
        with pytest.raises(AssertionError, match="rebatched_worker_size"):
            DataLoader(
                options(),
                Counting(4),
                batch_size=2,
                rebatched_worker_size=3,
                mode=enums.DataLoaderMode.AsyncRebatched,
            )

    def test_rebatched_size_in_the_async_options(self):
        with pytest.raises(AssertionError, match="rebatched_size"):
            DataLoader(options(), Counting(4), async_options={"rebatched_size": 2})


def test_loader_can_be_sent_to_another_process():
    loader = pickle.loads(pickle.dumps(DataLoader(options(2), Counting(4), batch_size=1)))
    assert labels(loader) == [[0, 1], [2, 3]]
