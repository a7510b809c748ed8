"""`optimizer` as one constructor call, which passes only what was set: PopTorch makes what is passed variable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.api import manifest
from ipurun.api.calls import Call
from ipurun.api.values import BadValueError, convert
from ipurun.config.keys import suggest_arguments
from ipurun.config.patterns import check_parameters, match_parameters, names_in
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings, listing, nearest
from ipurun.inspect.facts import Facts
from ipurun.planning.plan import ParameterGroup

__all__ = ["OptimizerState", "changeable", "optimizer_state", "plan_no_decay", "plan_optimizer"]

_POPTORCH = "poptorch.optim."
_TORCH = "torch.optim."
_SUPPORTED_TORCH = ("SGD", "Adam", "AdamW", "RMSprop")
_NEVER_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "alpha", "max_grad_norm")
# Optimizer class -> arguments that set the types of its moments.
_MOMENTS: Mapping[str, Tuple[str, ...]] = {
    "Adam": ("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "AdamW": ("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "LAMB": ("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "RMSprop": ("second_order_momentum_accum_type",),
    "SGD": (),
}
_HALF = ("torch.float16", "torch.half", "float16", "half")
_OWN_KEYS = (
    *("_target_", "_args_", "_partial_", "_convert_", "_recursive_"),
    *("variable", "constant", "groups", "no_decay"),
)
_NORMS_AND_BIASES = "norms_and_biases"  # a word of `no_decay`
_NORM = re.compile(r"Norm(\dd)?$")  # LayerNorm, BatchNorm2d, LlamaRMSNorm
_DECAYS_BY_DEFAULT = ("AdamW", "LAMB")
# Schedulers that move the momentum, or beta1, against the learning rate unless `cycle_momentum` is off.
_CYCLES_MOMENTUM = ("torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.CyclicLR")


def plan_optimizer(config: RunConfig, found: Findings) -> Tuple[Call, Tuple[ParameterGroup, ...]]:
    """Return the optimizer's constructor with its marks (variable or constant), and the parameter groups."""
    node = dict(config.optimizer)
    target = str(node.get("_target_") or "")
    if target and "." not in target:
        target = f"{_POPTORCH}{target}"
    if not target:
        if node:
            found.problem(
                "`optimizer` has arguments but no `_target_`",
                seen=listing(node),
                fix="optimizer._target_=poptorch.optim.SGD",
                key="optimizer",
            )
        found.note("no optimizer was chosen: using poptorch.optim.SGD with lr=0.01, as PopTorch does")
        return Call(f"{_POPTORCH}SGD", kwargs={"lr": 0.01}, origin="optimizer"), ()
    described = _described(target, found)
    values = {key: value for key, value in node.items() if key not in _OWN_KEYS and value is not None}
    for entry in described["init"] if described is not None else ():
        if "default" not in entry and node.get(entry["name"], "") is None:
            name = entry["name"]
            found.problem(
                f"`optimizer.{name}` is not set, but {target} needs it",
                fix=f"optimizer.{name}=0.01",
                key=f"optimizer.{name}",
            )
    arguments = _arguments(values, target, described, "optimizer", found)
    _add_loss_scaling(config, arguments, described, found)
    marks = _marks(node, arguments, described, config.schedule, found)
    groups = _groups(node.get("groups"), target, described, found)
    positional = node.get("_args_")
    positional = positional if isinstance(positional, (list, tuple)) else ()  # inspecting reports others
    call = Call(target, tuple(positional), arguments, "optimizer", marks)
    return call, groups


def plan_no_decay(config: RunConfig, facts: Facts, found: Findings) -> Tuple[str, ...]:
    """Return the parameters that `optimizer.no_decay` exempts from weight decay."""
    key, names = "optimizer.no_decay", list(facts.parameter_shapes)
    chosen: List[str] = []
    for pattern in names_in(config.optimizer.get("no_decay"), key, found, "parameter"):
        if pattern == _NORMS_AND_BIASES:
            chosen += [name for name in names if _is_norm_or_bias(name, facts.module_kinds)]
        elif names:
            check_parameters(pattern, key, names, found)
            chosen += match_parameters(pattern, names)
    if chosen and not _decays(config.optimizer):
        found.note("optimizer.no_decay has no effect: optimizer.weight_decay is not set")
    return tuple(name for name in names if name in set(chosen))


def _is_norm_or_bias(name: str, module_kinds: Mapping[str, str]) -> bool:
    module, _, own = name.rpartition(".")
    return "bias" in own or bool(_NORM.search(module_kinds.get(module, "")))


def _decays(node: Mapping[str, Any]) -> bool:
    groups = [group for group in node.get("groups") or () if isinstance(group, Mapping)]
    name = str(node.get("_target_") or "").rpartition(".")[2]
    given = node.get("weight_decay")
    return bool(given) or (given is None and name in _DECAYS_BY_DEFAULT) or any(g.get("weight_decay") for g in groups)


