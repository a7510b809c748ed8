"""Published runs on IPUs, to which the constants of the estimate are fitted."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Dict, List, Sequence

from ipurun.config.compose import one
from ipurun.estimate.calibration import Measurement
from ipurun.estimate.stages import layout_of_blocks, module_ranges, single_ipu
from ipurun.estimate.types import Settings, StageLayout
from ipurun.inspect.trace import trace_model
from ipurun.inspect.traced_model import TracedModel

GC200_HZ, BOW_HZ = 1.325e9, 1.85e9
HALF = {"compute_bytes": 2, "partials_bytes": 2}
ADAM = {"optimizer": "AdamW", "state_bytes": 8.0, "state_tensors": 2, "accumulator_bytes": 2.0, "state_on_chip": False}


@functools.lru_cache(maxsize=None)
def traced(recipe: str, model: str, micro_batch_size: int) -> TracedModel:
    config = one(
        [f"+recipe={recipe}", f"model={model}", "precision=16.16", f"micro_batch_size={micro_batch_size}"]
    ).config
    return trace_model(config)


def bert_layout(model: TracedModel, starts: Sequence[int], layers: int) -> StageLayout:
    """Embedding and head on IPU 0, the encoder's layers on the others."""
    blocks = [("embeddings", 0), *((f"encoder.layer.{start}", ipu + 1) for ipu, start in enumerate(starts))]
    kept = [f"encoder.layer.{index}" for index in range(layers)]
    return layout_of_blocks(model, [*blocks, ("pooler", 0), ("predictions", 0)], kept)


def gpt_layout(model: TracedModel, starts: Sequence[int], layers: int) -> StageLayout:
    blocks = [("wte", 0), *((f"h.{start}", ipu + 1) for ipu, start in enumerate(starts)), ("lm_head", 0)]
    return layout_of_blocks(model, blocks, [f"h.{index}" for index in range(layers)])


def bert_base() -> Measurement:
    """graphcore/examples pretrain_base_128_pod4, measured on four Bow IPUs by EIDF."""
    model = traced("bert", "bert_base", 32)
    settings = Settings(
        micro_batch_size=32,
        gradient_accumulation=2048,
        recompute="checkpoints",
        available_proportion=(0.25,),
        **HALF,
        **ADAM,
    )
    return Measurement("BERT-base", "BERT-base", model, bert_layout(model, (0, 4, 8), 12), settings, BOW_HZ, 4035.0)


def bert_demo() -> Measurement:
    """graphcore/examples demo_tiny_128, measured on four Bow IPUs by ALCF: bound by latency."""
    model = traced("bert", "bert_demo", 1)
    settings = Settings(gradient_accumulation=16, recompute="checkpoints", available_proportion=(0.6,), **HALF, **ADAM)
    return Measurement("BERT demo", "BERT demo", model, bert_layout(model, (0, 1, 2), 3), settings, BOW_HZ, 749.6)


def gpt2_small(gradient_accumulation: int, measured: float) -> Measurement:
    """CARAML's GPT-2 of 117M parameters, measured on four GC200 in Juelich."""
    model = traced("gpt", "gpt2_small", 1)
    settings = Settings(
        gradient_accumulation=gradient_accumulation,
        device_iterations=4,
        recompute="checkpoints",
        available_proportion=(0.15,),
        serialized={"lm_head": 4},
        **HALF,
        **ADAM,
    )
    name = f"GPT-2 small, accumulation {gradient_accumulation}"
    return Measurement(name, "GPT-2 small", model, gpt_layout(model, (0, 4, 8), 12), settings, GC200_HZ, measured)


def resnet50(replicas: int = 4) -> Measurement:
    """graphcore/examples resnet50, measured on four Bow IPUs by ALCF; pictures are sent as bytes."""
    model = traced("resnet", "resnet50", 18)
    model = dataclasses.replace(model, input_bytes=model.input_bytes // 2)
    kept = [name for name in module_ranges(model) if re.fullmatch(r"layer[123]\.\d+|layer4\..+|avgpool|fc", name)]
    settings = Settings(
        micro_batch_size=18,
        gradient_accumulation=57,
        replicas=replicas,
        recompute="checkpoints",
        available_proportion=(0.16,),
        accumulator_bytes=4.0,
        **HALF,
    )
    return Measurement("ResNet-50", "ResNet-50", model, single_ipu(model, kept), settings, BOW_HZ, 9959.82)


def vit_base(replicas: int = 4) -> Measurement:
    """graphcore/examples b16_imagenet1k, measured on a Bow Pod16 by Graphcore; its args.py has half partials."""
    model = traced("vit", "vit_base", 17)
    stack = next(name[:-2] for name in module_ranges(model) if re.fullmatch(r"(\w+\.)*\w+\.11", name))
    settings = Settings(
        micro_batch_size=17,
        gradient_accumulation=30,
        replicas=replicas,
        device_iterations=8,
        recompute="checkpoints",
        available_proportion=(0.3,),
        **HALF,
        state_bytes=2.0,
        state_tensors=1,
        state_sharded=True,
        accumulator_bytes=2.0,
    )
    layout = layout_of_blocks(
        model, [(f"{stack}{3 * ipu}", ipu) for ipu in range(4)], [f"{stack}{layer}" for layer in range(12)]
    )
    # What limits the run is known less well than that of others: Graphcore's run from scratch, which fills and drains
    # its pipeline far less often, is within 4% of this one.
    return Measurement("ViT-B/16", "ViT-B/16", model, layout, settings, BOW_HZ, 7319.0, noise=0.3)


GPT2_SMALL: Dict[int, float] = {16: 64.99, 64: 129.96, 512: 183.37, 4096: 193.41}


@functools.lru_cache(maxsize=None)
def measurements() -> List[Measurement]:
    small = [gpt2_small(accumulation, measured) for accumulation, measured in GPT2_SMALL.items()]
    return [bert_base(), bert_demo(), *small, resnet50(), vit_base()]
