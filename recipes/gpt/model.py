"""GPT-2 and GPT-3, with OpenAI's module names."""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple

import torch
from torch import nn

__all__ = ["GPT", "Block", "CausalSelfAttention"]

# Large enough to remove all weight from a position, and within the range of float16.
_MASKED = -10000.0


class CausalSelfAttention(nn.Module):
    """Attention of every position to itself and those before it."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(hidden_size // num_heads)
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.attn_dropout = nn.Dropout(dropout)
        self.c_proj = nn.Linear(hidden_size, hidden_size)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, size = hidden.shape
        heads = self.c_attn(hidden).view(batch, length, 3, self.num_heads, size // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query * self.scale, key.transpose(-2, -1))
        future = torch.full((length, length), _MASKED, dtype=hidden.dtype, device=hidden.device).triu(1)
        weights = self.attn_dropout(torch.softmax(scores + future, dim=-1))
        mixed = torch.matmul(weights, value).transpose(1, 2).reshape(batch, length, size)
        return self.resid_dropout(self.c_proj(mixed))


class MLP(nn.Module):
    """Two linear layers with a hidden size four times as large."""

    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden_size, 4 * hidden_size)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden))))


class Block(nn.Module):
    """One layer: attention, then two linear layers, each after layer norm and with a residual connection."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size)
        self.attn = CausalSelfAttention(hidden_size, num_heads, dropout)
        self.ln_2 = nn.LayerNorm(hidden_size)
        self.mlp = MLP(hidden_size, dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class GPT(nn.Module):
    """A decoder; returns the scores of all tokens at every position.

    The head shares its weight with the token embedding, so both belong on the same IPU.

    Args:
        vocab_size: Number of different tokens.
        max_positions: Maximum length of a sequence.
        hidden_size: Width of the layers.
        num_layers: Number of layers.
        num_heads: Attention heads per layer.
        dropout: Share of values dropped in training.
        init_std: Standard deviation of the initial weights; narrow models learn faster with more than GPT-2's.
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        max_positions: int = 1024,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        dropout: float = 0.1,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} cannot be divided among {num_heads} heads")
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.wpe = nn.Embedding(max_positions, hidden_size)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(hidden_size, num_heads, dropout) for _ in range(num_layers)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self._initialise(num_layers, init_std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden))

    def to_transformers(self) -> Tuple[Dict[str, Any], Dict[str, torch.Tensor]]:
        """Return config and weights of the same model in transformers (GPT2LMHeadModel)."""
        block: Any = self.h[0]
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.wte.num_embeddings,
            "n_positions": self.wpe.num_embeddings,
            "n_embd": self.wte.embedding_dim,
            "n_layer": len(self.h),
            "n_head": block.attn.num_heads,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.ln_f.eps,
            "resid_pdrop": self.drop.p,
            "embd_pdrop": self.drop.p,
            "attn_pdrop": self.drop.p,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        weights = {}
        for name, value in self.state_dict().items():
            # GPT-2's linear layers have their weight transposed there, the head has not.
            is_linear = name.startswith("h.") and value.dim() == 2
            named = name if name.startswith("lm_head") else f"transformer.{name}"
            weights[named] = value.t().contiguous() if is_linear else value
        return config, weights

    def _initialise(self, num_layers: int, std: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # Each layer adds to the residual twice; its scale should not depend on the number of layers.
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=std / math.sqrt(2 * num_layers) if residual else std)
