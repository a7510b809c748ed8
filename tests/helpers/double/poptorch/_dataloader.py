"""PopTorch's DataLoader: one item holds the rows of a whole host call."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .enums import DataLoaderMode


class DataLoader(torch.utils.data.DataLoader):
    def __init__(
        self,
        options: Any,
        dataset: Any,
        batch_size: Optional[int] = 1,
        drop_last: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        auto_distributed_partitioning: bool = True,
        async_options: Any = None,
        **kwargs: Any,
    ) -> None:
        iterations, accumulation, replicas = options.counts
        self.options = options.freeze()
        self.combinedBatchSize = batch_size * iterations * accumulation * replicas
        super().__init__(dataset, batch_size=self.combinedBatchSize, drop_last=drop_last, **kwargs)

    def terminate(self) -> None:
        pass
