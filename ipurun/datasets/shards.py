"""Samples in numbered shard files, read as a stream: one shard is open at a time, and none is held in memory."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ipurun.datasets.download import counter
from ipurun.datasets.folder import numbered_files
from ipurun.datasets.images import IMAGE_ENDINGS, decode_image
from ipurun.errors import ConfigError

__all__ = ["ShardStream", "Shared", "splits"]

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive; the last two are lengths of name and extra
_FEW_SHARDS = 8  # are counted without a bar
Fields = Union[None, Sequence[str], Mapping[str, str]]


class ShardStream(IterableDataset):
    """Samples of tar or npz shards, in an order that depends only on seed and epoch.

    Loaders of ipurun read it by position (`read`), so that any number of workers and processes divide it without
    repeating a sample, in the same order, and a resumed run continues in the middle of a shard.

    Args:
        files: The shards, in order: all ``.npz`` or all ``.tar``.
        fields: The parts of a sample, inputs first and the target last: names of arrays (npz) or endings of files
            (tar). A mapping gives samples with these keys. None: all, in their order in the first shard.
        shuffle: Whether to permute the shards, and the samples of each shard, in every epoch.
        seed: Seed of the order.
        notes: Remarks for the user.

    Raises:
        ConfigError: If a shard cannot be read.
    """

    def __init__(
        self,
        files: Sequence[Path],
        fields: Fields = None,
        shuffle: bool = False,
        seed: int = 0,
        notes: Tuple[str, ...] = (),
    ) -> None:
        self.files = [Path(file) for file in files]
        self.fields = fields
        self.shuffle = shuffle
        self.seed = seed
        self.notes = notes
        self._epoch = 0
        self._current: Optional[Tuple[int, Any]] = None
        self.lengths = self._counted()
        self._order, self._ends = self._order_of_epoch()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self._epoch = epoch
        self._order, self._ends = self._order_of_epoch()

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from one position of the epoch to another."""
        position = start
        while position < min(stop, len(self)):
            place = int(np.searchsorted(self._ends, position, side="right"))
            begin = int(self._ends[place - 1]) if place else 0
            shard = self._opened(int(self._order[place]))
            rows = self._rows(int(self._order[place]))
            last = min(stop, int(self._ends[place]))
            for row in rows[position - begin : last - begin]:
                yield shard.sample(int(row))
            position = last

    def __iter__(self) -> Iterator[Any]:
        return self.read(0, len(self))

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_current": None}  # each process opens the shards itself

    def _order_of_epoch(self) -> Tuple[np.ndarray, np.ndarray]:
        order = np.arange(len(self.files))
        if self.shuffle:
            np.random.default_rng([self.seed, self._epoch]).shuffle(order)
        return order, np.cumsum(self.lengths[order])

    def _rows(self, number: int) -> np.ndarray:
        rows = np.arange(self.lengths[number])
        if self.shuffle:
            np.random.default_rng([self.seed, self._epoch, number + 1]).shuffle(rows)
        return rows

    def _opened(self, number: int) -> Any:
        if self._current is None or self._current[0] != number:
            self._current = None  # close the last one first
            self._current = (number, _open_shard(self.files[number], self.fields))
        return self._current[1]

    def _counted(self) -> np.ndarray:
        if len(self.files) <= _FEW_SHARDS:
            return np.array([len(_open_shard(file, self.fields)) for file in self.files], np.int64)
        lengths = []
        with counter("counting samples", len(self.files), "shards") as advance:
            for file in self.files:
                lengths.append(len(_open_shard(file, self.fields)))
                advance(1)
        return np.array(lengths, np.int64)


class Shared(IterableDataset):
    """Any iterable, divided among workers and processes by position: each reads all of it and keeps its part.

    Args:
        data: The iterable. Every iteration must give the same samples; if it has ``set_epoch``, that is called.
        length: Number of samples of an epoch, needed for several processes; None: `len` of the data if it has one.
    """

    def __init__(self, data: Any, length: Optional[int] = None) -> None:
        self.data = data
        self.length = length if length is not None else len(data) if hasattr(data, "__len__") else None
        self.notes = tuple(getattr(data, "notes", ()))
        self._iterator: Optional[Iterator[Any]] = None
        self._position = 0

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of the stream is not known")
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch, where the data has one."""
        self._iterator = None
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from one position of the epoch to another."""
        iterator = self._iterator or iter(())
        if self._iterator is None or self._position > start:
            self._iterator = iterator = iter(self.data)
            self._position = 0
        position = self._position  # a second reader, such as an evaluation, may move the other one meanwhile
        for sample in iterator:
            position += 1
            self._position = position
            if position > start:
                yield sample
            if position >= stop:
                return

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_iterator": None, "_position": 0}


def splits(
    files: Union[str, Sequence[str], None],
    eval_files: Union[str, Sequence[str], None] = None,
    fields: Fields = None,
    shuffle: bool = True,
    seed: int = 0,
) -> Dict[str, ShardStream]:
    """Return training and evaluation streams of shard files.

    Args:
        files: Shards by pattern: ``train-{0000..0127}.tar``, ``train-*.npz``, or a list of files.
        eval_files: Shards for evaluation, which are read in order.
        fields: See `ShardStream`.
        shuffle: Whether the order of training differs in every epoch.
        seed: Seed of the order.

    Raises:
        ConfigError: If a shard is missing or cannot be read.
    """
    train = ShardStream(numbered_files(files, "data.files"), fields, shuffle, seed)
    train.notes = (f"data: {len(train):,} samples for training in {len(train.files)} shards, read as a stream",)
    if eval_files is None:
        return {"train": train}
    return {"train": train, "eval": ShardStream(numbered_files(eval_files, "data.eval_files"), fields)}


