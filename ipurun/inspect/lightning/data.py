"""The data loaders of a LightningDataModule as data sets by split, with what is taken over from them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from ipurun.distributed.environment import launched
from ipurun.errors import ConfigError
from ipurun.inspect.lightning.trainer import TrainerStandIn, attach_trainer, call_hook, overrides

__all__ = ["LoaderTraits", "Splits", "has_loaders", "splits_of"]

# Split -> the method that returns its loader, and the stage for which Lightning sets it up.
_LOADERS = {
    "train": ("train_dataloader", "fit"),
    "eval": ("val_dataloader", "fit"),
    "test": ("test_dataloader", "test"),
    "predict": ("predict_dataloader", "predict"),
}


@dataclass(frozen=True)
class LoaderTraits:
    """Settings of a data loader apart from its data set.

    Args:
        batch_size: Samples of a batch.
        shuffles: Whether it draws in random order; None for a stream, or a sampler that decides.
        collate: Its collate function; None: torch's default.
        sampler: Its sampler; None: one of torch's usual two.
        workers: Its worker processes.
    """

    batch_size: int
    shuffles: Optional[bool]
    collate: Optional[Callable[[List[Any]], Any]]
    sampler: Any
    workers: int


class Splits(Dict[str, Any]):
    """Data sets by split, with the traits of the loaders that they came in.

    Args:
        data: The data sets.
        traits: Those of loaders, by split.
        notes: Remarks for the user.
        module: The data module that the loaders are of, if it is not the model itself.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        traits: Optional[Mapping[str, LoaderTraits]] = None,
        notes: Sequence[str] = (),
        module: Any = None,
    ) -> None:
        super().__init__(data)
        self.traits: Dict[str, LoaderTraits] = dict(traits or {})
        self.notes = list(notes)
        self.module = module

    def collate(self, split: str) -> Optional[Callable[[List[Any]], Any]]:
        """Return the collate function of a split's own loader, None if it has none."""
        found = self.traits.get(split)
        return None if found is None else found.collate


def has_loaders(value: Any) -> bool:
    """Return whether an object has the methods of a LightningDataModule."""
    return callable(getattr(value, "train_dataloader", None))


def splits_of(owner: Any, key: str, is_set_up: bool = False) -> Splits:
    """Return the data sets of an object with ``train_dataloader`` and the like.

    Args:
        owner: The object. Its `prepare_data` and `setup` are called as Lightning does.
        key: Its config key, for messages.
        is_set_up: Whether it was set up for training.

    Raises:
        ConfigError: A method failed, or did not return a data loader.
    """
    attach_trainer(owner, TrainerStandIn())
    with _one_at_a_time():
        call_hook(owner, "prepare_data", key)
    splits = Splits({}, module=None if isinstance(owner, torch.nn.Module) else owner)
    ready = {"fit"} if is_set_up else set()
    for split, (method, stage) in _LOADERS.items():
        if not overrides(owner, method):
            continue
        if stage not in ready:
            ready.add(stage)
            try:
                call_hook(owner, "setup", key, stage)
            except ConfigError as error:
                if stage == "fit":
                    raise
                splits.notes.append(f"the split `{split}` is left out: {error.problems[0].seen}")
                continue
        loader = call_hook(owner, method, key)
        if loader is not None:
            data, traits = _read(loader, method, key, splits.notes)
            splits[split], splits.traits[split] = data, traits
    ignored = [hook for hook in ("transfer_batch_to_device",) if overrides(owner, hook)]
    ignored += [hook for hook in ("on_before_batch_transfer", "on_after_batch_transfer") if overrides(owner, hook)]
    if ignored:
        name, hooks = type(owner).__name__, ", ".join(ignored)
        splits.notes.append(f"{name}.{hooks}: not called for the data; do it in the data set or the collate function")
    return splits


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let the first of several processes of a run download while the others wait: they then find what they need."""
    with contextlib.ExitStack() as stack:
        if launched() is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                # A lock on a folder leaves no file behind. Downloads below lock the folders that they write to.
                descriptor = os.open(os.path.dirname(__file__), os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _read(loader: Any, method: str, key: str, notes: List[str]) -> Tuple[Any, LoaderTraits]:
    if isinstance(loader, (list, tuple, Mapping)):
        several = list(loader.values()) if isinstance(loader, Mapping) else list(loader)
        if len(several) > 1 and all(isinstance(item, DataLoader) for item in several):
            if method == "train_dataloader":
                raise ConfigError(
                    f"`{key}`: {method} returns {len(several)} loaders, but a compiled step takes the batches of one",
                    fix="return one loader, whose data set returns a sample of each",
                    key=key,
                )
            notes.append(f"{method} returns {len(several)} loaders: the first one is used")
        loader = several[0] if several else None
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"`{key}`: {method} did not return a data loader",
            seen=f"an object of type {type(loader).__name__}",
            known="torch.utils.data.DataLoader",
            fix="return a DataLoader, or let data._target_ return the data sets",
            key=key,
        )
    if loader.batch_size is None:
        raise ConfigError(
            f"`{key}`: {method} returns a loader without a batch size",
            seen="batch_size=None, or a custom batch_sampler",
            fix="DataLoader(..., batch_size=N); batches of your own order: loader.batch_sampler",
            key=key,
        )
    size = _micro_batch(loader)
    if size != loader.batch_size and method == "train_dataloader":
        notes.append(
            f"{method} returns a poptorch.DataLoader: its batch_size={size} is the micro-batch; its options are not "
            f"taken over: {_sizes(loader.options)}"
        )
    getattr(loader, "terminate", lambda: None)()  # the process of an asynchronous one
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    usual = is_stream or type(loader.sampler) in (RandomSampler, SequentialSampler)
    if loader.num_workers and method == "train_dataloader":
        notes.append(f"num_workers={loader.num_workers} of the data loader is not used: set loader.workers")
    return loader.dataset, LoaderTraits(
        batch_size=size,
        shuffles=None if is_stream or not usual else isinstance(loader.sampler, RandomSampler),
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        sampler=None if usual else loader.sampler,
        workers=loader.num_workers,
    )


def _micro_batch(loader: Any) -> int:
    """Return the batch size of a loader; of a poptorch.DataLoader, which loads for a whole host call, its own."""
    size, options = loader.batch_size, getattr(loader, "options", None)
    if not hasattr(loader, "combinedBatchSize") or options is None:
        return int(size)
    groups = options.replication_factor // getattr(options, "input_group_size", 1)
    return int(loader.combinedBatchSize) // (
        options.device_iterations * groups * options.Training.gradient_accumulation
    )


def _sizes(options: Any) -> str:
    """Return the keys that set the sizes of a poptorch.Options."""
    sizes = {
        "device_iterations": options.device_iterations,
        "gradient_accumulation": options.Training.gradient_accumulation,
        "replication.factor": options.replication_factor,
    }
    return " ".join(f"{key}={value}" for key, value in sizes.items() if value > 1)
