"""Module trees of models, as `Facts` describe them."""

from typing import Any, Dict, Iterable, Optional, Sequence, Tuple

from ipurun.inspect.facts import ModuleCall


def gpt(layers: int = 6, tied: bool = True) -> Dict[str, Any]:
    """A decoder with the names of OpenAI's GPT-2."""
    kinds = {"": "GPT", "wte": "Embedding", "wpe": "Embedding", "drop": "Dropout", "h": "ModuleList"}
    for index in range(layers):
        kinds.update({f"h.{index}": "Block", f"h.{index}.ln_1": "LayerNorm", f"h.{index}.attn": "Attention"})
        kinds.update({f"h.{index}.attn.c_attn": "Conv1D", f"h.{index}.mlp": "MLP", f"h.{index}.mlp.c_fc": "Linear"})
    kinds.update({"ln_f": "LayerNorm", "lm_head": "Linear"})
    shapes = {"wte.weight": (50, 16), "wpe.weight": (8, 16), "lm_head.weight": (50, 16)}
    for index in range(layers):
        shapes[f"h.{index}.attn.c_attn.weight"] = (16, 48)
        shapes[f"h.{index}.mlp.c_fc.weight"] = (64, 16)
    return {**_facts(kinds, shapes), "shared_parameters": (("wte.weight", "lm_head.weight"),) if tied else ()}


def resnet(lengths: Sequence[int] = (3, 4, 6, 3)) -> Dict[str, Any]:
    """A residual network with torchvision's names."""
    kinds = {"": "ResNet", "conv1": "Conv2d", "bn1": "BatchNorm2d", "relu": "ReLU"}
    for stage, length in enumerate(lengths, start=1):
        kinds[f"layer{stage}"] = "Sequential"
        for index in range(length):
            kinds.update({f"layer{stage}.{index}": "Bottleneck", f"layer{stage}.{index}.conv1": "Conv2d"})
    kinds.update({"avgpool": "AdaptiveAvgPool2d", "fc": "Linear"})
    return _facts(kinds, {"fc.weight": (10, 32)})


def _facts(kinds: Dict[str, str], shapes: Dict[str, Tuple[int, ...]]) -> Dict[str, Any]:
    return {
        "module_names": tuple(name for name in kinds if name),
        "module_kinds": kinds,
        "parameter_shapes": shapes,
    }


def traced(facts: Dict[str, Any], calls: Optional[Iterable[str]] = None, silent: Sequence[str] = ()) -> Dict[str, Any]:
    """Add a trace to facts: modules called in order of definition, or as given, with an operation in every leaf.

    Args:
        facts: The facts.
        calls: Names in order of their calls.
        silent: Leaves that compute nothing.
    """
    containers = ("ModuleList", "ModuleDict")
    order = calls or ["", *(name for name in facts["module_names"] if facts["module_kinds"][name] not in containers)]
    walked, operations = [], 0
    for name in order:
        walked.append(ModuleCall(name, operations))
        is_leaf = name and not any(other.startswith(name + ".") for other in facts["module_names"])
        operations += int(bool(is_leaf) and name not in silent)
    return {**facts, "calls": tuple(walked), "operations": operations}


def speech(layers: int = 2, tower: str = "decoder") -> Dict[str, Any]:
    """Two stacks; the second has an embedding before it, which shares its weight with the head, as in Whisper."""
    kinds = {"": "Speech", "encoder": "Encoder", "encoder.conv": "Conv1d", "encoder.layers": "ModuleList"}
    kinds.update(_stack("encoder", layers, "EncoderLayer" if tower == "decoder" else "Layer"))
    kinds.update({tower: "Decoder", f"{tower}.embed": "Embedding", f"{tower}.layers": "ModuleList"})
    kinds.update(_stack(tower, layers, "DecoderLayer" if tower == "decoder" else "Layer"))
    kinds["proj_out"] = "Linear"
    shapes = {f"{tower}.embed.weight": (50, 16), "proj_out.weight": (50, 16)}
    return {**_facts(kinds, shapes), "shared_parameters": ((f"{tower}.embed.weight", "proj_out.weight"),)}


def _stack(name: str, layers: int, kind: str) -> Dict[str, str]:
    kinds: Dict[str, str] = {}
    for index in range(layers):
        kinds.update({f"{name}.layers.{index}": kind, f"{name}.layers.{index}.fc": "Linear"})
    return kinds
