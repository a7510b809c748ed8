"""BERT for pretraining: the encoder, two heads and their combined loss."""

from __future__ import annotations

import re
import sys
from typing import Any, Dict, Tuple

import torch
from torch import nn
from torch.nn import functional

from ipurun.recipes.bert.encoder import Embeddings, Encoder

__all__ = ["IGNORED", "BertForPretraining", "Pooler"]

# Label of unused masked positions.
IGNORED = -100
_EPSILON = 1e-12


class Pooler(nn.Module):
    """A representation of the whole sequence, from its first position."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class MaskedWords(nn.Module):
    """Scores of all words, only at the masked positions: all positions would take most of the memory."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = nn.GELU()
        self.layer_norm = nn.LayerNorm(hidden_size, eps=_EPSILON)
        self.decoder = nn.Linear(hidden_size, vocab_size)

    def forward(self, hidden: torch.Tensor, masked_positions: torch.Tensor) -> torch.Tensor:
        # A matrix product instead of a gather, whose gradient is a slow scatter on an IPU.
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        chosen = (masked_positions[:, :, None] == positions).to(hidden.dtype)
        masked = torch.matmul(chosen, hidden)
        return self.decoder(self.layer_norm(self.activation(self.dense(masked))))


class BertForPretraining(nn.Module):
    """BERT with its two pretraining tasks; returns the scores of both and the sum of their losses.

    The head shares its weight with the word embedding, so both belong on the same IPU.

    Args:
        vocab_size: Number of different words.
        max_positions: Maximum length of a sequence.
        sequence_length: Length of the training sequences.
        mask_tokens: Masked positions per sequence. The data depend on this and on `sequence_length`.
        hidden_size: Width of the layers.
        num_layers: Number of layers.
        num_heads: Attention heads per layer.
        dropout: Share of values dropped in training.
        init_std: Standard deviation of the initial weights; narrow models learn faster with more than BERT's.
    """

    def __init__(
        self,
        vocab_size: int = 30522,
        max_positions: int = 512,
        sequence_length: int = 128,
        mask_tokens: int = 20,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        dropout: float = 0.1,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} cannot be divided among {num_heads} heads")
        if not mask_tokens <= sequence_length <= max_positions:
            raise ValueError(
                f"mask_tokens {mask_tokens}, sequence_length {sequence_length} and max_positions {max_positions} "
                "must be in ascending order"
            )
        self.embeddings = Embeddings(vocab_size, max_positions, hidden_size, dropout)
        self.encoder = Encoder(num_layers, hidden_size, num_heads, dropout)
        self.pooler = Pooler(hidden_size)
        self.predictions = MaskedWords(hidden_size, vocab_size)
        self.seq_relationship = nn.Linear(hidden_size, 2)
        self.predictions.decoder.weight = self.embeddings.word_embeddings.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=init_std)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        masked_positions: torch.Tensor,
        next_sentence_label: torch.Tensor,
        labels: torch.Tensor,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scores of both tasks, and the loss.

        Args:
            input_ids: Words, some of them masked: batch x length.
            token_type_ids: 0 in the first sentence, 1 in the second.
            attention_mask: 1 for words, 0 for padding.
            masked_positions: Where words were masked: batch x mask_tokens.
            next_sentence_label: 0 if the second sentence follows the first, else 1.
            labels: The masked words, `IGNORED` at unused positions: batch x mask_tokens.
        """
        hidden = self.encoder(self.embeddings(input_ids, token_type_ids), attention_mask)
        next_sentence = self.seq_relationship(self.pooler(hidden))
        words = self.predictions(hidden, masked_positions)
        words_loss = functional.cross_entropy(
            words.reshape(-1, words.shape[-1]), labels.reshape(-1), ignore_index=IGNORED
        )
        next_loss = functional.cross_entropy(next_sentence, next_sentence_label)
        return words, next_sentence, _marked_as_loss(words_loss + next_loss)

    def to_transformers(self) -> Tuple[Dict[str, Any], Dict[str, torch.Tensor]]:
        """Return config and weights of the same model in transformers (BertForPreTraining)."""
        words, layers = self.embeddings.word_embeddings, self.encoder.layer
        first: Any = layers[0]
        config = {
            "architectures": ["BertForPreTraining"],
            "model_type": "bert",
            "vocab_size": words.num_embeddings,
            "max_position_embeddings": self.embeddings.position_embeddings.num_embeddings,
            "hidden_size": words.embedding_dim,
            "intermediate_size": first.intermediate.out_features,
            "num_hidden_layers": len(layers),
            "num_attention_heads": first.attention.num_heads,
            "hidden_act": "gelu",
            "layer_norm_eps": _EPSILON,
            "type_vocab_size": 2,
            "hidden_dropout_prob": self.embeddings.dropout.p,
            "attention_probs_dropout_prob": self.embeddings.dropout.p,
            "tie_word_embeddings": True,
        }
        weights = {_name_in_transformers(name): value for name, value in self.state_dict().items()}
        weights["cls.predictions.bias"] = weights["cls.predictions.decoder.bias"]
        return config, weights


# Parts of names here -> there, replaced in this order.
_NAMES_IN_TRANSFORMERS = (
    (r"^(embeddings|encoder|pooler)\.", r"bert.\1."),
    (r"^(predictions|seq_relationship)\.", r"cls.\1."),
    (r"\.attention\.", ".attention.self."),
    (r"\.attention_output\.", ".attention.output.dense."),
    (r"\.attention_norm\.", ".attention.output.LayerNorm."),
    (r"\.intermediate\.", ".intermediate.dense."),
    (r"(\d)\.output\.", r"\1.output.dense."),
    (r"\.output_norm\.", ".output.LayerNorm."),
    (r"embeddings\.layer_norm", "embeddings.LayerNorm"),
    (r"predictions\.dense", "predictions.transform.dense"),
    (r"predictions\.layer_norm", "predictions.transform.LayerNorm"),
)


def _name_in_transformers(name: str) -> str:
    for here, there in _NAMES_IN_TRANSFORMERS:
        name = re.sub(here, there, name)
    return name


def _marked_as_loss(value: torch.Tensor) -> torch.Tensor:
    """Mark the loss for PopTorch, which recognises PyTorch's losses but not the sum of two."""
    engine = sys.modules.get("poptorch")
    return value if engine is None else engine.identity_loss(value, reduction="none")
