"""Show a plan as text and as JSON: the numbers, the notes, and the PopTorch calls."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any, Dict, Iterable, List, Optional, Tuple

from ipurun.api.calls import Call, Symbol, call_text, value_text
from ipurun.errors import listing
from ipurun.inspect.facts import InitialWeights, UserBlock
from ipurun.log.format import batch_equation, count, devices_text, epochs_text, plural, size_text
from ipurun.planning.optimizer import changeable
from ipurun.planning.plan import EvalPass, FrozenPart, ParameterGroup, Placement, Plan, Saving, Serialized

__all__ = ["calls_text", "initial_rows", "plan_dict", "plan_lines"]

_MOST_NAMES = 4  # in a row; the run folder's initial_weights.json has all


def plan_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Return the labels and texts of a plan, except notes and calls."""
    steps = plan.steps
    rows = [
        ("engine", f"{plan.engine} ({plan.engine_version})"),
        ("model", f"{plural(plan.parameters, 'parameter')}, precision {plan.precision}"),
        *initial_rows(plan.initial_weights),
        *_frozen_rows(plan),
        ("devices", _devices_text(plan)),
        *_instance_rows(plan),
        ("batch", batch_equation(plan.training)),
        ("", f"{plural(plan.training.samples_per_update, 'sample')} per weight update"),
        ("inference", batch_equation(plan.inference)),
        ("steps", _steps_text(plan)),
    ]
    if steps.calls_per_epoch is not None:
        epoch = f"{plural(steps.calls_per_epoch, 'host call')}, {plural(steps.updates_per_epoch or 0, 'weight update')}"
        dropped = steps.dropped_samples or 0
        rows.append(("epoch", f"{epoch}, {plural(dropped, 'sample')} dropped"))
    if plan.evaluation is not None:
        rows.append(("evaluation", _evaluation_text(plan.evaluation)))
    if plan.saving is not None:
        rows += _saving_rows(plan.saving)
    for label, every_calls in (("saves", steps.save_every_calls), ("evaluates", steps.eval_every_calls)):
        if every_calls is not None:
            rows.append((label, _interval(every_calls, plan)))
    values = changeable(plan.optimizer)
    if values is not None:
        listed = [f"{kind} {', '.join(names)}" for kind, names in values.items() if names]
        rows.append(("optimizer", f"{plan.optimizer.path.rpartition('.')[2]}: {'; '.join(listed)}"))
    if plan.no_decay:
        rows.append(("", f"no weight decay for {plural(len(plan.no_decay), 'parameter')} (optimizer.no_decay)"))
    rows.append(("returns", f"output mode {plan.output_mode}"))
    for own in plan.user_blocks:
        where = "the model's forward" if own.module is None else own.module or "the model"
        ipu = "an IPU chosen by the strategy" if own.ipu is None else f"IPU {own.ipu}"
        rows.append(("block", f"{where} on {ipu} ({own.block_id or 'no name'}), in the model's own code"))
    for placement in plan.placements:
        rows.append(("block", f"{placement.module or 'the model'} on IPU {placement.ipu} ({placement.block_id})"))
    rows.append(("cache", plan.cache_dir or "off"))
    if plan.profile_dir:
        rows.append(("profile", plan.profile_dir))
    for variable, value in plan.environment.items():
        rows.append(("env", f"{variable}={value}"))
    return rows


def initial_rows(initial: Optional[InitialWeights]) -> List[Tuple[str, str]]:
    """Return in short what `init_from` loads and what it does not."""
    if initial is None:
        return []
    total = len(initial.loaded) + len(initial.not_loaded)
    rows = [("start", f"{len(initial.loaded)} of {plural(total, 'weight')} from {initial.path} ({initial.kind})")]
    for label, names in (("not loaded", initial.not_loaded), ("not used of the file", initial.left_over)):
        if names:
            rows.append(("", f"{label}: {listing(names, most=_MOST_NAMES)}"))
    return rows


def _frozen_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Return what is frozen; the parameters of a plan are those that are trained at some time."""
    return [
        (
            "frozen",
            f"{plural(part.elements, 'parameter')} in {plural(len(part.names), 'tensor')}, "
            + ("never trained" if part.until_step is None else f"trained after step {part.until_step:,}"),
        )
        for part in plan.frozen
    ]


def _instance_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Return how several processes share the work, and what starts them."""
    instances, local = plan.instances, plan.local_training
    if instances.count == 1:
        return []
    hosts = f" on {plural(len(instances.hosts), 'host')}" if instances.hosts else ""
    rows = [
        (
            "instances",
            f"{instances.count} ({instances.kind}){hosts}, each with {plural(local.replicas, 'replica')} of "
            f"{plan.training.replicas}",
        ),
        (
            "",
            f"{plural(local.samples_per_call, 'sample')} of a host call for each, "
            f"{plural(plan.local_inference.samples_per_call, 'sample')} in inference",
        ),
    ]
    if instances.command:
        rows.append(("command", shlex.join(instances.command)))
    return rows


