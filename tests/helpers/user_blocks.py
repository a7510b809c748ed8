"""Models that begin PopTorch blocks in their own code."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import nn

import ipurun.emulator as poptorch


class InForward(nn.Module):
    """Begins a block in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        poptorch.Block.start("late", ipu_id=1)
        return self.second(hidden)


class AtModules(nn.Module):
    """Begins a block at a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.second = poptorch.BeginBlock(nn.Linear(8, 3), "own", ipu_id=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.middle(self.first(x))))


class Returning(nn.Module):
    """Returns to its first IPU."""

    ipus: Tuple[Optional[int], ...] = (0, 1, 0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer, ipu in zip("abc", (self.first, self.middle, self.second), self.ipus):
            poptorch.Block.start(name, ipu_id=ipu)
            x = layer(x)
        return x


class Unplaced(Returning):
    """Lets the strategy place its blocks."""

    ipus = (None, None, None)


class Enclosed(nn.Module):
    """Runs all of `forward` in blocks that end."""

    ipus: Tuple[Optional[int], ...] = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block("a", ipu_id=self.ipus[0]):
            x = torch.relu(self.first(x))
        with poptorch.Block("b", ipu_id=self.ipus[1]):
            return self.second(x)


class EnclosedUnplaced(Enclosed):
    """Lets the strategy place its blocks."""

    ipus = (None, None)


class _Layer(nn.Module):
    def __init__(self, columns: int, ipu: int) -> None:
        super().__init__()
        self.product, self.ipu = nn.Linear(4 if ipu == 0 else 8, columns), ipu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block(ipu_id=self.ipu):
            return self.product(x)


class EnclosedLayers(nn.Module):
    """Runs each layer in an unnamed block that ends with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Layer(8, 0), _Layer(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))
