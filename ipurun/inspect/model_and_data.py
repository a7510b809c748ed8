"""Make the model and the data of a config, and collect the facts that a plan needs. Problems are reported together."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipurun.config.patterns import frozen_until
from ipurun.config.schema import CustomOpsConfig, PipelineConfig, RunConfig
from ipurun.datasets.synthetic import SyntheticData, parse_sample
from ipurun.engine import Engine
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.data import (
    can_be_skipped,
    check_data,
    check_sample,
    check_shapes,
    first_sample,
    is_read_by_position,
    is_stream,
    length_of,
    make_splits,
    notes_of,
    split_for_eval,
)
from ipurun.inspect.facts import Facts, Purpose
from ipurun.inspect.lightning.checks import StepFindings, check_lightning, evaluating_step
from ipurun.inspect.lightning.data import LoaderTraits, Splits, splits_of
from ipurun.inspect.lightning.steps import Steps
from ipurun.inspect.lightning.trainer import is_lightning, overrides
from ipurun.inspect.loss import check_loss
from ipurun.inspect.metrics import check_metrics, check_monitor
from ipurun.inspect.model import (
    CACHE_NOTE,
    LARGEST_TRIED,
    batch_norms,
    check_forward,
    check_returned_loss,
    count_parameters,
    host_randomness,
    make_meta_model,
    make_model,
    model_structure,
    restored,
    stop_caching,
    tried,
    two_samples,
    uses_poptorch,
    written_buffers,
)
from ipurun.inspect.optimizer import check_groups, check_optimizer, check_schedule
from ipurun.inspect.profiles import Profiles
from ipurun.inspect.sampling import check_loader, grouped, make_collate, samples_drawn, seeded
from ipurun.inspect.targets import check_node, locate
from ipurun.inspect.trace import trace_forward_order
from ipurun.inspect.traced_model import TracedModel
from ipurun.moved import moved_paths, new_path
from ipurun.table_parts import parts_by_table

__all__ = [
    "ModelAndData",
    "TraceKey",
    "facts_without_data",
    "inspect",
    "inspect_again",
    "load_custom_ops",
    "make_model_alone",
    "own_collate",
]

# Keys of `pipeline` whose placement depends on the order in which modules run.
_PLACING_KEYS = ("split", "layers_per_ipu", "embedding_ipu", "head_ipu", "blocks", "stages", "phases", "ipus")


@dataclass(frozen=True)
class TraceKey:
    """Key of a model's trace, in addition to its config keys.

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
        profiles: Traces of earlier commands; None if this one is to run, not to plan.
    """

    model: nn.Module
    splits: Dict[str, Any]
    facts: Facts
    traces: Dict[TraceKey, TracedModel] = field(default_factory=dict, repr=False)
    ordered: Optional[Facts] = field(default=None, repr=False)
    profiles: Optional[Profiles] = field(default=None, repr=False)


def inspect(config: RunConfig, engine: Engine, purpose: Purpose = Purpose.RUN) -> ModelAndData:
    """Make the model and the data, and read from them what a plan needs.

    Raises:
        ConfigError: With the problems of all targets.
    """
    problems: List[Problem] = []
    model = _checked_model(config, engine, purpose, problems)
    own_data = "_target_" not in config.data and is_lightning(model) and overrides(model, "train_dataloader")
    wrong_data = [] if own_data else check_data(config.data, engine.module)
    problems += wrong_data
    splits = None if wrong_data else _collect(problems, _make_data, config, engine, model if own_data else None)
    if splits is not None:
        problems += _check_splits(config, splits)
    steps = StepFindings()
    profiles = None
    if model is not None and is_lightning(model):
        steps = check_lightning(model, splits or {}, config, _Trials(config, splits or {}, purpose))
        problems += steps.problems + _monitor_problems(config, steps)
    if model is not None and splits is not None and not problems:
        profiles = _profiles(config, model, splits) if purpose in (Purpose.PLAN, Purpose.CHECK) else None
        problems += [] if is_lightning(model) else _loss_problems(config, model, splits, purpose, profiles)
    if problems or model is None or splits is None:
        raise ConfigError(problems)
    facts = _with_steps(_facts(config, engine, model, splits, purpose), steps, model)
    ordered = _with_order(facts, config, splits, profiles) if _order_matters(config, engine, model) else None
    return ModelAndData(model, splits, ordered or facts, ordered=ordered, profiles=profiles)


class _Trials:
    """Runs a module on two samples of a split, without memory for a large one."""

    def __init__(self, config: RunConfig, splits: Mapping[str, Any], purpose: Purpose) -> None:
        self._config = config
        self._splits = splits
        self._purpose = purpose

    def __call__(self, module: nn.Module, split: str, steps: Steps) -> Optional[Dict[str, Any]]:
        """Return the output, None if the user's code failed, which compiling will report."""
        config = self._config
        try:
            data = _to_try(self._splits[split], self._purpose)
            with seeded(config.seed):
                batch = make_collate(config.loader, own_collate(self._splits, split))(two_samples(data))
            steps.takes_tensor = isinstance(batch, torch.Tensor)
            args, kwargs = as_call(batch)
            with seeded(config.seed), torch.no_grad(), restored(module):
                module.train(split == "train")
                return dict(tried(module, args, kwargs))
        except ConfigError:
            raise
        except Exception:
            return None


def own_collate(splits: Mapping[str, Any], split: str) -> Optional[Callable[[List[Any]], Any]]:
    """Return the collate function of the data's own loader of a split, None if it has none."""
    return splits.collate(split) if isinstance(splits, Splits) else None


