"""Make the model of a config, and read what can be known about it without capturing it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple, Type, Union

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

import ipurun.emulator as emulator
from ipurun.config.patterns import frozen_until
from ipurun.config.schema import LossConfig, RunConfig
from ipurun.emulator.graph import answered_layers
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.batch_items import as_call, map_tensors, pick, split_target
from ipurun.inspect.data import is_stream
from ipurun.inspect.facts import UserBlock
from ipurun.inspect.lightning.trainer import is_lightning, set_up
from ipurun.inspect.sampling import make_collate, seeded
from ipurun.inspect.targets import make
from ipurun.table_parts import parts_by_table, split_tables, tables_by_word

__all__ = [
    "CACHE_NOTE",
    "LARGEST_TRIED",
    "batch_norms",
    "check_forward",
    "check_returned_loss",
    "count_parameters",
    "cut_modules",
    "drops_layers",
    "emptied",
    "host_randomness",
    "make_meta_model",
    "make_model",
    "model_structure",
    "restored",
    "stop_caching",
    "tried",
    "two_samples",
    "user_blocks",
    "uses_poptorch",
    "without_compiler",
    "written_buffers",
]

CACHE_NOTE = "the model's config.use_cache is off: cached keys and values are only needed to generate text"
LARGEST_TRIED = 50_000_000  # parameters; larger models are made and tried without memory
_BLOCK_HOOK = "BlockHook"  # part of the class name of what BeginBlock installs, in PopTorch and in the emulator
_LEGACY_BLOCK = "LegacyBeginBlockFn"


def make_model(config: RunConfig, engine_module: ModuleType) -> nn.Module:
    """Make the model of a config.

    Raises:
        ConfigError: It cannot be made, or is not a module.
    """
    model = make(config.model, "model", engine_module=engine_module)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "`model._target_` did not return a torch.nn.Module",
            seen=f"an object of type {type(model).__name__}",
            fix="model._target_=module.Net, a class or function that makes a module",
            key="model._target_",
        )
    if is_lightning(model):
        set_up(model)
    _separate_embeddings(model)
    split_tables(model, config.memory.serialize)
    freeze(model, config)
    return model


def freeze(model: nn.Module, config: RunConfig) -> None:
    """Freeze the parameters that are never trained: they get no gradient and no optimizer state."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, until in frozen_until(config.freeze, config.unfreeze, list(named)).items():
        if until is None:
            named[name].requires_grad_(False)


def check_forward(model: nn.Module) -> List[Problem]:
    """Return the problem of a model that computes nothing."""
    if type(model).forward is not nn.Module.forward or "forward" in vars(model) or is_lightning(model):
        return []
    name = type(model).__name__
    return [
        Problem(
            f"`model`: {name} has no `forward`",
            seen="torch.nn.Module.forward, which only raises an error",
            fix=f"define forward(self, ...) in {name}: it takes the items of a batch and returns the output",
            key="model._target_",
        )
    ]


