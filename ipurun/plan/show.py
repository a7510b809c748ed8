"""A plan as PopTorch source text: what a YAML file means, in lines that anyone could have written by hand."""

from __future__ import annotations

from typing import Any, Iterable, List, Mapping

from ipurun.plan.types import Call, OwnBlock, ParameterGroup, Placement, Plan, Serialized, Symbol

__all__ = ["call_text", "calls_text", "value_text"]


def calls_text(plan: Plan) -> List[str]:
    """The source lines that a plan means, with the key that asked for each as a comment."""
    lines = [
        f"os.environ[{name!r}] = {value!r}  # {'debug.log_level' if name == 'POPTORCH_LOG_LEVEL' else 'profile'}"
        for name, value in plan.environment.items()
    ]
    lines.append("opts = poptorch.Options()")
    lines += _option_lines("opts", plan.training_options)
    lines.append("inference_opts = poptorch.Options()")
    lines += _option_lines("inference_opts", plan.inference_options)
    lines += _model_lines(plan)
    lines += _optimizer_lines(plan)
    lines.append("training = poptorch.trainingModel(model, opts, optimizer)")
    if plan.inference_placements != plan.placements:
        lines.append("poptorch.removeBlocks(model)")
        lines += [_block(placement) for placement in plan.inference_placements]
    lines.append("inference = poptorch.inferenceModel(model, inference_opts)")
    return lines


def call_text(call: Call) -> str:
    """One call: ``Training.gradientAccumulation(8)``."""
    arguments = [value_text(value) for value in call.args]
    arguments += [f"{name}={value_text(value)}" for name, value in call.kwargs.items()]
    chained = "".join(f".{call_text(setter)}" for setter in call.chain)
    return f"{call.path}({', '.join(arguments)}){chained}"


def value_text(value: Any) -> str:
    """An argument as source."""
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, Call):
        return call_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {value_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(value_text(entry) for entry in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def _option_lines(variable: str, calls: Iterable[Call]) -> List[str]:
    return [f"{variable}.{call_text(call)}" + (f"  # {call.origin}" if call.origin else "") for call in calls]


def _model_lines(plan: Plan) -> List[str]:
    lines = ["model.half()  # precision=16.16"] if plan.precision == "16.16" else []
    lines += [
        f"# {module} computes in float{bits}, with casts at its edges" for module, bits in plan.module_precision.items()
    ]
    lines += [_own_block(block) for block in plan.own_blocks]
    lines += [
        f"# block {block.block_id!r} goes on in the loss: poptorch.Block.start({block.block_id!r}, ipu_id={block.ipu})"
        for block in plan.ended_blocks
        if not block.module
    ]
    lines += [_block(placement) for placement in plan.placements]
    lines += [_serialized(layer) for layer in plan.serialized]
    lines += [
        f"# {module} gives its product as poptorch.set_available_memory(product, {share})  # memory.module_proportion"
        for module, share in plan.module_proportions.items()
    ]
    if plan.recompute:
        lines += [
            f"for name in {' '.join(plan.recompute)!r}.split():  # recompute",
            "    model.get_submodule(name).register_forward_hook("
            "lambda module, args, out: poptorch.recomputationCheckpoint(out))",
        ]
    if plan.overlap_io != "none":
        mode = "".join(word.capitalize() for word in plan.overlap_io.split("_"))
        lines.append(
            f"# inputs and outputs go through poptorch.set_overlap_for_input and set_overlap_for_output, "
            f"poptorch.OverlapMode.Overlap{mode}  # memory.overlap_io"
        )
    return lines


def _block(placement: Placement) -> str:
    module = f"model.get_submodule({placement.module!r})" if placement.module else "model"
    origin = f"  # {placement.origin}" if placement.origin else ""
    return f"poptorch.BeginBlock({module}, {placement.block_id!r}, ipu_id={placement.ipu}){origin}"


def _own_block(block: OwnBlock) -> str:
    where = "in forward" if block.module is None else f"at {block.module or 'the model'}"
    name = "a block" if block.block_id is None else f"block {block.block_id!r}"
    ipu = "" if block.ipu is None else f" on IPU {block.ipu}"
    return f"# {name}{ipu} begins {where}, in the model's own code"


def _serialized(layer: Serialized) -> str:
    if layer.mode == "rows":
        return f"# {layer.module} looks into {layer.factor} parts of its table in turn  # memory.serialize"
    mode = "".join(word.capitalize() for word in layer.mode.split("_"))
    precision = ", keep_precision=True" if layer.keep_precision else ""
    return (
        f"# {layer.module} computes poptorch.serializedMatMul(values, weight.t(), "
        f"poptorch.MatMulSerializationMode.{mode}, {layer.factor}{precision})  # memory.serialize"
    )


def _optimizer_lines(plan: Plan) -> List[str]:
    call = plan.optimizer
    groups = [_group_text(group) for group in plan.parameter_groups]
    parameters = Symbol(f"[{', '.join(groups)}, {{'params': rest}}]" if groups else "model.parameters()")
    constructor = Call(call.path, (parameters, *call.args), call.kwargs)
    lines = [f"optimizer = {call_text(constructor)}  # optimizer"]
    return lines + [f"optimizer.{call_text(mark)}  # {mark.origin}" for mark in call.chain]


def _group_text(group: ParameterGroup) -> str:
    values = "".join(f", {name!r}: {value_text(value)}" for name, value in group.values.items())
    return "{'params': matching(" + ", ".join(map(repr, group.match)) + ")" + values + "}"