@dataclass(frozen=True)
class OptimizerState:
    """State that an optimizer keeps for each parameter value.

    Args:
        moments: Bytes of each moment.
        accumulator: Bytes of the gradient accumulator, which exists if micro-batches are accumulated.
        is_combined: Whether the accumulator is the velocity as well, and always exists.
    """

    moments: Tuple[int, ...]
    accumulator: int
    is_combined: bool


def optimizer_state(call: Call, weight_bytes: int) -> OptimizerState:
    """Return what an optimizer keeps for each parameter value.

    Args:
        call: Its constructor.
        weight_bytes: Bytes of a weight.
    """
    name = call.path.rpartition(".")[2]
    moments = [_type_bytes(call.kwargs.get(argument)) for argument in _MOMENTS.get(name, _MOMENTS["Adam"])]
    accumulator = _type_bytes(call.kwargs.get("accum_type"))
    is_combined = name == "SGD" and bool(call.kwargs.get("momentum")) and bool(call.kwargs.get("use_combined_accum"))
    if is_combined:
        accumulator = weight_bytes  # one buffer is velocity and accumulator
    elif name == "SGD" and call.kwargs.get("momentum"):
        moments.append(_type_bytes(call.kwargs.get("velocity_accum_type")))
    if name == "RMSprop":
        extra = [key for key in ("momentum", "centered") if call.kwargs.get(key)]
        moments += [_type_bytes(call.kwargs.get("first_order_momentum_accum_type"))] * len(extra)
    return OptimizerState(tuple(moments), accumulator, is_combined)


def _type_bytes(given: Any) -> int:
    """Return the size of an accumulator or moment, which is float32 by default."""
    return 2 if str(given) in _HALF else 4


def changeable(call: Call) -> Optional[Dict[str, List[str]]]:
    """Return which values of an optimizer can change without recompiling, and which are compiled in.

    Args:
        call: The optimizer's constructor with its marks, from a plan.

    Returns:
        Names under ``variable`` and ``constant``; None for classes outside poptorch.optim, where the values decide.
    """
    described = _described(call.path, Findings())
    if described is None:
        return None
    groups = described["attribute_groups"]
    names = list(dict.fromkeys([*groups["per_group"], *groups["global_variables"]]))
    marks = {mark.args[0]: mark.path.endswith("markAsVariable") for mark in call.chain}
    variable = [name for name in names if marks.get(name, name in call.kwargs)]
    # PopTorch has no amsgrad. Other arguments, such as accumulator types, are always compiled in.
    fixed = [name for name in names if name not in variable and name != "amsgrad"]
    return {"variable": variable, "constant": fixed + [name for name in call.kwargs if name not in names]}


def _described(target: str, found: Findings) -> Optional[Mapping[str, Any]]:
    """Return the manifest's entry of a poptorch.optim class; None for any other class."""
    classes: Mapping[str, Any] = {
        name: entry
        for name, entry in manifest.load()["modules"]["poptorch.optim"]["classes"].items()
        if "attribute_groups" in entry
    }
    name = target.rpartition(".")[2]
    if target.startswith(_POPTORCH):
        if name not in classes:
            close = nearest(name, classes, most=1) or ["SGD"]
            found.problem(
                f"poptorch.optim has no `{name}`",
                seen=f"optimizer._target_={target}",
                known=listing(classes),
                fix=f"optimizer._target_={_POPTORCH}{close[0]}",
                key="optimizer._target_",
            )
        return classes.get(name)
    if target.startswith(_TORCH) and name not in _SUPPORTED_TORCH:
        found.problem(
            f"PopTorch cannot run `{target}`",
            seen=f"optimizer._target_={target}",
            known=listing(
                [f"{_POPTORCH}{known}" for known in classes] + [f"{_TORCH}{known}" for known in _SUPPORTED_TORCH]
            ),
            fix=f"optimizer._target_={_POPTORCH}Adam",
            key="optimizer._target_",
        )
    return None


def _arguments(
    values: Mapping[str, Any], target: str, described: Optional[Mapping[str, Any]], key: str, found: Findings
) -> Dict[str, Any]:
    _check_signs(values, key, found)
    if described is None:
        if "max_grad_norm" in values and target.startswith(_TORCH):
            _refuse_clipping(target, key, values, found)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    known = {entry["name"]: entry for entry in described["init"] if entry["name"] != "params"}
    arguments: Dict[str, Any] = {}
    for name, value in values.items():
        if name == "max_grad_norm" and name not in known:
            _refuse_clipping(target, key, values, found)
        elif name not in known:
            close = suggest_arguments(key, name, list(known))
            found.problem(
                f"`{key}.{name}`: {target} has no argument `{name}`",
                seen=f"{key}.{name}={value}",
                known=listing(close or known),
                fix=f"{key}.{close[0]}={value}" if close else f"~{key}.{name}",
                key=f"{key}.{name}",
            )
        else:
            arguments[name] = _argument(value, known[name].get("annotation", ""), f"{key}.{name}", found)
    if arguments.get("amsgrad"):
        found.problem(
            "PopTorch has no amsgrad", seen=f"{key}.amsgrad=true", fix=f"{key}.amsgrad=false", key=f"{key}.amsgrad"
        )
    return arguments