def _devices_text(plan: Plan) -> str:
    if plan.is_left_whole:
        return f"1 IPU of {plan.devices.total}: no split fits, so the model is shown unsplit"
    return devices_text(plan.devices, plan.stages)


def plan_lines(plan: Plan) -> List[str]:
    """Return the whole plan as text."""
    lines = [f"plan of {plan.name}"]
    lines += [f"  {label:<11}{text}" for label, text in plan_rows(plan)]
    if plan.notes:
        lines += ["", "notes"] + [f"  - {note}" for note in plan.notes]
    lines += ["", "in PopTorch"] + [f"  {line}".rstrip() for line in calls_text(plan)]
    return lines


def plan_dict(plan: Plan) -> Dict[str, Any]:
    """Return the whole plan as JSON-ready data, including derived numbers."""
    document: Dict[str, Any] = {
        "name": plan.name,
        "engine": {"kind": plan.engine, "version": plan.engine_version},
        "devices": asdict(plan.devices),
        "instances": asdict(plan.instances),
        "stages": plan.stages,
        "precision": plan.precision,
        "parameters": plan.parameters,
        "output_mode": plan.output_mode,
        "steps": asdict(plan.steps),
        "evaluation": None if plan.evaluation is None else asdict(plan.evaluation),
        "saving": None if plan.saving is None else asdict(plan.saving),
        "optimizer": {"class": plan.optimizer.path, **(changeable(plan.optimizer) or {})},
        "no_decay": list(plan.no_decay),
        "frozen": [asdict(part) for part in plan.frozen],
        "initial_weights": None if plan.initial_weights is None else asdict(plan.initial_weights),
        "placements": [asdict(placement) for placement in plan.placements],
        "environment": dict(plan.environment),
        "cache_dir": plan.cache_dir,
        "profile_dir": plan.profile_dir,
        "notes": list(plan.notes),
        "poptorch": list(calls_text(plan)),
    }
    for mode, batch in (("training", plan.training), ("inference", plan.inference)):
        document[mode] = {
            **asdict(batch),
            "samples_per_update": batch.samples_per_update,
            "samples_per_call": batch.samples_per_call,
        }
    return document


def _steps_text(plan: Plan) -> str:
    steps = plan.steps
    if steps.total_updates is None:
        return "until the data ends (length unknown)"
    epochs = "" if steps.epochs is None else f", {epochs_text(steps.epochs)}"
    return f"{plural(steps.total_updates, 'weight update')} in {plural(steps.total_calls or 0, 'host call')}{epochs}"


def _evaluation_text(evaluation: EvalPass) -> str:
    if evaluation.samples is None:
        return f"{evaluation.split}: until the data ends (length unknown)"
    text = f"{evaluation.split}: {plural(evaluation.host_calls or 0, 'host call')} for "
    text += f"{plural(evaluation.samples, 'sample')}, {count(evaluation.padded_samples or 0)} padded"
    return f"{text}, {count(evaluation.dropped_samples or 0)} dropped"


def _saving_rows(saving: Saving) -> List[Tuple[str, str]]:
    text = f"about {size_text(saving.checkpoint_bytes)} each"
    if saving.saves is not None:
        text += f", {size_text(saving.checkpoint_bytes * saving.saves)} written in {plural(saving.saves, 'save')}"
    if saving.copy_seconds is not None:
        text += f"; a save stops training for about {saving.copy_seconds * 1000:,.1f} ms (estimate)"
    rows = [("checkpoint", text)]
    most = "" if saving.most_bytes is None else f"at most {size_text(saving.most_bytes)} at a time"
    free = "" if saving.free_bytes is None else f"{saving.free_bytes / 1e9:,.1f} GB free on the disk"
    if most or free:
        rows.append(("", "; ".join(filter(None, (most, free)))))
    return rows


def _interval(every_calls: int, plan: Plan) -> str:
    updates = every_calls * plan.training.device_iterations
    return f"every {plural(updates, 'weight update')} ({plural(every_calls, 'host call')})"


