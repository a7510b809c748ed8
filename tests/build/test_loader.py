"""Loaders: the order of samples, samplers of all kinds, positions in an epoch, full batches for inference."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from run_harness import built, config, inspected
from run_toys import Points
from torch.utils.data import TensorDataset, default_collate

from ipurun import emulator
from ipurun.build.loader import TrainLoader
from ipurun.build.workers import AnonymousBatches, WorkerSetup, closed_queues_ignored, kill
from ipurun.config.schema import LoaderConfig
from ipurun.errors import ConfigError
from ipurun.inspect.sampling import EpochOrder, PaddedOrder, ResumableSampler, seed_of, seeded
from ipurun.planning.plan import BatchSizes

SAMPLERS = "torch.utils.data."


def _labels(run: Any, epochs: int = 1) -> List[List[float]]:
    """Return the first coordinates of every batch, which identify the samples."""
    return [batch[0][:, 0].tolist() for _ in range(epochs) for batch in run.train_loader.epoch()]


def _coordinates(indices: List[int]) -> List[float]:
    return Points(32).x[indices, 0].tolist()


def test_batches_hold_a_whole_host_call() -> None:
    run = built(device_iterations=2, devices=2, loader__shuffle=False)
    run.train_loader.start()
    assert _labels(run) == [_coordinates(list(range(16))), _coordinates(list(range(16, 32)))]


def test_shuffling_depends_only_on_seed_and_epoch() -> None:
    first, second, other = built(), built(), built(seed=1)
    for run in (first, second, other):
        run.train_loader.start()
    epochs = _labels(first, 2)
    assert epochs == _labels(second, 2) != _labels(other, 2)
    assert epochs[:8] != epochs[8:]
    assert sorted(itertools.chain(*epochs[:8])) == sorted(_coordinates(list(range(32))))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("epoch", "skip"), [(0, 0), (0, 3), (1, 0), (2, 7)])
def test_batches_are_the_same_from_any_position(workers: int, epoch: int, skip: int) -> None:
    straight, resumed = built(), built(loader__workers=workers)
    straight.train_loader.start()
    everything = _labels(straight, 3)
    resumed.train_loader.start(epoch, skip)
    assert _labels(resumed, 3 - epoch) == everything[epoch * 8 + skip :]
    resumed.train_loader.close()


@pytest.mark.parametrize("mode", ["async", "async_rebatched"])
def test_background_loading_gives_the_same_batches(mode: str) -> None:
    straight, background = built(), built(loader__mode=mode, loader__workers=1)
    straight.train_loader.start()
    everything = _labels(straight, 2)
    background.train_loader.start(0, 2)
    try:
        assert _labels(background, 2) == everything[2:]
    finally:
        background.train_loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["async", "async_rebatched"])
@pytest.mark.parametrize("data", ["run_toys.pair", "run_toys.ShuffledStream"])
def test_background_loading_keeps_the_order_of_epochs(data: str, mode: str, workers: int) -> None:
    """The loop stops at the last batch of an epoch, when the background process may have begun the next one."""
    straight = built(data={"_target_": data}, loader__workers=workers)
    straight.train_loader.start()
    background = built(data={"_target_": data}, loader__mode=mode, loader__workers=workers)
    calls_per_epoch = 8 if data == "run_toys.pair" else 7 * (workers or 1)
    background.train_loader.start()
    try:
        for _ in range(3):
            expected = [batch[0].tolist() for batch in straight.train_loader.epoch()]
            seen = [batch[0].tolist() for batch in itertools.islice(background.train_loader.epoch(), calls_per_epoch)]
            assert seen == expected
            time.sleep(0.05)
    finally:
        straight.train_loader.close()
        background.train_loader.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_stream_that_is_longer_than_its_length_ends_with_it(mode: str) -> None:
    run = built(data={"_target_": "run_toys.ShuffledStream", "claimed": 16}, loader__mode=mode)
    run.train_loader.start()
    try:
        assert [len(_labels(run)) for _ in range(2)] == [4, 4]
    finally:
        run.train_loader.close()


@pytest.mark.parametrize(("mode", "workers"), [("sync", 2), ("async", 0), ("async_rebatched", 2)])
def test_samples_of_other_processes_are_the_same_from_any_position(mode: str, workers: int) -> None:
    """Augmentation draws random numbers, which depend on the epoch and the position, not on what a worker loaded."""
    changes: Dict[str, Any] = {"loader__mode": mode, "loader__workers": workers}
    changes["data"] = {"_target_": "run_toys.EpochPoints", "_eval_": None}
    straight, resumed = built(**changes), built(**changes)
    straight.train_loader.start()
    resumed.train_loader.start(1, 3)
    try:
        everything = _labels(straight, 3)
        assert _labels(resumed, 2) == everything[11:]
        assert len({number for batch in everything for number in batch}) == 3 * 32
        assert [round(batch[0] / 100) for batch in everything] == [0] * 8 + [1] * 8 + [2] * 8
    finally:
        straight.train_loader.close()
        resumed.train_loader.close()


def test_a_stream_is_read_up_to_the_position() -> None:
    run = built(data={"_target_": "run_toys.Stream"})
    run.train_loader.start(0, 5)
    assert _labels(run) == [_coordinates(list(range(start, start + 4))) for start in (20, 24, 28)]
    assert len(_labels(run)) == 8


def test_any_iterable_is_a_stream() -> None:
    run = built(data={"_target_": "run_toys.PlainIterable"})
    run.train_loader.start()
    expected = [_coordinates(list(range(start, start + 4))) for start in range(0, 32, 4)]
    assert _labels(run) == expected and _labels(run) == expected


def test_a_sampler_by_target() -> None:
    run = built(loader__sampler={"_target_": "run_toys.EveryOther"})
    run.train_loader.start()
    assert _labels(run) == [_coordinates(list(range(start, start + 8, 2))) for start in (0, 8, 16, 24)]
    assert run.plan.steps.calls_per_epoch == 4


def test_a_sampler_without_a_data_set() -> None:
    sampler = {"_target_": SAMPLERS + "SubsetRandomSampler", "indices": [1, 5, 9, 13]}
    run = built(loader__sampler=sampler)
    run.train_loader.start()
    first, second = _labels(run), _labels(run)
    assert sorted(first[0]) == sorted(_coordinates([1, 5, 9, 13])) and len(first) == 1
    run.train_loader.start()
    assert _labels(run) == first and _labels(run) == second


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_sampler_yields_micro_batches(devices: int) -> None:
    run = built(loader__batch_sampler={"_target_": SAMPLERS + "BatchSampler"}, loader__shuffle=False, devices=devices)
    run.train_loader.start()
    size = 4 * devices
    expected = [_coordinates(list(range(start, start + size))) for start in range(0, 32, size)]
    assert _labels(run) == expected
    run.train_loader.start(0, 2)
    assert _labels(run) == expected[2:]


def test_epochs_of_a_batch_sampler_are_shuffled() -> None:
    run = built(loader__batch_sampler={"_target_": SAMPLERS + "BatchSampler"})
    run.train_loader.start()
    first, second = _labels(run), _labels(run)
    assert first != second and sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"loader__sampler": {"_target_": "run_toys.EveryOthr"}}, "EveryOthr"),
        ({"loader__sampler": {"_target_": "run_toys.EveryOther", "step": 3}}, "`step`"),
        ({"loader__sampler": {"weights": 3}}, "has no `_target_`"),
        ({"loader__sampler": {"_target_": SAMPLERS + "WeightedRandomSampler", "weights": [1.0]}}, "num_samples"),
        (
            {"loader__sampler": {"_target_": "run_toys.EveryOther"}, "loader__batch_sampler": {"_target_": "a.b"}},
            "cannot both be set",
        ),
        ({"loader__collate": "run_toys.nothing"}, "nothing"),
        (
            {"loader__sampler": {"_target_": "run_toys.EveryOther"}, "data": {"_target_": "run_toys.Stream"}},
            "an iterable data set cannot have a sampler",
        ),
    ],
)
def test_wrong_loaders(changes: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        inspected(config(**changes))


def test_a_users_collate_function() -> None:
    run = built(loader__collate="run_toys.doubled", loader__shuffle=False)
    run.train_loader.start()
    assert _labels(run)[0] == [2 * value for value in _coordinates([0, 1, 2, 3])]


def test_settings_that_poptorch_refuses_are_a_config_error() -> None:
    sizes = BatchSizes(micro_batch_size=1, device_iterations=1, gradient_accumulation=1, replicas=1)
    settings = LoaderConfig(mode="async_rebatched")
    loader = TrainLoader(emulator, emulator.Options(), Points(32), settings, sizes, 0, default_collate)
    with pytest.raises(ConfigError, match="cannot load the data with these settings"):
        loader.start()


def test_orders() -> None:
    assert list(EpochOrder(4, 0, shuffle=False)) == [0, 1, 2, 3]
    assert list(PaddedOrder(range(5), 2, 4)) == [0, 1, 2, 3, 4, 4, 4, 4]
    assert list(PaddedOrder(range(6), 4, 8)) == [0, 1, 2, 3, 4, 5, 4, 5]
    assert list(PaddedOrder(range(4), 2, 8)) == [0, 1, 2, 3, 2, 3, 2, 3]
    assert list(PaddedOrder(range(8), 4, 4)) == list(range(8))
    assert list(PaddedOrder(range(1), 4, 3)) == [0, 0, 0]
    order = ResumableSampler(EpochOrder(4, 0, shuffle=False), seed=0, skip=3)
    assert len(order) == 1 and list(order) == [3] and len(order) == 4 and list(order) == [0, 1, 2, 3]


def test_neighbouring_seeds_differ() -> None:
    assert len({seed_of(seed, epoch) for seed in range(20) for epoch in range(20)}) == 400
    assert seed_of(1, 2) != seed_of(2, 1)


def test_seeded_restores_the_global_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(9):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(9):
        assert torch.equal(torch.rand(3), inside)


def _collated(samples: Any) -> Any:
    return {"sum": torch.stack([x for x, _ in samples]).sum(0)}


@pytest.mark.parametrize("collate", [default_collate, _collated])
def test_batches_of_workers_are_in_memory_without_a_name(collate: Any) -> None:
    """A named segment is left behind if a worker is killed while it allocates."""
    data = [(torch.full((3,), float(index)), index) for index in range(8)]
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, collate_fn=AnonymousBatches(collate), worker_init_fn=WorkerSetup()
    )
    named = "/dev/shm/torch_"
    before = Path("/proc/self/maps").read_text().count(named)
    batches = list(loader)
    expected = list(torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate))
    assert str(batches) == str(expected)
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:ipurun_batch" in maps and maps.count(named) == before


class _Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * item for item in super().__getitem__(index))


@pytest.mark.parametrize("kind", [TensorDataset, _Doubled])
def test_tensors_in_memory_give_the_batches_of_their_samples(kind: Any) -> None:
    data = kind(torch.randn(12, 3), torch.arange(12), torch.randn(12, 2).to(torch.bfloat16))
    options, sizes = emulator.Options().deviceIterations(2), BatchSizes(2, 2, 1, 1)
    loader = TrainLoader(emulator, options, data, LoaderConfig(), sizes, 7, default_collate)
    loader.start(epoch=1)
    order = EpochOrder(12, 7, True)
    order.set_epoch(1)
    indices = list(order)
    expected = [default_collate([data[i] for i in indices[at : at + 4]]) for at in (0, 4, 8)]
    seen = list(loader.epoch())
    assert [type(batch) for batch in seen] == [list] * 3
    for batch, wanted in zip(seen, expected):
        assert all(torch.equal(item, other) and item.dtype == other.dtype for item, other in zip(batch, wanted))


@pytest.mark.parametrize(
    ("context", "reported"), [(closed_queues_ignored, False), (contextlib.nullcontext, True)], ids=["ignored", "usual"]
)
def test_a_queue_of_a_closed_loader_reports_nothing(context: Any, reported: bool, capfd: Any) -> None:
    queue: Any = multiprocessing.Queue()
    queue._reader.close()
    with context():
        queue.put("an index")
    queue.close()
    queue.join_thread()
    assert ("BrokenPipeError" in capfd.readouterr().err) == reported


def test_workers_are_ended_unnoticed_where_torch_watches_its_own() -> None:
    """A loader of the user's, in a notebook for example, has torch raise wherever the main thread is."""

    def raise_as_torch(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker is killed by signal")

    before = signal.signal(signal.SIGCHLD, raise_as_torch)
    try:
        worker = multiprocessing.Process(target=time.sleep, args=(60,))
        worker.start()
        kill([worker])
        assert worker.exitcode == -signal.SIGKILL
        assert signal.getsignal(signal.SIGCHLD) is raise_as_torch
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_reports_errors_but_not_that_the_run_is_gone(capsys: Any) -> None:
    from ipurun.build.workers import _report_unless_disconnected

    for error in (ConnectionResetError(), EOFError(), ValueError("a real error")):
        _report_unless_disconnected(type(error), error, None)
    printed = capsys.readouterr().err
    assert "a real error" in printed and "Connection" not in printed and "EOF" not in printed