def _check_signs(values: Mapping[str, Any], key: str, found: Findings) -> None:
    for name in _NEVER_NEGATIVE:
        value = values.get(name)
        if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
            found.problem(
                f"`{key}.{name}` must be a number of at least 0",
                seen=f"{key}.{name}={value}",
                fix=f"{key}.{name}={0.001 if name == 'lr' else 0}",
                key=f"{key}.{name}",
            )


def _argument(value: Any, annotation: str, key: str, found: Findings) -> Any:
    if "Tuple[float, float]" in annotation:
        numbers = list(value) if isinstance(value, (list, tuple)) else []
        if len(numbers) == 2 and all(isinstance(number, (int, float)) for number in numbers):
            return tuple(float(number) for number in numbers)
        found.problem(f"`{key}` takes two numbers", seen=str(value), fix=f"{key}=[0.9,0.999]", key=key)
        return value
    try:
        return convert(value, annotation)
    except BadValueError as error:
        fix = f"{key}={error.fix}" if error.fix else ""
        found.problem(f"`{key}` takes {error.takes}", seen=str(value), known=error.known, fix=fix, key=key)
        return value


def _refuse_clipping(target: str, key: str, values: Mapping[str, Any], found: Findings) -> None:
    found.problem(
        f"`{key}.max_grad_norm`: {target} cannot clip gradients",
        seen=f"{key}.max_grad_norm={values['max_grad_norm']}",
        known="poptorch.optim.SGD, poptorch.optim.Adam and poptorch.optim.AdamW clip gradients",
        fix=f"{key}._target_=poptorch.optim.AdamW, or remove max_grad_norm",
        key=f"{key}.max_grad_norm",
    )


def _add_loss_scaling(
    config: RunConfig, arguments: Dict[str, Any], described: Optional[Mapping[str, Any]], found: Findings
) -> None:
    scale = config.loss_scaling
    if scale is None:
        return
    if described is None:
        found.problem(
            "`loss_scaling` needs an optimizer from poptorch.optim",
            seen=f"optimizer._target_={config.optimizer.get('_target_')}, loss_scaling={scale}",
            fix="optimizer._target_=poptorch.optim.AdamW",
            key="loss_scaling",
        )
    elif str(scale).strip().lower() == "auto":
        _check_automatic_scaling(config, arguments, found)
    else:
        number = _scale(scale)
        if number is None:
            found.problem(
                "`loss_scaling` takes a number greater than 0, or auto",
                seen=f"loss_scaling={scale}",
                fix="loss_scaling=1024",
                key="loss_scaling",
            )
            return
        before = arguments.get("loss_scaling")
        if before is not None and before != number:
            found.note(f"loss_scaling wins over optimizer.loss_scaling: {number:g}, not {before:g}")
        arguments["loss_scaling"] = number


def _scale(value: Any) -> Optional[float]:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _check_automatic_scaling(config: RunConfig, arguments: Mapping[str, Any], found: Findings) -> None:
    if config.replication.reduction != "mean":
        found.problem(
            "automatic loss scaling needs `replication.reduction=mean`",
            seen=f"loss_scaling=auto, replication.reduction={config.replication.reduction}",
            fix="replication.reduction=mean",
            key="loss_scaling",
        )
    if str(arguments.get("accum_type")) != "torch.float16":
        found.problem(
            "automatic loss scaling needs float16 accumulators",
            seen=f"loss_scaling=auto, optimizer.accum_type={arguments.get('accum_type', 'not set')}",
            fix="optimizer.accum_type=float16",
            key="loss_scaling",
        )


