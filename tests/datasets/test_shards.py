"""Numbered shards: read as a stream, divided by position, resumed in the middle of a shard."""

import io
import pickle
import tarfile
from typing import Any, List

import numpy as np
import pytest
import torch
from run_harness import Folder, Recorder, built, trained
from run_toys import Countdown, countdown
from torch.utils.data import default_collate

import ipurun
from ipurun import emulator
from ipurun.build.loader import TrainLoader, _Part, _Parts, _Share
from ipurun.checkpoint import latest
from ipurun.config.schema import LoaderConfig
from ipurun.datasets.shards import splits
from ipurun.errors import ConfigError
from ipurun.planning.plan import BatchSizes
from ipurun.recipes.mnist.dataset import splits as mnist_splits
from ipurun.training.evaluate import gathered, predict

LENGTHS = (7, 12, 1, 9, 11)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def _write(folder: Any, kind: str) -> str:
    """Write shards whose samples are four numbers that begin with their own number, and a class."""
    number = 0
    for shard, length in enumerate(LENGTHS):
        ids = np.arange(number, number + length)
        number += length
        points = np.stack([ids, np.sin(ids), np.cos(ids), ids % 5], 1).astype(np.float32) / 40
        file = folder / f"part-{shard:04d}.{kind}"
        if kind == "npz":
            np.savez(file, point=points, label=ids % 3)
            continue
        with tarfile.open(file, "w") as archive:
            for row, index in enumerate(ids):
                _add(archive, f"some/{index:06d}.point.npy", _npy(points[row]))
                _add(archive, f"some/{index:06d}.cls", str(index % 3).encode())
    return str(folder / f"part-*.{kind}")


def _ids(samples: Any) -> List[int]:
    return [round(float(sample[0][0]) * 40) for sample in samples]


@pytest.fixture(params=["npz", "tar"])
def files(request, tmp_path):
    return _write(tmp_path, request.param)


def test_every_sample_comes_once_in_an_order_of_seed_and_epoch(files):
    stream = splits(files, seed=3)["train"]
    assert len(stream) == sum(LENGTHS)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append(_ids(stream))
        assert sorted(orders[-1]) == list(range(40))
    assert orders[0] == orders[2] != orders[1] and orders[0] != sorted(orders[0])
    point, label = next(splits(files, shuffle=False)["train"].read(17, 18))
    assert round(float(point[0]) * 40) == 17 and int(label) == 17 % 3 and point.dtype == torch.float32


def test_fields_choose_order_and_keys(files):
    point, label = ("point", "label") if files.endswith("npz") else ("point.npy", "cls")
    first = next(iter(splits(files, fields=[label], shuffle=False)["train"]))
    assert len(first) == 1 and int(first[0]) == 0
    named = next(iter(splits(files, fields={"features": point, "labels": label}, shuffle=False)["train"]))
    assert list(named) == ["features", "labels"]
    with pytest.raises(ConfigError, match="weight"):
        splits(files, fields=[point, "weight"])


def test_a_shard_is_open_at_a_time_and_processes_open_their_own(files):
    stream = splits(files, seed=1)["train"]
    samples = stream.read(0, 40)
    next(samples)
    copied = pickle.loads(pickle.dumps(stream))
    assert _ids(copied) == _ids(stream)


