"""A plan as text and as JSON: the numbers, the remarks, and the PopTorch calls it stands for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict, List, Tuple

from ipurun.log.format import batch_equation, count, devices_text, epochs_text, plural
from ipurun.plan.optimizer import changeable
from ipurun.plan.types import EvalPass, Plan

__all__ = ["num_stages", "plan_dict", "plan_lines", "plan_rows"]


def num_stages(plan: Plan) -> int:
    """Stages that a training batch passes through."""
    return plan.stages


def plan_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Label and text of everything a plan fixes, except notes and calls."""
    steps = plan.steps
    rows = [
        ("engine", f"{plan.engine} ({plan.engine_version})"),
        ("model", f"{plural(plan.parameters, 'parameter')}, precision {plan.precision}"),
        ("devices", _devices_text(plan)),
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
    for label, every_calls in (("saves", steps.save_every_calls), ("evaluates", steps.eval_every_calls)):
        if every_calls is not None:
            rows.append((label, _interval(every_calls, plan)))
    values = changeable(plan.optimizer)
    if values is not None:
        listed = [f"{kind} {', '.join(names)}" for kind, names in values.items() if names]
        rows.append(("optimizer", f"{plan.optimizer.path.rpartition('.')[2]}: {'; '.join(listed)}"))
    rows.append(("returns", f"output mode {plan.output_mode}"))
    for own in plan.own_blocks:
        where = "the model's forward" if own.module is None else own.module or "the model"
        ipu = "an IPU that the strategy chooses" if own.ipu is None else f"IPU {own.ipu}"
        rows.append(("block", f"{where} on {ipu} ({own.block_id or 'no name'}), in the model's own code"))
    for placement in plan.placements:
        rows.append(("block", f"{placement.module or 'the model'} on IPU {placement.ipu} ({placement.block_id})"))
    rows.append(("cache", plan.cache_dir or "off"))
    if plan.profile_dir:
        rows.append(("profile", plan.profile_dir))
    for variable, value in plan.environment.items():
        rows.append(("env", f"{variable}={value}"))
    return rows


def _devices_text(plan: Plan) -> str:
    if plan.is_left_whole:
        return f"1 IPU of {plan.devices.total}: no split fits, and the model is shown whole"
    return devices_text(plan.devices, num_stages(plan))


def plan_lines(plan: Plan) -> List[str]:
    """The whole plan as plain lines."""
    from ipurun.plan.show import calls_text

    lines = [f"plan of {plan.name}"]
    lines += [f"  {label:<11}{text}" for label, text in plan_rows(plan)]
    if plan.notes:
        lines += ["", "notes"] + [f"  - {note}" for note in plan.notes]
    lines += ["", "in PopTorch"] + [f"  {line}".rstrip() for line in calls_text(plan)]
    return lines


def plan_dict(plan: Plan) -> Dict[str, Any]:
    """The whole plan as JSON-ready data, derived numbers included."""
    from ipurun.plan.show import calls_text

    document: Dict[str, Any] = {
        "name": plan.name,
        "engine": {"kind": plan.engine, "version": plan.engine_version},
        "devices": asdict(plan.devices),
        "stages": num_stages(plan),
        "precision": plan.precision,
        "parameters": plan.parameters,
        "output_mode": plan.output_mode,
        "steps": asdict(plan.steps),
        "evaluation": None if plan.evaluation is None else asdict(plan.evaluation),
        "optimizer": {"class": plan.optimizer.path, **(changeable(plan.optimizer) or {})},
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
        return "until the data ends (its length is not known)"
    epochs = "" if steps.epochs is None else f", {epochs_text(steps.epochs)}"
    return f"{plural(steps.total_updates, 'weight update')} in {plural(steps.total_calls or 0, 'host call')}{epochs}"


def _evaluation_text(evaluation: EvalPass) -> str:
    if evaluation.samples is None:
        return f"{evaluation.split}: until the data ends (its length is not known)"
    text = f"{evaluation.split}: {plural(evaluation.host_calls or 0, 'host call')} for "
    text += f"{plural(evaluation.samples, 'sample')}, {count(evaluation.padded_samples or 0)} padded"
    return f"{text}, {count(evaluation.dropped_samples or 0)} dropped"


def _interval(every_calls: int, plan: Plan) -> str:
    updates = every_calls * plan.training.device_iterations
    return f"every {plural(updates, 'weight update')} ({plural(every_calls, 'host call')})"
