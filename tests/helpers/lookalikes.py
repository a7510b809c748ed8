"""Hand-written toy models with the module names and conventions of well-known libraries, without any IPU code."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, Optional, Tuple

import torch
from torch import nn

WIDTH, VOCAB, LENGTH = 8, 20, 6


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """An ordered mapping whose items are also attributes, as in transformers."""

    last_hidden_state: Optional[torch.Tensor] = None
    pooler_output: Optional[torch.Tensor] = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Conv1D(nn.Module):
    """GPT-2's linear layer in transformers, with a transposed weight."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.nf)


class GPT2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(2 * WIDTH, WIDTH), "c_proj": Conv1D(WIDTH, 2 * WIDTH)})

    def forward(self, hidden: torch.Tensor, layer_past: Any = None) -> Tuple[torch.Tensor, Any]:
        inner = torch.relu(self.mlp["c_fc"](self.ln_1(hidden)))
        return hidden + self.mlp["c_proj"](inner), None


class GPT2Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList([GPT2Block() for _ in range(layers)])
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor) -> ModelOutput:
        hidden = self.drop(self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1])))
        for block in self.h:
            hidden = block(hidden, layer_past=None)[0]
        return ModelOutput(last_hidden_state=self.ln_f(hidden))


class GPT2LMHeadModel(nn.Module):
    """``transformer.h.0`` and a tied ``lm_head``."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.transformer = GPT2Model(layers)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer(input_ids).last_hidden_state)[:, -1]


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.intermediate = nn.Sequential(OrderedDict(dense=nn.Linear(WIDTH, WIDTH), act=nn.GELU()))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Optional[torch.Tensor] = None) -> Tuple[Any, ...]:
        return (hidden_states + self.output(self.intermediate(hidden_states)),)


class BertEncoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([BertLayer() for _ in range(layers)])

    def forward(self, hidden: torch.Tensor) -> ModelOutput:
        for layer in self.layer:
            hidden = layer(hidden_states=hidden, attention_mask=None)[0]
        return ModelOutput(last_hidden_state=hidden)


class BertModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCAB, WIDTH, padding_idx=0)})
        self.embeddings_norm = nn.LayerNorm(WIDTH)
        self.encoder = BertEncoder(layers)
        self.pooler = nn.Sequential(OrderedDict(dense=nn.Linear(WIDTH, WIDTH), activation=nn.Tanh()))

    def forward(self, input_ids: torch.Tensor) -> ModelOutput:
        hidden = self.embeddings_norm(self.embeddings["word_embeddings"](input_ids))
        hidden = self.encoder(hidden).last_hidden_state
        return ModelOutput(last_hidden_state=hidden, pooler_output=self.pooler(hidden[:, 0]))


class BertForSequenceClassification(nn.Module):
    """``bert.encoder.layer.0``: layers that are called by keyword and return tuples, an output with attributes."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.bert = BertModel(layers)
        self.dropout = nn.Dropout(0.0)
        self.classifier = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(self.bert(input_ids).pooler_output))


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.drop_path1 = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path1(self.mlp(self.norm1(x)))


class TimmViT(nn.Module):
    """timm's names: one call of a Sequential of blocks, identities around it, a module that never runs."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Embedding(VOCAB, WIDTH)})
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*[ViTBlock() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.fc_norm = nn.Identity()
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head_dist = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm_pre(self.patch_embed["proj"](tokens))
        x = self.norm(self.blocks(x))
        return self.head(self.head_drop(self.fc_norm(x.mean(dim=1))))


class T5Stack(nn.Module):
    def __init__(self, embed_tokens: nn.Embedding, layers: int) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList([ViTBlock() for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor, memory: Optional[torch.Tensor] = None) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for block in self.block:
            hidden = block(hidden if memory is None else hidden + memory)
        return self.final_layer_norm(hidden)


class T5ForConditionalGeneration(nn.Module):
    """An encoder and a decoder that share one embedding table, which is also the head's weight.

    Args:
        one_module: Whether the table is one module with two callers, as in older versions, or two with one weight.
    """

    def __init__(self, layers: int = 2, one_module: bool = False) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        tables = [self.shared if one_module else nn.Embedding(VOCAB, WIDTH) for _ in range(2)]
        self.encoder, self.decoder = T5Stack(tables[0], layers), T5Stack(tables[1], layers)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        for module in (*tables, self.lm_head):
            module.weight = self.shared.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(input_ids)
        return self.lm_head(self.decoder(input_ids.flip(1), memory))[:, -1]


class Tokens(torch.utils.data.Dataset):
    """Random tokens and a class."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        return tokens, int(tokens.sum()) % VOCAB


def tokens() -> Tuple[Tokens, Tokens]:
    return Tokens(), Tokens()


class AuxiliaryNet(nn.Module):
    """Has a second head in training only, like GoogLeNet; its modules run in another order than defined."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.aux = nn.Linear(WIDTH, VOCAB)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(tokens).mean(dim=1))
        scores = self.head(hidden)
        return scores + 0.3 * self.aux(hidden) if self.training else scores