def check_returned_loss(
    model: nn.Module, data: Any, config: RunConfig, collate: Optional[Callable[[List[Any]], Any]] = None
) -> List[Problem]:
    """Return the problem of a model without a loss: neither `loss.name` nor its `forward` computes one.

    To find out, the model runs once on two samples, a large one without memory, on the meta device. If that fails in
    the user's code, compiling will report it.

    Args:
        model: The model. Its buffers, its mode and the random states are restored.
        data: A data set to take samples from. A stream is begun: pass a copy of one that is still to be read.
        config: The run; its `loss.name` is not set.
        collate: The collate function of the data's own loader.
    """
    try:
        with seeded(config.seed):
            batch = make_collate(config.loader, collate)(two_samples(data))
        args, kwargs = as_call(batch)
        signature = inspect.signature(model.forward)
    except Exception:  # loading reports it
        return []
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return [_no_loss(f"{type(model).__name__}.forward{signature}, called with all items of a batch: {error}")]
    try:
        with seeded(config.seed), torch.no_grad(), restored(model):
            model.train()
            output = tried(model, args, kwargs)
    except Exception:  # any error of the user's code: compiling will report it
        return []
    try:
        found = pick(output, config.loss.output, loss=True)
    except ConfigError as error:
        named = config.loss.output is not None
        return [problem if named else _no_loss(problem.what) for problem in error.problems]
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        kind = str(found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
        return [_no_loss(f"what forward returns last has the type {kind}")]
    if config.loss.output is None and found.dim() > 1:
        unreduced = ", or loss.output=0 if its mean is the loss" if found is output else ""
        return [_no_loss(f"forward returns a tensor of shape {list(found.shape)} where its loss should be", unreduced)]
    return []


def two_samples(data: Any) -> List[Any]:
    """Return two samples of a data set to try a model on."""
    if not is_stream(data):
        return [data[index % len(data)] for index in range(2)]
    items = iter(data)
    if items is data:
        raise TypeError("an iterator cannot be begun without using it up")
    return [next(items)] * 2


def tried(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a model returns; a large one, or one without values, gets tensors without values."""
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if not is_empty and count_parameters(model) <= LARGEST_TRIED:
        return model(*args, **kwargs)
    args, kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with without_compiler(), torch.device("meta"), answered_layers(model):
        return torch.func.functional_call(model, map_tensors(lambda value: value.to("meta"), state), args, kwargs)


def _no_loss(seen: str, otherwise: str = "") -> Problem:
    return Problem(
        "the model has no loss: `loss.name` is not set, and forward does not return one",
        seen=seen,
        fix="loss.name=CrossEntropyLoss (or another loss of the output and the target), or return (output, loss) from "
        f"forward, which then takes the target, too{otherwise}",
        key="loss.name",
    )


def make_meta_model(config: RunConfig) -> nn.Module:
    """Make the model of a config on the meta device: shapes without memory, whatever its size.

    A model whose constructor reads values cannot be made there. It is made on the host and then emptied.

    Raises:
        ConfigError: It cannot be made, or is not a module.
    """
    try:
        with without_compiler(), torch.device("meta"), _WithoutValues():
            return make_model(config, emulator)
    except ConfigError:
        return emptied(make_model(config, emulator))


def emptied(model: nn.Module) -> nn.Module:
    """Move a model to the meta device. Shared weights stay shared, unlike with `Module.to`."""
    moved: Dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = moved[id(tensor)]
    return model


class _WithoutValues(TorchFunctionMode):
    """Mode that skips initialising tensors without memory, which dominates the time for large models."""

    _setters = frozenset(
        [
            *(function for name, function in vars(nn.init).items() if name.endswith("_") and callable(function)),
            *(getattr(torch.Tensor, name) for name in ("normal_", "uniform_", "zero_", "fill_", "clamp_", "erfinv_")),
        ]
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args else kwargs.get("tensor")
        if func in self._setters and isinstance(given, torch.Tensor) and given.is_meta:
            return given
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch from loading its compiler, which takes more than a second, to run operations without values.

    Torch's kernels for the meta device ask `torch._dynamo` once not to compile them. Anything else that is asked of the
    stand-in loads the compiler after all.
    """
    name = "torch._dynamo"
    if name in sys.modules or not hasattr(torch, "_check_with"):
        yield
        return
    stand_in = ModuleType(name)

    def leave() -> None:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo

    def load(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        leave()
        return getattr(importlib.import_module(name), attribute)

    stand_in.disable = lambda function=None, *args, **kwargs: function  # type: ignore[attr-defined]  # a new module
    stand_in.__getattr__ = load  # type: ignore[method-assign]  # of a module, not of its class
    sys.modules[name] = torch._dynamo = stand_in
    check = torch._check_with  # loads sympy to find out that a condition is not symbolic
    torch._check_with = _check_plainly
    try:
        yield
    finally:
        torch._check_with = check
        leave()


def _check_plainly(error_type: Type[Exception], condition: Any, message: Any = None) -> None:
    if not condition:
        raise error_type(message() if callable(message) else "Expected cond to be True, but got False")


def count_parameters(model: nn.Module) -> int:
    """Return the number of values in all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def cut_modules(model: nn.Module) -> FrozenSet[str]:
    """Return the modules at which a block may begin: those that are called (unlike a ModuleList) and have parameters
    (unlike a dropout inside a layer).
    """
    return frozenset(
        name
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None
    )


def model_structure(model: nn.Module) -> Dict[str, Any]:
    """Return the fields of `Facts` that can be read off a model on any device without running it."""
    names: Dict[int, List[str]] = {}
    shapes: Dict[str, Tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[name] = tuple(parameter.shape)
    return {
        "module_names": tuple(name for name, _ in model.named_modules() if name),
        "module_kinds": {name: type(module).__name__ for name, module in model.named_modules()},
        "parameter_shapes": shapes,
        "buffer_bytes": _buffer_bytes(model),
        "shared_parameters": tuple(tuple(several) for several in names.values() if len(several) > 1),
        "user_blocks": tuple(user_blocks(model)),
        "table_parts": parts_by_table(model),
        "tables": tables_by_word(model),
    }


def _buffer_bytes(model: nn.Module) -> int:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {f"{table}.weight" for table in parts_by_table(model)}
    others = [value for name, value in model.state_dict().items() if name not in names]
    return sum(value.numel() * value.element_size() for value in others if isinstance(value, torch.Tensor))


def user_blocks(model: nn.Module) -> List[UserBlock]:
    """Return the blocks that the model's code begins at modules with ``poptorch.BeginBlock``."""
    blocks = []
    for name, module in model.named_modules():
        marks: List[Any] = [hook for hook in module._forward_pre_hooks.values() if _BLOCK_HOOK in type(hook).__name__]
        marks += [module] if type(module).__name__ == _LEGACY_BLOCK else []  # it has the same fields
        for mark in marks:
            blocks.append(UserBlock(name, getattr(mark, "_ipu_id", None), getattr(mark, "_user_id", None)))
    return blocks


def uses_poptorch(model: nn.Module, engine_module: ModuleType) -> bool:
    """Return whether a file that defines a class of the model imports PopTorch, so that `forward` may begin blocks."""
    # A model may have imported another PopTorch than the engine: the real one, on a host that has it.
    poptorches = {id(module): module for module in (engine_module, emulator, sys.modules.get("poptorch")) if module}
    names = ("Block", "BeginBlock", "BlockFunction")
    own = {*poptorches, *(id(getattr(module, name, None)) for module in poptorches.values() for name in names)}
    files: Set[str] = {type(module).__module__ for module in model.modules()}
    return any(
        id(value) in own
        for file in files
        if not file.startswith("torch.") and file in sys.modules
        for value in vars(sys.modules[file]).values()
        if value is not None
    )


def stop_caching(model: nn.Module) -> bool:
    """Set `config.use_cache` of a model and its parts to False; return whether it was on anywhere.

    With it, models of transformers make every layer keep its keys and values for the next token. Such a cache grows
    from a tensor without elements, which no IPU takes, and would come back to the host with every output.
    """
    configs: List[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    return bool(caching)


def _separate_embeddings(model: nn.Module) -> None:
    """Give the decoder of a transformers model an embedding module of its own, with the encoder's weight.

    Up to transformers 4, T5 and BART call one module in both. On an IPU a module has one place in a pipeline; two
    modules with one weight compute the same and can each have one.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    seen: Set[int] = set()
    for module in list(model.modules()):
        inner = module._modules.get("embed_tokens")
        if not isinstance(inner, nn.Embedding) or id(inner) not in seen:
            seen.add(id(inner))
            continue
        own = copy.copy(inner)
        # Hooks and parameters added later belong to one of them; the tensors are shared.
        vars(own).update({name: copy.copy(held) for name, held in vars(inner).items() if isinstance(held, dict)})
        module._modules["embed_tokens"] = own


def drops_layers(model: nn.Module) -> bool:
    """Return whether a model of transformers may skip layers at random, as its speech models do."""
    return any(
        hasattr(module, "layerdrop") or hasattr(getattr(module, "config", None), "layerdrop")
        for module in model.modules()
    )


def host_randomness(model: nn.Module) -> Tuple[str, ...]:
    """Return notes on what models of transformers draw on the host, which would be the same at every step."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    shares = [
        getattr(module, "layerdrop", 0) or getattr(config, "layerdrop", 0) or getattr(config, "encoder_layerdrop", 0)
        for module, config in zip(model.modules(), configs)
    ]
    notes = []
    if any(isinstance(share, float) and share > 0 for share in shares):
        notes.append("the model's layerdrop is off: which layers run is compiled in")
    if any(getattr(config, "apply_spec_augment", False) and getattr(config, "mask_time_prob", 0) for config in configs):
        notes.append(
            "the model draws the masks of SpecAugment on the host, so that one mask is compiled in for all steps: set "
            "apply_spec_augment: false in its config, and mask in the data set"
        )
    return tuple(notes)


def batch_norms(model: nn.Module) -> int:
    """Return the number of batch norm layers with running statistics."""
    return sum(module.running_mean is not None for module in model.modules() if isinstance(module, _BatchNorm))


def written_buffers(model: nn.Module, data: Any, loss: LossConfig, seed: int) -> Tuple[str, ...]:
    """Return the names of the floating-point buffers that a forward pass in training mode writes to in place.

    Batch norm does not count: on an IPU, its statistics are outputs of the operation. Nor do integer buffers, which
    are constants there. Tracked statistics of instance norm are known by name. To find other buffers, the model runs
    once on two samples. If that fails, none are reported, and the engine's own check at compile time remains.

    Args:
        model: The model. Its buffers, its mode and the random states are restored.
        data: A map-style data set to take two samples from, or None.
        loss: Names the item of a sample that is the target.
        seed: Seed of the trial.
    """
    floats = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    written = set(_running_statistics(model, _InstanceNorm))
    known = written.union(_running_statistics(model, _BatchNorm))
    if data is not None and not known.issuperset(floats):
        written |= _written_in_trial(model, data, loss, seed)
    return tuple(name for name in floats if name in written)


def _running_statistics(model: nn.Module, kind: Type[Union[_BatchNorm, _InstanceNorm]]) -> List[str]:
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, kind) and module.running_mean is not None:
            names += [f"{prefix}.{name}" if prefix else name for name in ("running_mean", "running_var")]
    return names


class _WrittenMemory(TorchDispatchMode):
    """Collects the addresses of the tensors that operations declare to write, other than those of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: Set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if "batch_norm" not in schema.name:
            given = {**{item.name: value for item, value in zip(schema.arguments, args)}, **(kwargs or {})}
            for item in schema.arguments:
                tensor = given.get(item.name)
                if item.alias_info is not None and item.alias_info.is_write and isinstance(tensor, torch.Tensor):
                    self.addresses.add(tensor.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def _written_in_trial(model: nn.Module, data: Any, loss: LossConfig, seed: int) -> set:
    before: Dict[str, torch.Tensor] = dict(model.named_buffers())
    try:
        with seeded(seed), torch.no_grad(), restored(model):
            batch = default_collate([data[index % len(data)] for index in range(2)])
            args, kwargs = as_call(batch)
            if loss.name is not None:
                args, kwargs, _ = split_target(args, kwargs, loss.target)
            model.train()
            with _WrittenMemory() as written:
                model(*args, **kwargs)
            return {
                name
                for name, buffer in model.named_buffers()
                if buffer is not before.get(name) or buffer.untyped_storage().data_ptr() in written.addresses
            }
    except Exception:  # any error of the user's code: compiling will report it
        return set()


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and the mode of a model afterwards."""
    before: Dict[str, torch.Tensor] = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for name, buffer in before.items():
            prefix, _, own = name.rpartition(".")
            with torch.no_grad():
                buffer.copy_(values[name])
            model.get_submodule(prefix)._buffers[own] = buffer
        for module, mode in modes.items():
            module.training = mode