def _with_steps(facts: Facts, steps: StepFindings, model: nn.Module) -> Facts:
    """Return the facts with what the steps of a LightningModule add."""
    if not is_lightning(model):
        return facts
    return replace(
        facts,
        notes=(*facts.notes, *steps.notes),
        own_optimizer=steps.optimizer,
        has_own_schedule=steps.has_schedule,
        logged=steps.logged,
        eval_split=facts.eval_split if evaluating_step(model, facts.eval_split) else None,
    )


def _monitor_problems(config: RunConfig, steps: StepFindings) -> List[Problem]:
    """Check the monitored values of a model that logs them, where the trial found which they are."""
    known = {name for kind in ("validation", "test") for name in steps.logged.get(kind, {})}
    if not known or config.callbacks or steps.logs_at_epoch_end:
        return []
    nodes = dict.fromkeys([*known, *(f"{name}_epoch" for name in known)])
    problems: List[Problem] = []
    for key, name in _monitors(config).items():
        problems += check_monitor(key, name, {name: {} for name in nodes}, config.averaging.prefix)
    return problems


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
    logs_itself = is_lightning(inspected.model)
    problems = _check_targets(config, engine, logs_itself) + _group_problems(config, inspected.model)
    if problems:
        raise ConfigError(problems)
    facts = inspected.facts
    if _order_matters(config, engine, inspected.model):
        inspected.ordered = inspected.ordered or _with_order(facts, config, inspected.splits, inspected.profiles)
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
    model = None if found else _collect(problems, _make_model, config, engine, purpose)
    problems += found + _check_targets(config, engine, logs_itself=is_lightning(model))
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


def _monitors(config: RunConfig) -> Dict[str, Optional[str]]:
    return {
        "monitor": config.monitor,
        "checkpoint.best": config.checkpoint.best,
        "early_stopping.metric": config.early_stopping.metric,
    }


def _check_targets(config: RunConfig, engine: Engine, logs_itself: bool = False) -> List[Problem]:
    problems: List[Problem] = []
    problems += check_loss(config.loss, engine.module)
    problems += check_optimizer(config.optimizer, engine.module)
    problems += check_schedule(config.schedule, engine.module)
    problems += check_metrics(config.metrics, engine.module)
    for key, name in _monitors(config).items():
        if not config.callbacks and not logs_itself:  # which may add metrics
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


def _make_data(config: RunConfig, engine: Engine, model: Optional[nn.Module] = None) -> Dict[str, Any]:
    with seeded(config.seed):
        if model is not None:
            return splits_of(model, "model", is_set_up=True)
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
    if not stream:
        with seeded(config.seed):
            sample = first_sample(splits["train"])
            if config.loader.collate is None and own_collate(splits, "train") is None:
                problems += check_sample(sample)
            if not problems:
                collate = make_collate(config.loader, own_collate(splits, "train"))
                problems += check_shapes(splits["train"], sample, collate)
    return problems


def _facts(config: RunConfig, engine: Engine, model: nn.Module, splits: Mapping[str, Any], purpose: Purpose) -> Facts:
    cache_notes = (CACHE_NOTE,) if stop_caching(model) else ()
    own_notes = (*notes_of(*splits.values(), splits, model), *host_randomness(model))
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
        is_synthetic=isinstance(splits.get("train"), SyntheticData),
        **model_structure(model),
    )


def _train_samples(config: RunConfig, splits: Mapping[str, Any]) -> Optional[int]:
    if "train" not in splits:
        return None
    traits: Mapping[str, LoaderTraits] = splits.traits if isinstance(splits, Splits) else {}
    own = traits["train"].sampler if "train" in traits else None
    return samples_drawn(config.loader, splits["train"], config.seed, config.micro_batch_size, own)


def _indexed(splits: Mapping[str, Any]) -> Any:
    """Return the training data if its items can be taken by number."""
    return splits["train"] if "train" in splits and not is_stream(splits["train"]) else None


def _profiles(config: RunConfig, model: nn.Module, splits: Mapping[str, Any]) -> Optional[Profiles]:
    """Return the stored traces of a model; None if the data has no first sample, which planning reports."""
    try:
        return Profiles(config, model, _first_sample(config, splits))
    except Exception:  # the user's data can raise anything
        return None


def _first_sample(config: RunConfig, splits: Mapping[str, Any]) -> Any:
    data = _indexed(splits)
    with seeded(config.seed):  # a sample may be drawn at random
        return None if data is None else first_sample(data)


def _loss_problems(
    config: RunConfig, model: nn.Module, splits: Mapping[str, Any], purpose: Purpose, profiles: Optional[Profiles]
) -> List[Problem]:
    """Return the problem of a model that should return its loss and does not."""
    if config.loss.name is not None or (profiles is not None and profiles.has_loss()):
        return []
    problems = check_returned_loss(model, _to_try(splits["train"], purpose), config, own_collate(splits, "train"))
    if profiles is not None and not problems:
        profiles.keep_loss()
    return problems


def _with_order(
    facts: Facts, config: RunConfig, splits: Mapping[str, Any], profiles: Optional[Profiles] = None
) -> Facts:
    """Return the facts with the order in which modules run, which takes a trace of the model."""
    found = None if profiles is None else profiles.order()
    if found is None:
        found = trace_forward_order(config, _first_sample(config, splits), own_collate(splits, "train"))
        if profiles is not None:
            profiles.keep_order(*found)
    order, failure = found
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
    return places or bool(config.inference.split or parts_by_table(model)) or uses_poptorch(model, engine.module)


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
