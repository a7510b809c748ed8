"""Generation caches of language models: switched off, because no step of training or evaluation reads them."""

from __future__ import annotations

from typing import Any, List

from torch import nn

__all__ = ["CACHE_NOTE", "stop_caching"]

CACHE_NOTE = "the model's config.use_cache is off: its keys and values of past tokens are for generating text"


def stop_caching(model: nn.Module) -> bool:
    """Set `config.use_cache` of a model and its parts to False; whether one of them was on.

    That is how models of transformers say that every layer is to keep its keys and values for the next token. Such a
    cache grows from a tensor without elements, which no IPU takes, and would come back to the host with every output.
    """
    configs: List[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    return bool(caching)
