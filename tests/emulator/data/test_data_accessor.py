"""The AsynchronousDataAccessor: items, prefetching, failures and the end of its process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_sources import (
    Counting,
    CountingIterable,
    CountingNested,
    Epochs,
    GrowingShapes,
    Pair,
    Stuck,
    collate_into_pair,
)

from ipurun.emulator import enums
from ipurun.emulator._capture import structures
from ipurun.emulator._data.accessor import AsynchronousDataAccessor
from ipurun.emulator._dataloader import DataLoader
from ipurun.emulator.options import Options
from ipurun.emulator.poptorch_core import Error

FORK = enums.SharingStrategy.Fork


@pytest.fixture
def access():
    made = []

    def make(dataset, **arguments):
        accessor = AsynchronousDataAccessor(dataset, **{"sharing_strategy": FORK, **arguments})
        made.append(accessor)
        return accessor

    yield make
    for accessor in made:
        accessor.terminate()


def numbers(accessor):
    return [int(item[1]) for item in accessor]


def ready_slots(accessor):
    return sum(accessor._worker._data_buffers.indices_mem)


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


class TestItems:
    @pytest.mark.parametrize("dataset", [Counting(7), CountingIterable(7)])
    @pytest.mark.parametrize("load_indefinitely", [True, False])
    def test_plain_dataset(self, access, dataset, load_indefinitely):
        accessor = access(dataset, load_indefinitely=load_indefinitely)
        assert [numbers(accessor) for _ in range(3)] == [list(range(7))] * 3

    def test_sequences_become_lists(self, access):
        assert type(next(iter(access(Counting(2))))) is list

    def test_item_is_valid_until_the_next(self, access):
        accessor = access(Counting(20), buffer_size=1)
        iterator = iter(accessor)
        first = next(iterator)
        kept = first[1].clone()
        for _ in range(5):
            next(iterator)
        assert int(kept) == 0
        assert int(first[1]) != 0

    def test_no_item_after_the_last(self, access):
        accessor = access(Counting(2))
        assert numbers(accessor) == [0, 1]
        with pytest.raises(StopIteration):
            next(accessor)
        assert numbers(accessor) == [0, 1]

    def test_next_without_iter(self, access):
        assert int(next(access(Counting(2)))[1]) == 0

    def test_torch_loader(self, access):
        loader = torch.utils.data.DataLoader(Counting(6), batch_size=2)
        accessor = access(loader)
        assert len(accessor) == 3
        assert [item[1].tolist() for item in accessor] == [[0, 1], [2, 3], [4, 5]]

    def test_registered_class(self, access):
        class Parser(structures.ICustomArgParser):
            def yieldTensors(self, struct):
                yield struct.data
                yield struct.label

            def reconstruct(self, original_structure, tensor_iterator):
                return Pair(next(tensor_iterator), next(tensor_iterator))

        structures.registerCustomArgParser(Pair, Parser())
        try:
            loader = torch.utils.data.DataLoader(Counting(4), batch_size=2, collate_fn=collate_into_pair)
            found = [(type(item), item.label.tolist()) for item in access(loader)]
        finally:
            structures.registerCustomArgParser(Pair, None)
        assert found == [(Pair, [0, 1]), (Pair, [2, 3])]


class TestRebatching:
    def test_torch_loader(self, access):
        loader = torch.utils.data.DataLoader(Counting(11), batch_size=3)
        accessor = access(loader, rebatched_size=4)
        assert [item[1].tolist() for item in accessor] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert len(accessor) == 4 * 3 // 4

    def test_size_must_be_greater_than_one(self):
        with pytest.raises(AssertionError, match="rebatched_size"):
            AsynchronousDataAccessor(Counting(4), rebatched_size=1)


class TestReadingAhead:
    def test_only_the_first_item_before_iteration(self, access):
        accessor = access(Counting(10), buffer_size=4)
        preloading = access(Counting(10), buffer_size=4, early_preload=True)
        wait_for(lambda: ready_slots(preloading) == 4 and ready_slots(accessor))
        assert ready_slots(accessor) == 1

    def test_next_epoch_is_prefetched(self, access):
        accessor = access(Counting(5), buffer_size=3)
        assert numbers(accessor) == [0, 1, 2, 3, 4]
        wait_for(lambda: ready_slots(accessor) == 3)

    def test_next_epoch_waits_without_load_indefinitely(self, access):
        accessor = access(Counting(5), buffer_size=3, load_indefinitely=False)
        assert numbers(accessor) == [0, 1, 2, 3, 4]
        time.sleep(0.1)
        assert ready_slots(accessor) == 0


class TestFailures:
    def test_buffer_size_must_be_positive(self):
        with pytest.raises(AssertionError, match="buffer_size"):
            AsynchronousDataAccessor(Counting(4), buffer_size=0)

    @pytest.mark.parametrize("dataset", [Counting(0), Counting(4, broken_at=0), CountingNested(2)])
    def test_at_the_start(self, dataset, capfd):
        with pytest.raises(Error, match="worker thread failed to start"):
            AsynchronousDataAccessor(dataset, sharing_strategy=FORK)
        assert "Traceback" in capfd.readouterr().err

    def test_in_the_middle(self, access, capfd):
        accessor = access(Counting(10, broken_at=4))
        seen = []
        with pytest.raises(AssertionError, match="failed"):
            for item in accessor:
                seen.append(int(item[1]))
        assert seen == [0, 1, 2, 3]
        assert "item 4 is broken" in capfd.readouterr().err
        with pytest.raises(AssertionError, match="failed"):
            next(iter(accessor))

    def test_shapes_may_not_change(self, access, capfd):
        accessor = access(GrowingShapes(3))
        with pytest.raises(AssertionError, match="failed"):
            list(accessor)
        assert "fixed by the first item" in capfd.readouterr().err

    def test_killed_worker(self, access):
        accessor = access(Counting(100))
        iterator = iter(accessor)
        next(iterator)
        os.kill(accessor._worker._process.pid, signal.SIGKILL)
        with pytest.raises(AssertionError, match="failed"):
            list(iterator)

    def test_loader_with_a_short_last_batch(self):
        loader = DataLoader(Options(), Counting(5), batch_size=2, drop_last=False)
        with pytest.raises(AssertionError, match="drop_last"):
            AsynchronousDataAccessor(loader, sharing_strategy=FORK)


class TestEnd:
    def test_terminate_ends_the_process(self, access):
        accessor = access(Counting(4))
        process = accessor._worker._process
        accessor.terminate()
        accessor.terminate()
        assert not process.is_alive()

    def test_deleting_ends_the_process(self):
        accessor = AsynchronousDataAccessor(Counting(4), sharing_strategy=FORK)
        process = accessor._worker._process
        del accessor
        assert not process.is_alive()

    def test_forked_copy_does_not_end_it(self, access):
        accessor = access(Counting(4))
        copy = multiprocessing.get_context("fork").Process(target=accessor.terminate)
        copy.start()
        copy.join()
        assert copy.exitcode == 0
        assert numbers(accessor) == [0, 1, 2, 3]

    def test_hanging_dataset_does_not_prevent_it(self, access):
        accessor = access(Stuck(4), early_preload=True)
        process = accessor._worker._process
        accessor.terminate()
        assert not process.is_alive()


SCRIPT = """
import os, sys, time
sys.path[:0] = {path!r}
from data_sources import Counting
from ipurun.emulator.enums import DataLoaderMode
from ipurun.emulator._dataloader import DataLoader
from ipurun.emulator.options import Options

