"""Residual networks, with torchvision's module names."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple, Type, Union

import torch
from torch import nn

__all__ = ["BasicBlock", "Bottleneck", "ResNet"]

# ImageNet's stem divides both sides by four, which leaves too little of smaller images.
_SMALLEST_FOR_IMAGENET_STEM = 64
_GROUPS = 32

Norm = Callable[[int], nn.Module]


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _group_norm(channels: int) -> nn.Module:
    # Narrow networks have layers with fewer channels than groups.
    return nn.GroupNorm(min(_GROUPS, channels), channels)


_NORMS: Dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = norm(width)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = norm(width)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, width * self.expansion, stride, norm)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        change = self.relu(self.bn1(self.conv1(features)))
        change = self.bn2(self.conv2(change))
        kept = features if self.downsample is None else self.downsample(features)
        return self.relu(change + kept)


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, with a shortcut (ResNet-50 and deeper)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = norm(width)
        # The stride is here rather than in the first convolution: ResNet "v1.5", as in torchvision.
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = norm(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = norm(width * self.expansion)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, width * self.expansion, stride, norm)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        change = self.relu(self.bn1(self.conv1(features)))
        change = self.relu(self.bn2(self.conv2(change)))
        change = self.bn3(self.conv3(change))
        kept = features if self.downsample is None else self.downsample(features)
        return self.relu(change + kept)


Block = Union[Type[BasicBlock], Type[Bottleneck]]

_DEPTHS: Dict[int, Tuple[Block, Tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """A residual network; returns one score per class.

    Args:
        depth: Number of layers: 18, 34, 50, 101 or 152.
        image_size: Height and width of the images. Below 64 pixels, as for CIFAR-10, the first convolution is 3 x 3
            without stride and without pooling after it, as is usual.
        in_channels: Channels of the images.
        num_classes: Number of classes.
        width: Channels of the first stage; each following one has twice as many.
        norm: ``batch``, or ``group``, which does not depend on the micro-batch and does not need buffers.
    """

    def __init__(
        self,
        depth: int = 50,
        image_size: int = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        width: int = 64,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if depth not in _DEPTHS:
            raise ValueError(f"depth {depth} is not one of {', '.join(map(str, _DEPTHS))}")
        if norm not in _NORMS:
            raise ValueError(f"norm {norm!r} is not one of {', '.join(_NORMS)}")
        block, lengths = _DEPTHS[depth]
        make_norm = _NORMS[norm]
        small = image_size < _SMALLEST_FOR_IMAGENET_STEM
        self.conv1 = _convolution(in_channels, width, 3 if small else 7, 1 if small else 2)
        self.bn1 = make_norm(width)
        self.relu = nn.ReLU()
        self.maxpool = None if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, width, width, lengths[0], 1, make_norm)
        self.layer2 = _stage(block, width * block.expansion, 2 * width, lengths[1], 2, make_norm)
        self.layer3 = _stage(block, 2 * width * block.expansion, 4 * width, lengths[2], 2, make_norm)
        self.layer4 = _stage(block, 4 * width * block.expansion, 8 * width, lengths[3], 2, make_norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.relu(self.bn1(self.conv1(image)))
        if self.maxpool is not None:
            features = self.maxpool(features)
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(torch.flatten(self.avgpool(features), 1))


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> Optional[nn.Sequential]:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), norm(outputs))


def _stage(block: Block, inputs: int, width: int, length: int, stride: int, norm: Norm) -> nn.Sequential:
    blocks: List[nn.Module] = [block(inputs, width, stride, norm)]
    blocks += [block(width * block.expansion, width, 1, norm) for _ in range(1, length)]
    return nn.Sequential(*blocks)
