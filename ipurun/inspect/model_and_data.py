"""Make the model and the data of a config, and collect the facts that a plan needs. Problems are reported together."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from torch import nn

from ipurun.config.patterns import frozen_until
from ipurun.config.schema import CustomOpsConfig, PipelineConfig, RunConfig
from ipurun.datasets.synthetic import parse_sample
from ipurun.engine import Engine
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.data import (
    can_be_skipped,
    check_data,
    check_sample,
    first_sample,
    is_read_by_position,
    is_stream,
    length_of,
    make_splits,
    notes_of,
    split_for_eval,
)
from ipurun.inspect.facts import Facts, Purpose
from ipurun.inspect.forward_order import trace_forward_order
from ipurun.inspect.loss import check_loss
from ipurun.inspect.metrics import check_metrics, check_monitor
from ipurun.inspect.model import (
    CACHE_NOTE,
    LARGEST_TRIED,
    batch_norms,
    check_forward,
    check_returned_loss,
    count_parameters,
    make_meta_model,
    make_model,
    model_structure,
    stop_caching,
    uses_poptorch,
    written_buffers,
)
from ipurun.inspect.optimizer import check_groups, check_optimizer, check_schedule
from ipurun.inspect.sampling import check_loader, grouped, samples_drawn, seeded
from ipurun.inspect.targets import check_node, locate
from ipurun.inspect.traced_model import TracedModel
from ipurun.moved import moved_paths, new_path

__all__ = [
    "ModelAndData",
    "TraceKey",
    "facts_without_data",
    "inspect",
    "inspect_again",
    "load_custom_ops",
    "make_model_alone",
]

# Keys of `pipeline` whose placement depends on the order in which modules run.
_PLACING_KEYS = ("split", "layers_per_ipu", "embedding_ipu", "head_ipu", "blocks", "stages", "phases", "ipus")


@dataclass(frozen=True)
class TraceKey:
    """What a trace of a model depends on, besides its config keys.

    Args:
        training: Whether it has a backward pass.
        micro_batch_size: Samples.
        module_precision: Precision by module, as text.
        strategy: The strategy that places blocks of the model's own code, as text.
    """

    training: bool
    micro_batch_size: int
    module_precision: str
    strategy: str


@dataclass
class ModelAndData:
    """The user's model and data, and the facts read from them.

    Args:
        model: The model.
        splits: The data by split.
        facts: The facts.
        traces: Traces of the model, kept by what they depend on.
        ordered: The facts with the order in which modules run; None: not traced yet.
    """

    model: nn.Module
    splits: Dict[str, Any]
    facts: Facts
    traces: Dict[TraceKey, TracedModel] = field(default_factory=dict, repr=False)
    ordered: Optional[Facts] = field(default=None, repr=False)


def inspect(config: RunConfig, engine: Engine, purpose: Purpose = Purpose.RUN) -> ModelAndData:
    """Make the model and the data, and read from them what a plan needs.

    Raises:
        ConfigError: With the problems of all targets.
    """
    problems: List[Problem] = []
    model = _checked_model(config, engine, purpose, problems)
    wrong_data = check_data(config.data, engine.module)
    problems += wrong_data
    splits = None if wrong_data else _collect(problems, _make_data, config, engine)
    if splits is not None:
        problems += _check_splits(config, splits)
    if model is not None and splits is not None and not problems and config.loss.name is None:
        problems += check_returned_loss(model, _to_try(splits["train"], purpose), config)
    if problems or model is None or splits is None:
        raise ConfigError(problems)
    facts = _facts(config, engine, model, splits, purpose)
    ordered = _with_order(facts, config, splits) if _order_matters(config, engine, model) else None
    return ModelAndData(model, splits, ordered or facts, ordered=ordered)


def inspect_again(config: RunConfig, engine: Engine, before: RunConfig, inspected: ModelAndData) -> ModelAndData:
    """Inspect another version of a config. The model and the data are made again only if their keys differ.

    Args:
        config: The other version.
        engine: The engine of both.
        before: The config that was inspected.
        inspected: Its model and data. What is traced is kept there for further versions.

    Raises:
        ConfigError: With the problems of all targets.
    """
    if _made_from(config) != _made_from(before):
        return inspect(config, engine, inspected.facts.purpose)
    problems = _check_targets(config, engine) + _group_problems(config, inspected.model)
    if problems:
        raise ConfigError(problems)
    facts = inspected.facts
    if _order_matters(config, engine, inspected.model):
        inspected.ordered = inspected.ordered or _with_order(facts, config, inspected.splits)
        facts = inspected.ordered
    return replace(inspected, facts=replace(facts, train_samples=_train_samples(config, inspected.splits)))


def _made_from(config: RunConfig) -> Tuple[Any, ...]:
    """Return the keys on which the model, the data and their checks depend."""
    return (
        config.engine,
        config.model,
        config.data,
        config.sample,
        config.loss,
        config.loader,
        config.eval,
        config.metrics,
        config.seed,
        config.precision,
        config.custom_ops,
        config.init_from,
        config.init,
        config.freeze,
        config.unfreeze,
    )


def facts_without_data(config: RunConfig, engine: Engine) -> Facts:
    """Read from the model what a plan needs when its data is missing: the facts have no sample counts.

    Raises:
        ConfigError: With the problems of all targets except the data.
    """
    problems: List[Problem] = []
    model = _checked_model(config, engine, Purpose.CHECK, problems)
    if problems or model is None:
        raise ConfigError(problems)
    facts = _facts(config, engine, model, {}, Purpose.CHECK)
    return _with_order(facts, config, {}) if _order_matters(config, engine, model) else facts


def make_model_alone(config: RunConfig, engine: Engine) -> nn.Module:
    """Make the model of a config without its data.

    Raises:
        ConfigError: The model or a custom op is wrong.
    """
    problems = load_custom_ops(config.custom_ops, engine) + _model_problems(config, engine)
    if problems:
        raise ConfigError(problems)
    return _make_model(config, engine, Purpose.RUN)


def _checked_model(config: RunConfig, engine: Engine, purpose: Purpose, problems: List[Problem]) -> Optional[nn.Module]:
    """Check every target except the data and make the model if possible; add what is wrong to the problems."""
    problems += load_custom_ops(config.custom_ops, engine)
    found = _model_problems(config, engine)
    problems += found + _check_targets(config, engine)
    model = None if found else _collect(problems, _make_model, config, engine, purpose)
    if model is not None:
        problems += check_forward(model) + _group_problems(config, model)
    return model


def _to_try(data: Any, purpose: Purpose) -> Any:
    """Return training data from which samples may be taken: a copy of a stream that a run is to read."""
    if purpose is not Purpose.RUN or not is_stream(data):
        return data
    try:
        return copy.deepcopy(data)
    except Exception:  # open files, locks: what a model returns is then found by compiling it
        return ()


def _group_problems(config: RunConfig, model: nn.Module) -> List[Problem]:
    frozen = frozen_until(config.freeze, config.unfreeze, [name for name, _ in model.named_parameters()])
    parameters = [name for name, parameter in model.named_parameters() if parameter.requires_grad or name in frozen]
    return check_groups(config.optimizer, parameters)


def _model_problems(config: RunConfig, engine: Engine) -> List[Problem]:
    if "_target_" in config.model:
        return check_node(config.model, "model", engine.module)
    fix = "model._target_=module.Net, or +recipe=mnist"
    return [Problem("no model: `model._target_` is not set", fix=fix, key="model._target_")]


def _check_targets(config: RunConfig, engine: Engine) -> List[Problem]:
    problems: List[Problem] = []
    problems += check_loss(config.loss, engine.module)
    problems += check_optimizer(config.optimizer, engine.module)
    problems += check_schedule(config.schedule, engine.module)
    problems += check_metrics(config.metrics, engine.module)
    monitors = {"monitor": config.monitor, "checkpoint.best": config.checkpoint.best}
    for key, name in {**monitors, "early_stopping.metric": config.early_stopping.metric}.items():
        if not config.callbacks:  # which may add metrics
            problems += check_monitor(key, name, config.metrics, config.averaging.prefix)
    problems += check_loader(config.loader)
    if config.sample:  # also where the data needs none: the planner may
        _collect(problems, parse_sample, config.sample)
    return problems


def _collect(problems: List[Problem], function: Callable[..., Any], *args: Any) -> Optional[Any]:
    try:
        return function(*args)
    except ConfigError as error:
        problems += error.problems
        return None


def _make_model(config: RunConfig, engine: Engine, purpose: Purpose) -> nn.Module:
    if purpose not in (Purpose.RUN, Purpose.COMPILE):
        empty = make_meta_model(config)
        if count_parameters(empty) > LARGEST_TRIED:
            return empty
    with seeded(config.seed):
        return make_model(config, engine.module)


def _make_data(config: RunConfig, engine: Engine) -> Dict[str, Any]:
    with seeded(config.seed):
        splits = make_splits(config.data, engine.module)
        return splits if check_loader(config.loader) else grouped(splits, config.loader)


def _check_splits(config: RunConfig, splits: Mapping[str, Any]) -> List[Problem]:
    problems = [
        Problem(f"the split `{name}` of the data is empty", seen="0 samples", fix="check `data`", key="data")
        for name, data in splits.items()
        if length_of(data) == 0
    ]
    _collect(problems, split_for_eval, splits, config.eval.split)
    stream = is_stream(splits["train"])
    if stream and (config.loader.sampler or config.loader.batch_sampler):
        problems.append(
            Problem("`loader`: an iterable data set cannot have a sampler", fix="remove loader.sampler", key="loader")
        )
    if config.loader.on_error == "skip" and not can_be_skipped(splits["train"]):
        problems.append(
            Problem(
                "`loader.on_error=skip`: samples of this iterable data set cannot be skipped",
                seen="a generator that has raised an error, or a data pipe, cannot be asked for its next item",
                fix="loader.on_error=raise, and handle the error inside the data set; or give it `read(start, stop)`, "
                "or make it readable by index",
                key="loader.on_error",
            )
        )
    if not stream and config.loader.collate is None:
        with seeded(config.seed):
            problems += check_sample(first_sample(splits["train"]))
    return problems


def _facts(config: RunConfig, engine: Engine, model: nn.Module, splits: Mapping[str, Any], purpose: Purpose) -> Facts:
    cache_notes = (CACHE_NOTE,) if stop_caching(model) else ()
    own_notes = notes_of(*splits.values(), model)
    return Facts(
        engine=engine.kind,
        engine_version=engine.version,
        available_ipus=engine.available_ipus,
        train_samples=_train_samples(config, splits),
        split_samples={name: length_of(data) for name, data in splits.items()},
        eval_split=split_for_eval(splits, config.eval.split) if splits else None,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        written_buffers=written_buffers(model, _indexed(splits), config.loss, config.seed),
        batch_norms=batch_norms(model),
        returns_loss=config.loss.name is None,
        notes=(*own_notes, *_worker_notes(config, splits), *cache_notes, *_moved_notes(config)),
        purpose=purpose,
        **model_structure(model),
    )


def _train_samples(config: RunConfig, splits: Mapping[str, Any]) -> Optional[int]:
    if "train" not in splits:
        return None
    return samples_drawn(config.loader, splits["train"], config.seed, config.micro_batch_size)


def _indexed(splits: Mapping[str, Any]) -> Any:
    """Return the training data if its items can be taken by number."""
    return splits["train"] if "train" in splits and not is_stream(splits["train"]) else None


def _with_order(facts: Facts, config: RunConfig, splits: Mapping[str, Any]) -> Facts:
    """Return the facts with the order in which modules run, which takes a trace of the model."""
    data = _indexed(splits)
    with seeded(config.seed):  # a sample may be drawn at random
        sample = None if data is None else first_sample(data)
    order, failure = trace_forward_order(config, sample)
    facts = replace(facts, notes=(*facts.notes, *_trace_notes(failure)))
    if order is None:
        return facts
    return replace(
        facts,
        calls=tuple(order.calls),
        operations=order.operations,
        user_blocks=(*facts.user_blocks, *order.blocks),
        ended_blocks=tuple(order.ended),
    )


def _order_matters(config: RunConfig, engine: Engine, model: nn.Module) -> bool:
    """Return whether the plan depends on the order in which modules run."""
    places = any(getattr(config.pipeline, key) != getattr(PipelineConfig(), key) for key in _PLACING_KEYS)
    return places or bool(config.inference.split) or uses_poptorch(model, engine.module)


def _trace_notes(failure: str) -> Tuple[str, ...]:
    if not failure:
        return ()
    return (f"blocks are checked in the order in which the modules are defined, because {failure}",)


def _moved_notes(config: RunConfig) -> Tuple[str, ...]:
    paths = dict.fromkeys(moved_paths(asdict(config)))
    return tuple(f"{path} is now {new_path(path)}; the old path works until the next release" for path in paths)


def _worker_notes(config: RunConfig, splits: Mapping[str, Any]) -> Tuple[str, ...]:
    repeating = [data for data in splits.values() if is_stream(data) and not is_read_by_position(data)]
    if config.loader.workers < 2 or not repeating:
        return ()
    return (
        f"each of the {config.loader.workers} workers reads the whole iterable data set; unless the data set divides "
        "itself with torch.utils.data.get_worker_info, samples are repeated; ipurun.datasets.shards.Shared divides any",
    )


def load_custom_ops(config: CustomOpsConfig, engine: Engine) -> List[Problem]:
    """Register custom ops with an engine, before the model that uses them is made.

    Returns:
        The problems of the config, one for each library or op.
    """
    problems: List[Problem] = []
    if engine.kind == "cpu":
        for name, given in config.cpu.items():
            _collect(problems, _register_cpu_op, name, given, engine)
    else:
        for path in config.libraries:
            _collect(problems, _load_library, path)
    return problems


def _load_library(path: str) -> None:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        key = "custom_ops.libraries"
        fix = "build the library, and give its path from the working folder"
        raise ConfigError(f"`{key}` cannot be loaded", seen=str(error), fix=fix, key=key) from error


def _register_cpu_op(name: str, given: Any, engine: Engine) -> None:
    key = f"custom_ops.cpu.{name}"
    domain, _, op = name.rpartition("/")
    if not domain or not op:
        fix = 'custom_ops.cpu={"my.domain/MyOp": module.function}'
        raise ConfigError("`custom_ops.cpu` names ops as DOMAIN/NAME", seen=name, fix=fix, key="custom_ops.cpu")
    functions = {"forward": given} if isinstance(given, str) else given
    if not isinstance(functions, Mapping) or "forward" not in functions or set(functions) - {"forward", "backward"}:
        fix = "module.function, or {forward: module.function, backward: module.function}"
        raise ConfigError(f"`{key}` takes the function that computes the op", seen=repr(given), fix=fix, key=key)
    found = {kind: locate(path, key, engine.module) for kind, path in functions.items()}
    engine.module.ops.register_cpu_implementation(op, domain, found["forward"], found.get("backward"))
