"""BERT's encoder with a classifier in place of the heads of pretraining."""

from __future__ import annotations

import torch
from torch import nn

from ipurun.recipes.bert.encoder import Embeddings, Encoder
from ipurun.recipes.bert.model import Pooler

__all__ = ["BertForClassification"]


class BertForClassification(nn.Module):
    """Classifies a text; the modules of the encoder have the names of `BertForPretraining`, so its weights fit.

    Args:
        vocab_size: Number of different words.
        max_positions: Maximum length of a sequence.
        sequence_length: Length of the texts, including padding; the data depend on it.
        hidden_size: Width of the layers.
        num_layers: Number of layers.
        num_heads: Attention heads per layer.
        num_classes: Number of classes.
        dropout: Share of values dropped in training.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(
        self,
        vocab_size: int = 30522,
        max_positions: int = 512,
        sequence_length: int = 128,
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        num_classes: int = 2,
        dropout: float = 0.1,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} cannot be divided among {num_heads} heads")
        if sequence_length > max_positions:
            raise ValueError(f"sequence_length {sequence_length} is above max_positions {max_positions}")
        self.embeddings = Embeddings(vocab_size, max_positions, hidden_size, dropout)
        self.encoder = Encoder(num_layers, hidden_size, num_heads, dropout)
        self.pooler = Pooler(hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, num_classes)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=init_std)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores of the classes.

        Args:
            input_ids: Words: batch x length.
            token_type_ids: 0 everywhere: there is one sentence.
            attention_mask: 1 for words, 0 for padding.
        """
        hidden = self.encoder(self.embeddings(input_ids, token_type_ids), attention_mask)
        return self.classifier(self.dropout(self.pooler(hidden)))
