"""A convolutional network for 28 x 28 grey images."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DigitNet"]


class DigitNet(nn.Module):
    """Two convolutions and two linear layers; returns one score per class.

    Args:
        channels: Channels of the first convolution; the second has twice as many.
        hidden: Width of the hidden linear layer.
        num_classes: Number of classes.
    """

    def __init__(self, channels: int = 16, hidden: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, channels, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(channels, 2 * channels, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Sequential(nn.Flatten(), nn.Linear(2 * channels * 4 * 4, hidden), nn.ReLU())
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(self.conv2(self.conv1(image))))