def calls_text(plan: Plan) -> List[str]:
    """Return a plan as lines of Python, each with the key that set it as a comment."""
    lines = [
        f"os.environ[{name!r}] = {value!r}  # {plan.environment_origins.get(name, '').partition(' (')[0]}"
        for name, value in plan.environment.items()
    ]
    options = "poptorch.Options()"
    if plan.instances.uses_popdist:
        options = f"popdist.poptorch.Options(ipus_per_replica={plan.devices.per_replica})"
    lines.append(f"opts = {options}")
    lines += _option_lines("opts", plan.training_options)
    lines.append(f"inference_opts = {options}")
    lines += _option_lines("inference_opts", plan.inference_options)
    lines += _model_lines(plan)
    lines += [_frozen_line(part) for part in plan.frozen]
    lines += _optimizer_lines(plan)
    lines.append("training = poptorch.trainingModel(model, opts, optimizer)")
    if plan.inference_placements != plan.placements:
        lines.append("poptorch.removeBlocks(model)")
        lines += [_block(placement) for placement in plan.inference_placements]
    lines.append("inference = poptorch.inferenceModel(model, inference_opts)")
    return lines


def _option_lines(variable: str, calls: Iterable[Call]) -> List[str]:
    return [f"{variable}.{call_text(call)}" + (f"  # {call.origin}" if call.origin else "") for call in calls]


def _model_lines(plan: Plan) -> List[str]:
    lines = ["model.half()  # precision=16.16"] if plan.precision == "16.16" else []
    lines += [
        f"# {module} computes in float{bits}, with casts at its inputs and outputs"
        for module, bits in plan.module_precision.items()
    ]
    lines += [_own_block(block) for block in plan.user_blocks]
    lines += [
        f"# block {block.block_id!r} resumes in the loss: poptorch.Block.start({block.block_id!r}, ipu_id={block.ipu})"
        for block in plan.ended_blocks
        if not block.module
    ]
    lines += [_block(placement) for placement in plan.placements]
    lines += [_serialized(layer) for layer in plan.serialized]
    lines += [
        f"# {module} returns poptorch.set_available_memory(product, {share})  # memory.module_proportion"
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
            f"# inputs and outputs pass through poptorch.set_overlap_for_input and set_overlap_for_output, "
            f"poptorch.OverlapMode.Overlap{mode}  # memory.overlap_io"
        )
    return lines


def _block(placement: Placement) -> str:
    module = f"model.get_submodule({placement.module!r})" if placement.module else "model"
    origin = f"  # {placement.origin}" if placement.origin else ""
    return f"poptorch.BeginBlock({module}, {placement.block_id!r}, ipu_id={placement.ipu}){origin}"


def _own_block(block: UserBlock) -> str:
    where = "in forward" if block.module is None else f"at {block.module or 'the model'}"
    name = "a block" if block.block_id is None else f"block {block.block_id!r}"
    ipu = "" if block.ipu is None else f" on IPU {block.ipu}"
    return f"# {name}{ipu} begins {where}, in the model's own code"


def _serialized(layer: Serialized) -> str:
    if layer.mode == "rows":
        return f"# {layer.module} looks up {layer.factor} parts of its table in turn  # memory.serialize"
    mode = "".join(word.capitalize() for word in layer.mode.split("_"))
    precision = ", keep_precision=True" if layer.keep_precision else ""
    return (
        f"# {layer.module} computes poptorch.serializedMatMul(values, weight.t(), "
        f"poptorch.MatMulSerializationMode.{mode}, {layer.factor}{precision})  # memory.serialize"
    )


def _frozen_line(part: FrozenPart) -> str:
    few = ", ".join(part.names[:2]) + (", ..." if len(part.names) > 2 else "")
    until = "" if part.until_step is None else f", until step {part.until_step}: a new trainingModel then  # unfreeze"
    return f"# requires_grad_(False) for {plural(len(part.names), 'tensor')} ({few}){until or '  # freeze'}"


def _optimizer_lines(plan: Plan) -> List[str]:
    call = plan.optimizer
    groups = [_group_text(group) for group in plan.parameter_groups]
    parameters = Symbol(f"[{', '.join(groups)}, {{'params': rest}}]" if groups else "model.parameters()")
    constructor = Call(call.path, (parameters, *call.args), call.kwargs)
    lines = [f"optimizer = {call_text(constructor)}  # optimizer"]
    if plan.no_decay:
        few = ", ".join(plan.no_decay[:2]) + (", ..." if len(plan.no_decay) > 2 else "")
        lines.append(f"# {len(plan.no_decay)} parameters ({few}) in groups with weight_decay=0.0  # optimizer.no_decay")
    return lines + [f"optimizer.{call_text(mark)}  # {mark.origin}" for mark in call.chain]


def _group_text(group: ParameterGroup) -> str:
    values = "".join(f", {name!r}: {value_text(value)}" for name, value in group.values.items())
    return "{'params': matching(" + ", ".join(map(repr, group.match)) + ")" + values + "}"
