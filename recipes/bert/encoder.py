"""The encoder of BERT: embeddings and a stack of identical layers."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["Embeddings", "Encoder", "EncoderLayer", "SelfAttention"]

# Large enough to remove all weight from a position, and within the range of float16.
_MASKED = -10000.0
_EPSILON = 1e-12


class Embeddings(nn.Module):
    """The sum of the embeddings of word, position and sentence."""

    def __init__(self, vocab_size: int, max_positions: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_positions, hidden_size)
        self.token_type_embeddings = nn.Embedding(2, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        words = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.layer_norm(words + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    """Attention of every position to all that are not padding."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(hidden_size // num_heads)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        query = self._heads(self.query(hidden)) * self.scale
        scores = torch.matmul(query, self._heads(self.key(hidden)).transpose(-2, -1))
        # Between IPUs the mask is passed with one number per position; it is expanded only here.
        absent = (1 - attention_mask.to(hidden.dtype)) * _MASKED
        weights = self.dropout(torch.softmax(scores + absent[:, None, None, :], dim=-1))
        return torch.matmul(weights, self._heads(self.value(hidden))).transpose(1, 2).reshape(hidden.shape)

    def _heads(self, vectors: torch.Tensor) -> torch.Tensor:
        batch, length, size = vectors.shape
        return vectors.view(batch, length, self.num_heads, size // self.num_heads).transpose(1, 2)


class EncoderLayer(nn.Module):
    """Attention, then two linear layers, each with a residual connection and layer norm."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads, dropout)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.intermediate = nn.Linear(hidden_size, 4 * hidden_size)
        self.activation = nn.GELU()
        self.output = nn.Linear(4 * hidden_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        attended = self.dropout(self.attention_output(self.attention(hidden, attention_mask)))
        hidden = self.attention_norm(hidden + attended)
        transformed = self.dropout(self.output(self.activation(self.intermediate(hidden))))
        return self.output_norm(hidden + transformed)


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, num_layers: int, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList([EncoderLayer(hidden_size, num_heads, dropout) for _ in range(num_layers)])

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            hidden = layer(hidden, attention_mask)
        return hidden
