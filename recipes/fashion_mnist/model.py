"""The classifier of the PopTorch porting tutorials, layer by layer."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["ClothesNet"]


class ClothesNet(nn.Module):
    """Two convolutions, group norm and two linear layers; returns one score per class.

    The tutorials end in a log-softmax and a negative log-likelihood; here the config's cross entropy does both.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 5, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(5, 12, kernel_size=5), nn.ReLU(), nn.GroupNorm(3, 12))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(12 * 9 * 9, 100), nn.ReLU(), nn.Linear(100, num_classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(image)))
