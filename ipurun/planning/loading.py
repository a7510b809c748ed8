"""Rules of PopTorch's data loader that depend on the batch arithmetic."""

from __future__ import annotations

from ipurun.config.schema import LoaderConfig
from ipurun.errors import Findings
from ipurun.planning.plan import Batch

__all__ = ["check_loading"]


def check_loading(loader: LoaderConfig, batch: Batch, found: Findings) -> None:
    """Refuse what PopTorch's loader would refuse after the model has been made."""
    size = loader.rebatched_worker_size
    if loader.mode != "async_rebatched":
        if size is not None:
            found.problem(
                "`loader.rebatched_worker_size` is read in mode async_rebatched only",
                seen=f"loader.mode={loader.mode}, loader.rebatched_worker_size={size}",
                fix="loader.mode=async_rebatched",
                key="loader.rebatched_worker_size",
            )
        return
    if batch.samples_per_call == 1:
        found.problem(
            "`loader.mode=async_rebatched` cuts batches anew, and a host call takes one sample",
            seen="1 sample per host call",
            fix="loader.mode=async",
            key="loader.mode",
        )
    elif size is not None and size > batch.samples_per_call:
        found.problem(
            f"`loader.rebatched_worker_size` is more than the {batch.samples_per_call} samples of a host call",
            seen=f"loader.rebatched_worker_size={size}",
            fix=f"loader.rebatched_worker_size={batch.samples_per_call}",
            key="loader.rebatched_worker_size",
        )