def _marks(
    node: Mapping[str, Any],
    arguments: Mapping[str, Any],
    described: Optional[Mapping[str, Any]],
    schedule: Mapping[str, Any],
    found: Findings,
) -> Tuple[Call, ...]:
    variable, constant = _names(node.get("variable")), _names(node.get("constant"))
    cycled = _cycled_value(node, described, schedule, found)
    if described is None:
        if variable or constant:
            found.problem(
                "`optimizer.variable` and `optimizer.constant` need an optimizer from poptorch.optim",
                seen=f"optimizer._target_={node['_target_']}",
                fix="optimizer._target_=poptorch.optim.SGD",
                key="optimizer.variable" if variable else "optimizer.constant",
            )
        return ()
    groups = described["attribute_groups"]
    allowed = list(dict.fromkeys([*groups["per_group"], *groups["global_variables"]]))
    for key, names in (("variable", variable), ("constant", constant)):
        for name in names:
            if name not in allowed:
                close = nearest(name, allowed, most=1)
                found.problem(
                    f"`optimizer.{key}` lists `{name}`, which PopTorch cannot mark",
                    known=listing(allowed),
                    fix=f"optimizer.{key}=[{close[0]}]" if close else "",
                    key=f"optimizer.{key}",
                )
    for name in variable:
        if name in constant:
            found.problem(
                f"`optimizer` marks `{name}` as both variable and constant", fix="list it once", key="optimizer"
            )
    for name in constant if schedule else ():
        if name in ("lr", cycled):
            found.problem(
                f"`optimizer.constant` lists `{name}`, but `schedule` changes it",
                seen=f"optimizer.constant=[{name}]",
                fix="~schedule" if name == "lr" else "schedule.cycle_momentum=false",
                key="optimizer.constant",
            )
    if "lr" not in arguments and "lr" not in variable and "lr" not in constant:
        variable = ["lr", *variable]  # PopTorch would make a learning rate that was not passed constant
    marks = [Call("variable_attrs.markAsVariable", (name,), origin="optimizer.variable") for name in variable]
    if cycled is not None and cycled not in (*arguments, *variable, *constant):
        marks.append(Call("variable_attrs.markAsVariable", (cycled,), origin="schedule"))
    return tuple(
        marks + [Call("variable_attrs.markAsConstant", (name,), origin="optimizer.constant") for name in constant]
    )


def _cycled_value(
    node: Mapping[str, Any], described: Optional[Mapping[str, Any]], schedule: Mapping[str, Any], found: Findings
) -> Optional[str]:
    """Return the value besides the learning rate that the schedule changes, None if it changes no other."""
    cycling = _cycling_part(schedule, "schedule")
    if cycling is None:
        return None
    target = str(node.get("_target_") or "")
    if described is None:
        if target.rpartition(".")[2] in ("Adam", "AdamW"):
            found.problem(
                f"`{cycling}` changes beta1, which PopTorch compiles in as a constant for {target}",
                seen=f"optimizer._target_={target}",
                fix=f"optimizer._target_={_POPTORCH}{target.rpartition('.')[2]}, or {cycling}.cycle_momentum=false",
                key=cycling,
            )
        return None
    return "betas" if "betas" in described["attribute_groups"]["per_group"] else "momentum"


def _cycling_part(schedule: Any, key: str) -> Optional[str]:
    """Return the key of the scheduler, or of the part of one, that moves the momentum; None if none does."""
    if not isinstance(schedule, Mapping):
        return None
    if schedule.get("_target_") in _CYCLES_MOMENTUM and schedule.get("cycle_momentum", True) is not False:
        return key
    parts = schedule.get("schedulers")
    numbered = enumerate(parts if isinstance(parts, (list, tuple)) else ())
    return next(filter(None, (_cycling_part(part, f"{key}.schedulers.{number}") for number, part in numbered)), None)


def _names(value: Any) -> List[str]:
    if value is None:
        return []
    return [str(name) for name in (value if isinstance(value, (list, tuple)) else [value])]


def _groups(
    groups: Any, target: str, described: Optional[Mapping[str, Any]], found: Findings
) -> Tuple[ParameterGroup, ...]:
    if groups is not None and not isinstance(groups, (list, tuple)):
        fix = "optimizer.groups=[{match: '*.bias', weight_decay: 0.0}]"
        found.problem("`optimizer.groups` takes a list", seen=repr(groups), fix=fix, key="optimizer.groups")
        return ()
    planned = []
    for index, group in enumerate(groups or ()):
        key = f"optimizer.groups.{index}"
        patterns: Sequence[str] = _names(group.get("match")) if isinstance(group, Mapping) else []
        if not patterns:
            found.problem(
                f"`{key}` needs `match`: parameter names or patterns",
                seen=str(group),
                fix="{match: '*.bias', weight_decay: 0.0}",
                key=key,
            )
            continue
        values = {name: value for name, value in group.items() if name != "match" and value is not None}
        if described is not None:
            allowed = described["attribute_groups"]["per_group"]
            for name in [name for name in values if name not in allowed]:
                found.problem(
                    f"`{key}` sets `{name}`, which must be the same for all parameters",
                    seen=f"{name}={values.pop(name)}",
                    known=listing(allowed),
                    fix=f"optimizer.{name}",
                    key=key,
                )
        planned.append(ParameterGroup(tuple(patterns), _arguments(values, target, described, key, found)))
    return tuple(planned)
