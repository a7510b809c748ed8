"""The vision transformer, with timm's module names."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["Attention", "Block", "PatchEmbedding", "VisionTransformer"]

_INIT_STD = 0.02
_EPSILON = 1e-6


class PatchEmbedding(nn.Module):
    """Cuts an image into squares and turns each into a vector."""

    def __init__(self, image_size: int, patch_size: int, in_channels: int, hidden_size: int) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size {image_size} cannot be cut into patches of {patch_size}")
        self.num_patches = (image_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Attention of every position to all others."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(hidden_size // num_heads)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, size = hidden.shape
        heads = self.qkv(hidden).view(batch, length, 3, self.num_heads, size // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(query * self.scale, key.transpose(-2, -1)), dim=-1)
        mixed = torch.matmul(weights, value).transpose(1, 2).reshape(batch, length, size)
        return self.proj_drop(self.proj(mixed))


class MLP(nn.Module):
    """Two linear layers with a hidden size four times as large."""

    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, 4 * hidden_size)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * hidden_size, hidden_size)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc2(self.act(self.fc1(hidden))))


class Block(nn.Module):
    """One layer: attention, then two linear layers, each after layer norm and with a residual connection."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.attn = Attention(hidden_size, num_heads, dropout)
        self.norm2 = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.mlp = MLP(hidden_size, dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class VisionTransformer(nn.Module):
    """A transformer over the patches of an image; returns one score per class.

    Args:
        image_size: Height and width of the images.
        patch_size: Height and width of a patch; must divide the image size.
        in_channels: Channels of the images.
        num_classes: Number of classes.
        hidden_size: Width of the layers.
        num_layers: Number of layers.
        num_heads: Attention heads per layer.
        dropout: Share of values dropped in training.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} cannot be divided among {num_heads} heads")
        self.patch_embed = PatchEmbedding(image_size, patch_size, in_channels, hidden_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + 1, hidden_size))
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(hidden_size, num_heads, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.head = nn.Linear(hidden_size, num_classes)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=_INIT_STD)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(image)
        first = self.cls_token.expand(patches.shape[0], -1, -1)
        hidden = self.pos_drop(torch.cat([first, patches], dim=1) + self.pos_embed)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, 0]))
