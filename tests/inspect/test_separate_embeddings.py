"""Encoder and decoder that call one embedding module, as in transformers 4: each gets its own, with one weight."""

from types import SimpleNamespace

import torch
from torch import nn

from ipurun.inspect.model import _separate_embeddings


class _Stack(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = table


class _Seq2Seq(nn.Module):
    def __init__(self, is_encoder_decoder: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.shared = nn.Embedding(8, 4)
        self.encoder, self.decoder = _Stack(self.shared), _Stack(self.shared)


def test_modules_are_apart_and_the_weight_is_one():
    model = _Seq2Seq()
    names = list(model.state_dict())
    _separate_embeddings(model)
    assert model.encoder.embed_tokens is model.shared
    assert model.decoder.embed_tokens is not model.shared
    assert model.decoder.embed_tokens.weight is model.shared.weight
    assert list(model.state_dict()) == names
    assert len(list(model.parameters())) == 1
    called = []
    model.decoder.embed_tokens.register_forward_pre_hook(lambda module, given: called.append(module))
    model.encoder.embed_tokens(torch.tensor([1]))
    assert called == []


def test_other_models_stay_as_they_are():
    model = _Seq2Seq(is_encoder_decoder=False)
    _separate_embeddings(model)
    assert model.decoder.embed_tokens is model.shared
