"""Models that import PopTorch by name, as users' models do: on an IPU host they get the real package."""

from __future__ import annotations

import poptorch
import torch
from torch import nn


class WithBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block("front", ipu_id=0):
            x = torch.relu(self.first(x))
        with poptorch.Block("back", ipu_id=1):
            return self.second(x)


class WithStarts(WithBlocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("front", ipu_id=0)
        x = torch.relu(self.first(x))
        poptorch.Block.start("back", ipu_id=1)
        return self.second(x)


class WithFunctions(WithBlocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(x))

    @poptorch.BlockFunction("front", ipu_id=0)
    def front(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x))

    @poptorch.BlockFunction("back", ipu_id=1)
    def back(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


class WithModuleBlocks(WithBlocks):
    def __init__(self) -> None:
        super().__init__()
        poptorch.BeginBlock(self.second, "back", ipu_id=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))