def _open_shard(path: Path, fields: Fields) -> Any:
    try:
        return _NpzShard(path, fields) if path.suffix == ".npz" else _TarShard(path, fields)
    except (OSError, ValueError, KeyError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise _unreadable(path, str(error).strip("'\"")) from error


class _NpzShard:
    """An .npz file whose arrays are memory-mapped inside the archive: one row of each is a sample."""

    def __init__(self, path: Path, fields: Fields) -> None:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            arrays = {
                info.filename[: -len(".npy")]: _mapped_member(path, stream, info)
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
        self._arrays = _chosen(arrays, fields)
        rows = {len(array) if array.ndim else 0 for array in _values(self._arrays)}
        if len(rows) != 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ValueError(f"its arrays do not have the same number of rows: {shapes or 'there are none'}")
        self._rows = rows.pop()

    def __len__(self) -> int:
        return self._rows

    def sample(self, row: int) -> Any:
        if isinstance(self._arrays, dict):
            return {name: _tensor(array[row]) for name, array in self._arrays.items()}
        return tuple(_tensor(array[row]) for array in self._arrays)


class _TarShard:
    """A .tar file: members with the same name but for their ending are a sample. They are read, never unpacked."""

    def __init__(self, path: Path, fields: Fields) -> None:
        samples: Dict[str, Dict[str, Tuple[int, int]]] = {}
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg():
                    folder, _, name = member.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    samples.setdefault(f"{folder}/{stem}", {})[ending.lower()] = (member.offset_data, member.size)
        first = next(iter(samples.values()), {})
        wanted = fields if fields is not None else list(first)
        endings = list(wanted.values() if isinstance(wanted, Mapping) else wanted)
        for name, parts in samples.items():
            absent = [ending for ending in endings if ending not in parts]
            if absent:
                raise ValueError(f"{name.lstrip('/')} has no part {absent[0]}; it has {', '.join(parts)}")
        self._fields = wanted
        self._samples = [[parts[ending] for ending in endings] for parts in samples.values()]
        self._endings = endings
        self._path = path
        self._stream = path.open("rb")

    def __len__(self) -> int:
        return len(self._samples)

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self._stream.close()

    def sample(self, row: int) -> Any:
        parts = []
        for ending, (offset, size) in zip(self._endings, self._samples[row]):
            self._stream.seek(offset)
            content = self._stream.read(size)
            if len(content) != size:
                raise ValueError(f"{self._path} is shorter than it was")
            parts.append(_decoded(content, ending, self._path))
        return dict(zip(self._fields, parts)) if isinstance(self._fields, Mapping) else tuple(parts)


def _mapped_member(path: Path, stream: Any, info: zipfile.ZipInfo) -> np.ndarray:
    """Map an array inside a zip archive, which is possible if it is stored without compression."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed, so samples cannot be read one by one: write it with numpy.savez")
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) != _LOCAL_HEADER.size or header[:4] != b"PK\3\4":
        raise ValueError(f"{info.filename} has no header")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    stream.seek(name_length + extra_length, io.SEEK_CUR)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{info.filename} has version {version} of the npy format")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError(f"{info.filename} has Python objects, which could run code")
    if int(np.prod(shape, dtype=np.int64)) == 0:
        return np.empty(shape, dtype)
    order = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", stream.tell(), shape, order)  # type: ignore[call-overload]  # order is a literal


def _chosen(arrays: Dict[str, np.ndarray], fields: Fields) -> Union[Dict[str, np.ndarray], List[np.ndarray]]:
    wanted = list(arrays) if fields is None else fields
    names = list(wanted.values() if isinstance(wanted, Mapping) else wanted)
    absent = [name for name in names if name not in arrays]
    if absent:
        raise ValueError(f"it has no array {absent[0]}; it has {', '.join(arrays)}")
    if isinstance(wanted, Mapping):
        return {str(key): arrays[name] for key, name in wanted.items()}
    return [arrays[name] for name in names]


def _values(arrays: Any) -> Sequence[np.ndarray]:
    return list(arrays.values()) if isinstance(arrays, dict) else arrays


def _tensor(value: Any) -> torch.Tensor:
    array = np.asarray(value)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))


def _decoded(content: bytes, ending: str, path: Path) -> torch.Tensor:
    kind = ending.rpartition(".")[2]
    if kind == "npy":
        return _tensor(np.load(io.BytesIO(content), allow_pickle=False))
    if kind in ("cls", "id", "txt", "json"):
        return torch.tensor(json.loads(content))
    if f".{kind}" in IMAGE_ENDINGS:
        return decode_image(content, f"{path}: .{ending}")
    known = ", ".join(("npy", "cls", "id", "txt", "json", *(name[1:] for name in IMAGE_ENDINGS)))
    raise ValueError(f"files that end in .{ending} cannot be read; known: {known}")


def _unreadable(path: Path, seen: str) -> ConfigError:
    fix = "copy or write the file again; data.fields names the parts of a sample"
    return ConfigError("a shard cannot be read", where=str(path), seen=seen, fix=fix, key="data.files")