if __name__ == "__main__":
    loader = DataLoader(Options(), Counting(40), batch_size=2, num_workers=1, mode=DataLoaderMode.Async)
    for batch in loader:
        break
    try:
        # Inside the try block: whoever reads this line may send the signal before the next one runs.
        print("worker", loader._accessor._worker._process.pid, flush=True)
        if "wait" in sys.argv:
            time.sleep(120)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


class TestProgram:
    """Complete programs with the default start method, where the worker is not their child process."""

    @pytest.fixture
    def script(self, tmp_path):
        here = Path(__file__).resolve().parent
        script = tmp_path / "program.py"
        script.write_text(SCRIPT.format(path=[str(here), str(here.parents[2])]))
        return script

    @staticmethod
    def is_running(pid):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    def test_no_process_is_left_at_exit(self, script):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        assert done.stderr == ""
        pid = int(done.stdout.split()[1])
        wait_for(lambda: not self.is_running(pid))

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
    def test_no_process_is_left_after_a_signal(self, script, how):
        program = subprocess.Popen(
            [sys.executable, str(script), "wait"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        pid = int(program.stdout.readline().split()[1])
        assert self.is_running(pid)
        if how == signal.SIGINT:
            os.killpg(program.pid, how)  # like a terminal, which also signals the worker
            output, errors = program.communicate(timeout=240)
            assert output == "interrupted\n"
            assert errors == ""
        else:
            program.kill()
            program.wait()
            program.stdout.close()
            program.stderr.close()
        wait_for(lambda: not self.is_running(pid))


@pytest.mark.parametrize("load_indefinitely", [True, False])
def test_an_epoch_left_after_its_last_item_is_not_restarted(access, load_indefinitely):
    accessor = access(Epochs(), buffer_size=5, load_indefinitely=load_indefinitely)
    seen = []
    for _ in range(3):
        items = iter(accessor)
        seen += [int(next(items)[1]) for _ in range(3)]
        wait_for(lambda: ready_slots(accessor) >= 2)  # the last item, still in use, and the end of the epoch
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_items_are_in_memory_without_a_name(access):
    """A named segment would be left behind if the worker were killed while it allocates."""
    item = next(iter(access(Counting(4))))
    maps = Path("/proc/self/maps").read_text()
    assert item[0].is_shared() and "memfd:AsynchronousDataAccessor" in maps


def test_a_worker_that_nobody_waits_for_ends_quietly(capfd):
    """The run was interrupted while the process started: there is nothing to report."""
    from ipurun.emulator._data.ring import Ring
    from ipurun.emulator._data.worker import WorkerSettings, worker_main

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    receiver.close()
    settings = WorkerSettings(0.001, False, False, None, False, None, 1, None)
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    process = context.Process(target=worker_main, args=(data, Ring(context, 3), sender, settings))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err
