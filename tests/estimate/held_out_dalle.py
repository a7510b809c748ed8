"""Graphcore's mini DALL-E: a frozen VQGAN makes tokens of a picture, and a decoder continues a caption with them."""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MiniDalle"]

_CAPTION, _SIDE = 80, 16  # words, and rows of tokens of a picture
_PICTURE = _SIDE * _SIDE
_CODES, _CODE_SIZE = 1024, 256
_LEVELS = (128, 128, 256, 256, 512)  # channels of the VQGAN, which halves the picture between two levels
_MASKED = -60000.0
# Attention of the 16 layers: along rows or columns of the picture, or to everything before.
_ATTENTION = ("row", "row", "col", "row") * 2 + ("row", "row", "col", "full") * 2


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        change = self.conv1(functional.silu(self.norm1(features)))
        return self.shortcut(features) + self.conv2(functional.silu(self.norm2(change)))


class _PointAttention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.query, self.key, self.value, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        normed = self.norm(features)
        query, key, value = (part(normed).flatten(2) for part in (self.query, self.key, self.value))
        weights = torch.softmax(torch.matmul(query.transpose(1, 2), key) * query.shape[1] ** -0.5, dim=2)
        return features + self.out(torch.matmul(value, weights.transpose(1, 2)).view(features.shape))


class _Codes(nn.Module):
    """Encode pictures of 256 x 256 as 16 x 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layers: List[nn.Module] = [nn.Conv2d(3, _LEVELS[0], 3, 1, 1)]
        inputs, last = _LEVELS[0], len(_LEVELS) - 1
        for level, outputs in enumerate(_LEVELS):
            for channels in (inputs, outputs):
                layers += [_Residual(channels, outputs), *([_PointAttention(outputs)] if level == last else [])]
            if level < last:
                layers += [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(outputs, outputs, 3, 2)]
            inputs = outputs
        layers += [_Residual(inputs, inputs), _PointAttention(inputs), _Residual(inputs, inputs)]
        layers += [nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, _CODE_SIZE, 3, 1, 1)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(_CODE_SIZE, _CODE_SIZE, 1))
        self.codes = nn.Parameter(torch.randn(_CODES, _CODE_SIZE))
        self.requires_grad_(False)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        points = self.layers(2 * picture - 1).permute(0, 2, 3, 1).reshape(-1, _CODE_SIZE)
        lengths = (points * points).sum(1, keepdim=True) + (self.codes * self.codes).sum(1)
        distances = lengths - 2 * torch.matmul(points, self.codes.t())
        return torch.argmin(distances, dim=1).view(len(picture), _PICTURE)


class _Attention(nn.Module):
    def __init__(self, size: int, heads: int, head_size: int, kind: str) -> None:
        super().__init__()
        self.heads, self.kind, self.scale = heads, kind, head_size**-0.5
        self.to_qkv = nn.Linear(size, 3 * heads * head_size, bias=False)
        self.to_out = nn.Linear(heads * head_size, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        if self.kind != "full":  # the last token, which is not trained, completes the picture
            hidden = functional.pad(hidden, (0, 0, 0, 1))
        batch, padded, _ = hidden.shape
        parts = (part.view(batch, padded, self.heads, -1).transpose(1, 2) for part in self.to_qkv(hidden).chunk(3, -1))
        query, key, value = (part.reshape(batch * self.heads, padded, -1) for part in parts)
        mix = _to_all if self.kind == "full" else self._along_an_axis
        mixed = mix(query * self.scale, key, value).view(batch, self.heads, padded, -1)
        return self.to_out(mixed.transpose(1, 2).reshape(batch, padded, -1))[:, :length]

    def _along_an_axis(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        words = _CAPTION + 1
        caption = _to_all(query[:, :words], key[:, :words], value[:, :words])
        lines = tuple(part[:, words:].view(len(part), _SIDE, _SIDE, -1) for part in (query, key, value))
        if self.kind == "col":
            lines = tuple(part.transpose(1, 2) for part in lines)
        to_words = torch.matmul(lines[0], key[:, None, :words].transpose(2, 3))
        to_line = torch.matmul(lines[0], lines[1].transpose(2, 3))
        scores = torch.cat((to_words, to_line), dim=-1)
        later = torch.ones(_SIDE, words + _SIDE).triu(words + 1).bool()
        weights = torch.softmax(scores.masked_fill(later, _MASKED), dim=-1)
        mixed = torch.matmul(weights[..., words:], lines[2])
        mixed = mixed + torch.matmul(weights[..., :words], value[:, None, :words])
        if self.kind == "col":
            mixed = mixed.transpose(1, 2)
        return torch.cat((caption, mixed.reshape(len(query), _PICTURE, -1)), dim=1)


def _to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(1, 2))
    later = torch.ones(scores.shape[1:]).triu(1).bool()
    return torch.matmul(torch.softmax(scores.masked_fill(later, _MASKED), dim=-1), value)


class _Layer(nn.Module):
    def __init__(self, size: int, heads: int, head_size: int, kind: str) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size), _Attention(size, heads, head_size, kind)
        self.norm2, self.wide, self.narrow = nn.LayerNorm(size), nn.Linear(size, 8 * size), nn.Linear(4 * size, size)
        self.scales = nn.ParameterList([nn.Parameter(torch.full((1, 1, size), 0.1)) for _ in range(2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(self.norm1(hidden)) * self.scales[0] + hidden
        values, gates = self.wide(self.norm2(hidden)).chunk(2, dim=-1)
        return self.narrow(values * functional.gelu(gates)) * self.scales[1] + hidden


class MiniDalle(nn.Module):
    """A decoder of 80 words and 256 tokens of a picture, with its loss.

    Args:
        vocab_size: Number of words.
        hidden_size: Width of the layers.
        num_heads: Attention heads per layer.
        head_size: Width of a head.
    """

    def __init__(
        self, vocab_size: int = 8192, hidden_size: int = 512, num_heads: int = 16, head_size: int = 64
    ) -> None:
        super().__init__()
        self.words = vocab_size + _CAPTION  # each position has padding of its own
        self.vae = _Codes()
        self.image_emb = nn.Embedding(_CODES, hidden_size)
        self.text_emb = nn.Embedding(self.words, hidden_size)
        self.positions = nn.Parameter(torch.zeros(_CAPTION + 1 + _PICTURE, hidden_size))
        self.h = nn.ModuleList([_Layer(hidden_size, num_heads, head_size, kind) for kind in _ATTENTION])
        self.norm = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, self.words + _CODES)

    def forward(self, caption: torch.Tensor, picture: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        codes = self.vae(picture)
        seen = self.image_emb(codes)
        said = self.text_emb(functional.pad(caption, (1, 0)))
        hidden = (torch.cat((said, seen), dim=1) + self.positions)[:, :-1]
        for layer in self.h:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        of_words = self._loss(logits[:, :_CAPTION], caption)
        of_codes = self._loss(logits[:, _CAPTION:], codes + self.words)
        return logits, (of_words + 7 * of_codes) / 8

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
