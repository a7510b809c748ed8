"""Models of published runs that are not recipes, with the module names that their configs use."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from ipurun.recipes.resnet.model import Bottleneck, ResNet

__all__ = ["EfficientNet", "ResNeXt"]

_STEM = 32
_FEATURES = 1280
# Of EfficientNet-B0, by stage: layers, kernel, stride, channels. The first one does not expand.
_STAGES = ((1, 3, 1, 16), (2, 3, 2, 24), (2, 5, 2, 40), (3, 3, 2, 80), (3, 5, 1, 112), (4, 5, 2, 192), (1, 3, 1, 320))


class _Excitation(nn.Module):
    """Weigh channels by their mean over the picture."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, reduced, 1)
        self.conv_expand = nn.Conv2d(reduced, channels, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        mean = functional.adaptive_avg_pool2d(features, 1)
        return features * torch.sigmoid(self.conv_expand(functional.silu(self.conv_reduce(mean))))


class _Layer(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, group: int, norm_groups: int
    ) -> None:
        super().__init__()
        wide = inputs * expansion
        self.conv_pw = nn.Conv2d(inputs, wide, 1, bias=False) if expansion > 1 else None
        self.bn1 = nn.GroupNorm(norm_groups, wide)
        groups = max(1, wide // group)
        self.conv_dw = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn2 = nn.GroupNorm(norm_groups, wide)
        self.se = _Excitation(wide, max(1, inputs // 4))
        self.conv_pwl = nn.Conv2d(wide, outputs, 1, bias=False)
        self.bn3 = nn.GroupNorm(norm_groups, outputs)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        wide = features
        if self.conv_pw is not None:
            wide = functional.silu(self.bn1(self.conv_pw(wide)))
        wide = functional.silu(self.bn2(self.conv_dw(wide)))
        change = self.bn3(self.conv_pwl(self.se(wide)))
        return features + change if self.has_shortcut else change


class EfficientNet(nn.Module):
    """EfficientNet whose depthwise convolutions have groups of several channels ("G16"), with group norms.

    Args:
        image_size: Height and width of the pictures; only the data need it.
        in_channels: Colours of the pictures.
        num_classes: Number of classes.
        width: How many times B0's channels.
        depth: How many times B0's layers.
        expansion: How much wider a layer is inside.
        group: Channels of a group of a depthwise convolution.
        norm_groups: Groups of a norm.
    """

    def __init__(
        self,
        image_size: int,
        in_channels: int = 3,
        num_classes: int = 1000,
        width: float = 1.0,
        depth: float = 1.0,
        expansion: int = 4,
        group: int = 16,
        norm_groups: int = 4,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.conv_stem = nn.Conv2d(in_channels, _STEM, 3, 2, 1, bias=False)
        self.bn1 = nn.GroupNorm(norm_groups, _STEM)
        inputs, stages = _STEM, []
        for layers, kernel, stride, channels in _STAGES:
            outputs, stage = _rounded(channels * width), []
            for layer in range(math.ceil(layers * depth)):
                inside = expansion if stages else 1
                stage.append(_Layer(inputs, outputs, kernel, 1 if layer else stride, inside, group, norm_groups))
                inputs = outputs
            stages.append(nn.Sequential(*stage))
        self.blocks = nn.Sequential(*stages)
        self.conv_head = nn.Conv2d(inputs, _rounded(_FEATURES * width), 1, bias=False)
        self.bn2 = nn.GroupNorm(norm_groups, self.conv_head.out_channels)
        self.classifier = nn.Linear(self.conv_head.out_channels, num_classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.blocks(functional.silu(self.bn1(self.conv_stem(image))))
        features = functional.silu(self.bn2(self.conv_head(features)))
        return self.classifier(functional.adaptive_avg_pool2d(features, 1).flatten(1))


def _rounded(channels: float) -> int:
    """Round to a multiple of eight that is not much smaller."""
    found = max(8, int(channels + 4) // 8 * 8)
    return found + 8 if found < 0.9 * channels else found


class ResNeXt(ResNet):
    """A ResNet of bottlenecks twice as wide, whose 3 x 3 convolutions have groups ("32x4d").

    Args:
        depth: Number of layers: 50 or 101.
        image_size: Height and width of the pictures.
        in_channels: Colours of the pictures.
        num_classes: Number of classes.
        groups: Groups of a 3 x 3 convolution.
    """

    def __init__(
        self, depth: int, image_size: int, in_channels: int = 3, num_classes: int = 1000, groups: int = 32
    ) -> None:
        super().__init__(depth, image_size, in_channels, num_classes)
        for block in self.modules():
            if isinstance(block, Bottleneck):
                narrow, wide = block.conv1, 2 * block.conv1.out_channels
                block.conv1 = nn.Conv2d(narrow.in_channels, wide, 1, bias=False)
                block.bn1, block.bn2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
                block.conv2 = nn.Conv2d(wide, wide, 3, block.conv2.stride, 1, groups=groups, bias=False)
                block.conv3 = nn.Conv2d(wide, block.conv3.out_channels, 1, bias=False)