@pytest.mark.parametrize("piece", [4, 8])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_join_to_the_whole(files, workers, processes, piece, monkeypatch):
    # What torch's loader does with the batches of its workers, without starting any.
    stream = splits(files, seed=5)["train"]
    stream.set_epoch(2)
    rows, total = 8, 40 // (8 * processes) * 8 * processes
    whole, joined = _ids(stream)[:total], {}
    for process in range(processes):
        for start in (0, 8):
            batches = []
            for number in range(workers):
                info = type("Info", (), {"id": number, "num_workers": workers})
                monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
                part = _Part(rows, piece, _Share(process, processes, rows), drops_last=True)
                found = _ids(_Parts(splits(files, seed=5)["train"], part, epoch=2, start=start))
                batches.append([found[at : at + piece] for at in range(0, len(found), piece)])
            in_turn = [batches[at % workers][at // workers] for at in range(sum(map(len, batches)))]
            joined[process, start] = [index for batch in in_turn for index in batch]
            assert joined[process, start] == joined[process, 0][start:]
    calls = total // rows
    assert [joined[c % processes, 0][c // processes * rows + r] for c in range(calls) for r in range(rows)] == whole


def test_damaged_and_foreign_shards_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a-0.npz", x=np.zeros((3, 2)))
    np.savez(tmp_path / "b-0.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    np.savez(tmp_path / "c-0.npz", x=np.array([{}, {}]))
    (tmp_path / "d-0.npz").write_bytes(b"PK\3\4 cut off")
    (tmp_path / "e-0.tar").write_bytes(b"no tar" * 200)
    with tarfile.open(tmp_path / "f-0.tar", "w") as archive:
        _add(archive, "one.npy", _npy(np.zeros(2)))
        _add(archive, "one.cls", b"1")
        _add(archive, "two.npy", _npy(np.zeros(2)))
    with tarfile.open(tmp_path / "g-0.tar.gz", "w:gz") as archive:
        _add(archive, "one.npy", _npy(np.zeros(2)))
    messages = {
        "a-*.npz": "write it with numpy.savez",
        "b-*.npz": "do not have the same number of rows",
        "c-*.npz": "could run code",
        "d-*.npz": "not a zip file",
        "e-*.tar": "a shard cannot be read",
        "f-*.tar": "two has no part cls",
        "g-*.gz": "a shard cannot be read",
        "h-*.tar": "no file in",
    }
    for pattern, message in messages.items():
        with pytest.raises(ConfigError) as caught:
            splits(str(tmp_path / pattern))
        assert message in " ".join(str(caught.value).split()), pattern


class Exploit:
    def __reduce__(self):
        return (exec, ("open('exploited', 'w')",))


def test_tar_members_are_neither_unpacked_nor_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tarfile.open("a-0.tar", "w") as archive:
        _add(archive, "../outside.npy", _npy(np.zeros(2)))
        link = tarfile.TarInfo("link.npy")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert len(list(splits("a-0.tar")["train"])) == 1
    with tarfile.open("b-0.tar", "w") as archive:
        _add(archive, "x.npy", _npy(np.array([Exploit()], dtype=object)))
    with pytest.raises(ValueError, match="allow_pickle"):
        list(splits("b-0.tar")["train"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0.tar", "b-0.tar"]
    assert not (tmp_path.parent / "outside.npy").exists()


def test_any_iterable_can_be_read_by_position():
    whole = _ids(Countdown())
    shared = countdown()
    assert _ids(shared.read(4, 9)) == whole[4:9]
    suspended = shared.read(10, 12)
    found = _ids([next(suspended), next(suspended)])
    assert _ids(shared.read(0, 3)) == whole[:3]  # another reader begins again
    assert found + _ids(suspended) == whole[10:12]
    assert _ids(shared.read(38, 50)) == whole[38:]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("npz", {}),
        ("tar", {}),
        ("iterable", {}),
        ("npz", {"device_iterations": 2, "devices": 2}),
        ("tar", {"loader__workers": 1}),
        ("iterable", {"loader__workers": 2}),
        ("npz", {"loader__workers": 2, "loader__mode": "async"}),
    ],
)
def test_a_run_resumed_in_the_middle_of_a_shard_equals_a_whole_one(tmp_path, kind, keys):
    data = {"_target_": "run_toys.countdown"}
    if kind != "iterable":
        data = {"_target_": "ipurun.datasets.shards.splits", "files": _write(tmp_path, kind), "seed": 2}
    sizes = {key: value for key, value in keys.items() if not key.startswith("loader")}
    samples = 2 * sizes.get("device_iterations", 1) * sizes.get("devices", 1)
    named = {"data": data, "micro_batch_size": 2, "epochs": 2, **sizes}
    whole, summary, _ = trained(tmp_path / "whole", **named)  # read in this process
    assert summary.step * 2 * sizes.get("devices", 1) == 2 * (40 // samples * samples)
    _, before, _ = trained(tmp_path / "half", max_steps=summary.step // 4 + 1, **{**named, "epochs": None})
    assert 0 < before.step < summary.step // 2  # inside the first epoch
    resumed, after, _ = trained(tmp_path / "half", resume_from=latest(Folder(tmp_path / "half")), **{**named, **keys})
    assert after.step == summary.step
    expected = whole.user_model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.user_model.state_dict().items())


def test_evaluation_reads_every_sample_once_with_workers(tmp_path):
    files = _write(tmp_path, "tar")
    data = {"_target_": "ipurun.datasets.shards.splits", "files": files, "eval_files": files}
    for workers in (0, 2):
        run = built(data=data, loader__workers=workers)
        found = gathered(predict(run, "eval", Recorder(), ["index", "input", "output"]))
        run.close()
        assert found["index"].tolist() == list(range(40)) and _ids(zip(found["input"])) == list(range(40))


def test_processes_read_different_host_calls(tmp_path):
    data = splits(_write(tmp_path, "npz"), seed=4)["train"]
    whole = _ids(data)
    found = []
    for process in range(2):
        options = emulator.Options()
        options.Distributed.configureProcessId(process, 2)
        sizes = BatchSizes(micro_batch_size=4, device_iterations=1, gradient_accumulation=1, replicas=1)
        loader = TrainLoader(emulator, options, data, LoaderConfig(), sizes, 0, default_collate)
        loader.start(epoch=0, skip_calls=1)
        found.append([_ids(zip(batch[0])) for batch in loader.epoch()])
        loader.close()
    calls = [whole[at : at + 4] for at in range(0, 40, 4)]
    assert found == [calls[2::2], calls[3::2]]


@pytest.mark.parametrize("data", ["shards", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_without_shuffling_every_epoch_of_a_stream_is_the_first(tmp_path, data, workers):
    class Shuffled(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(torch.full((4,), float(number)) / 40, 0) for number in torch.randperm(40)])

    stream = splits(_write(tmp_path, "npz"), seed=4)["train"] if data == "shards" else Shuffled()
    sizes = BatchSizes(micro_batch_size=4, device_iterations=1, gradient_accumulation=1, replicas=1)
    firsts = {}
    for shuffle in (True, False):
        config = LoaderConfig(shuffle=shuffle, workers=workers)
        loader = TrainLoader(emulator, emulator.Options(), stream, config, sizes, 0, default_collate)
        loader.start(epoch=3)
        firsts[shuffle] = [_ids(zip(next(loader.epoch())[0])) for _ in range(2)]
        loader.start(epoch=0)
        firsts[shuffle].append(_ids(zip(next(loader.epoch())[0])))
        loader.close()
    assert firsts[False] == [firsts[True][2]] * 3 and firsts[True][0] != firsts[True][1] != firsts[True][2]


@pytest.mark.parametrize(("group", "key"), [("tokens", "file"), ("image_folder", "root"), ("shards", "files")])
def test_a_reader_without_files_says_what_to_set(group, key):
    problems = ipurun.validate("mnist", overrides=[f"data={group}"])
    assert [problem.what for problem in problems] == [f"`data.{key}` is not set"]


def test_shards_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = mnist_splits()["train"]
    for number in range(2):
        rows = [digits[index] for index in range(40 * number, 40 * number + 40)]
        images, labels = (torch.stack(part).numpy() for part in zip(*rows))
        np.savez(tmp_path / f"digits-{number}.npz", images=images, labels=labels)
    words = ["data=shards", 'data.files="digits-{0..1}.npz"', "data.eval_files=digits-?.npz", "devices=2"]
    result = ipurun.train("mnist", overrides=[*words, "hydra.run.dir=run"], epochs=1, quiet=True)
    assert (result.status, result.step) == ("done", 4) and result.metrics["accuracy"] >= 0
