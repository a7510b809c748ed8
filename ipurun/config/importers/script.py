"""Import what a PopTorch program made up to its first compiled model: options, optimizer, blocks, loader and names."""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.config.foreign import translate
from ipurun.config.importers.recipe import Recipe

__all__ = ["import_program"]

_OPTIMIZER_VALUES: Tuple[str, ...] = (
    "lr",
    "weight_decay",
    "momentum",
    "betas",
    "eps",
    "dampening",
    "nesterov",
    "alpha",
    "centered",
)
# What the optimizers have where nothing was passed.
_USUAL: Dict[str, Any] = {
    "momentum": 0.0,
    "betas": [0.9, 0.999],
    "eps": 1e-08,
    "dampening": 0.0,
    "nesterov": False,
    "alpha": 0.99,
}
_USUAL.update({"centered": False, "loss_scaling": 1.0, "max_grad_norm": float("inf"), "bias_correction": True})
_USUAL["use_combined_accum"] = False
_OPTIMIZER_VALUES += ("loss_scaling", "max_grad_norm", "bias_correction", "max_weight_norm", "use_combined_accum")


def import_program(recorded: Any, module: str, blocks: Mapping[str, Optional[int]]) -> Recipe:
    """Return the recipe of a program.

    Args:
        recorded: `ipurun.emulator.exec.RecordedProgram`.
        module: Name under which the program can be imported.
        blocks: Module name -> IPU of the blocks that begin there.
    """
    recipe = Recipe("")
    _set_class(recipe, "model", recorded.model, module)
    if recorded.loaders:
        _set_loader(recipe, recorded.loaders[0], module)
    else:
        recipe.notes.append("data: the program made no poptorch.DataLoader before its first model: write data._target_")
    for path, arguments in recorded.setters:
        _set_option(recipe, path, arguments)
    if recorded.optimizer is not None:
        _set_optimizer(recipe, recorded.optimizer)
    placed = {name: ipu for name, ipu in blocks.items() if ipu is not None}
    if placed:
        recipe.notes.append(
            "blocks that the program begins itself stay in the model: "
            + ", ".join(f"{name} on IPU {ipu}" for name, ipu in placed.items())
        )
    recipe.notes.append(
        "the loss: if forward does not return it, set loss.name; the loop, its printing and its metrics are ipurun's"
    )
    return recipe


def _set_class(recipe: Recipe, key: str, value: Any, module: str) -> None:
    """Set the class of an object, and the arguments of its constructor that are attributes of the same name."""
    kind = type(value)
    if kind.__name__.startswith("Poptorch") and len(kind.__mro__) > 1:  # the class that PopTorch gives a wrapped model
        kind = kind.__mro__[1]
    home = module if kind.__module__ == "__main__" else kind.__module__
    recipe.set(f"{key}._target_", f"{home}.{kind.__qualname__}")
    if "<locals>" in kind.__qualname__:
        recipe.notes.append(f"{key}: {kind.__qualname__} is defined inside a function: move it to the top of a module")
    found, missing = _arguments(kind, value)
    for name, argument in found.items():
        recipe.set(f"{key}.{name}", argument)
    if missing:
        recipe.notes.append(f"{key}: write the arguments {', '.join(missing)} of {kind.__name__} by hand")


def _arguments(kind: type, value: Any) -> Tuple[Dict[str, Any], List[str]]:
    found: Dict[str, Any] = {}
    missing: List[str] = []
    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):
        return {}, []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        own = getattr(value, parameter.name, getattr(value, f"_{parameter.name}", _MISSING))
        is_plain = isinstance(own, (bool, int, float, str))
        if is_plain and own != parameter.default:
            found[parameter.name] = own
        elif parameter.default is inspect.Parameter.empty and not is_plain:
            missing.append(parameter.name)
    return found, missing


_MISSING = object()


def _set_loader(recipe: Recipe, loader: Mapping[str, Any], module: str) -> None:
    _set_class(recipe, "data", loader["dataset"], module)
    recipe.set("micro_batch_size", loader["batch_size"])
    recipe.set("loader.shuffle", bool(loader.get("shuffle")))
    if loader.get("num_workers"):
        recipe.set("loader.workers", loader["num_workers"])
    mode = str(getattr(loader.get("mode"), "name", "Sync"))
    if mode != "Sync":
        recipe.set("loader.mode", {"Async": "async", "AsyncRebatched": "async_rebatched"}[mode])
    if callable(loader.get("collate_fn")):
        function = loader["collate_fn"]
        home = module if function.__module__ == "__main__" else function.__module__
        recipe.set("loader.collate", f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}")


def _set_option(recipe: Recipe, path: str, arguments: Tuple[Any, ...]) -> None:
    name = path.rpartition(".")[2]
    value: Any = arguments[0] if len(arguments) == 1 else list(arguments)
    value = getattr(value, "name", value) if type(value).__module__.startswith("ipurun.emulator") else value
    plain = _plain(value)
    found = None if plain is _MISSING else translate(name, plain)
    if not arguments or plain is _MISSING:
        recipe.notes.append(f"options.{path}({', '.join(map(str, arguments))}): write it by hand")
    elif found is None or found[1] is None:
        recipe.set(f"options.{path}", plain)
    else:
        recipe.set(*found)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _MISSING if any(item is _MISSING for item in items) else items
    return str(value).replace("torch.", "") if str(value).startswith("torch.float") else _MISSING


def _set_optimizer(recipe: Recipe, optimizer: Any) -> None:
    kind = type(optimizer)
    package = "poptorch.optim" if kind.__module__.startswith(("ipurun.emulator", "poptorch")) else "torch.optim"
    recipe.set("optimizer._target_", f"{package}.{kind.__name__}")
    groups = optimizer.param_groups
    for name in _OPTIMIZER_VALUES:
        value = groups[0].get(name, getattr(optimizer, name, None))
        plain = _plain(value)
        is_set = plain is not None and plain is not _MISSING and plain != _USUAL.get(name, _MISSING)
        if is_set and name in inspect.signature(kind).parameters:
            recipe.set(f"optimizer.{name}", plain)
    if len(groups) > 1:
        recipe.notes.append(f"optimizer: {len(groups)} parameter groups: write optimizer.groups by hand")
