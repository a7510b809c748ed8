"""Import what a PopTorch program made up to its first compiled model: options, optimizer, blocks, loader and names."""

from __future__ import annotations

import ast
import inspect
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.config.foreign import translate
from ipurun.config.importers.recipe import Recipe

__all__ = ["import_program", "lightning_words"]

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
_ACCUM_TYPES = tuple(
    f"{name}accum_type" for name in ("", "velocity_", "first_order_momentum_", "second_order_momentum_")
)
_OPTIMIZER_VALUES += _ACCUM_TYPES
_USUAL.update(dict.fromkeys(_ACCUM_TYPES, "float32"))


def import_program(recorded: Any, module: str, blocks: Mapping[str, Optional[int]], is_guarded: bool = True) -> Recipe:
    """Return the recipe of a program.

    Args:
        recorded: `ipurun.emulator.exec.RecordedProgram`.
        module: Name under which the program can be imported.
        blocks: Module name -> IPU of the blocks that begin there.
        is_guarded: Whether the program can be imported without being run.
    """
    recipe = Recipe("")
    if not is_guarded:
        recipe.notes.append(
            f"{module}.py trains when it is imported: put all but its classes and functions below if __name__ == "
            '"__main__":, or move them to a module of their own'
        )
    _set_class(recipe, "model", recorded.model, module)
    if any(str(parameter.dtype) == "torch.float16" for parameter in recorded.model.parameters()):
        recipe.set("precision", "16.16")
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
    """Set the class of an object and the arguments of its constructor, read from attributes of the same name."""
    missing: List[str] = []
    recipe.keys[key] = _node(value, module, missing)
    kind = _kind(value)
    if "<locals>" in kind.__qualname__:
        recipe.notes.append(f"{key}: {kind.__qualname__} is defined inside a function: move it to the top of a module")
    if missing:
        recipe.notes.append(f"{key}: write by hand what no attribute of the same name keeps: {', '.join(missing)}")


def _kind(value: Any) -> type:
    kind = type(value)
    is_wrapped = kind.__name__.startswith("Poptorch") and len(kind.__mro__) > 1  # by PopTorch, around the model's class
    return kind.__mro__[1] if is_wrapped else kind


def _node(value: Any, module: str, missing: List[str]) -> Dict[str, Any]:
    """Return an object as a node with `_target_`; objects among its arguments become nodes, too.

    Args:
        value: The object.
        module: Name under which the program can be imported.
        missing: Receives the arguments that could not be read.
    """
    kind = _kind(value)
    home = module if kind.__module__ == "__main__" else kind.__module__
    node: Dict[str, Any] = {"_target_": f"{home}.{kind.__qualname__}"}
    try:
        # Of the constructor itself: in Python 3.8 a data set's class has the signature of Generic.__new__.
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    except (TypeError, ValueError):
        return node
    for parameter in parameters:
        own = getattr(value, parameter.name, getattr(value, f"_{parameter.name}", _MISSING))
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if own is not _MISSING and own:
                missing.append(f"{parameter.name} of {kind.__name__}")
            continue
        if inspect.ismethod(own) and own.__self__ is value:  # `download` of torchvision's data sets
            own = _MISSING
        if own is _MISSING and parameter.default is not inspect.Parameter.empty:
            continue
        if isinstance(parameter.default, bool) and (own is None or _is_tensor(own)):
            own = own is not None  # `bias` of torch.nn's modules is the weight itself, or None
        is_other = parameter.annotation in _PLAIN_TYPES and not isinstance(own, (bool, int, float, str))
        made = _MISSING if is_other else _argument(own, module, missing)
        if made is _MISSING:
            missing.append(f"{parameter.name} of {kind.__name__}")
        elif own is not parameter.default and not _is_default(own, parameter.default):
            node[parameter.name] = made
    return node


def _is_tensor(value: Any) -> bool:
    return any((kind.__module__, kind.__name__) == ("torch", "Tensor") for kind in type(value).__mro__)


def _is_default(own: Any, default: Any) -> bool:
    return isinstance(own, (bool, int, float, str)) and type(own) is type(default) and own == default


def _argument(value: Any, module: str, missing: List[str]) -> Any:
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return {"_target_": "hydra.utils.get_object", "path": str(value)}
    plain = _plain(value) if value is not _MISSING else _MISSING
    if plain is not _MISSING or value is _MISSING:
        return plain
    if isinstance(value, (list, tuple)):
        items = [_argument(item, module, missing) for item in value]
        return _MISSING if any(item is _MISSING for item in items) else items
    kind = _kind(value)
    is_data = kind.__module__ == "builtins" or isinstance(value, type) or _is_tensor(value) or inspect.isroutine(value)
    return _MISSING if is_data or "<locals>" in kind.__qualname__ else _node(value, module, missing)


_MISSING = object()
_PLAIN_TYPES = (bool, int, float, str, "bool", "int", "float", "str")


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
    if name == "setExecutionStrategy" and _set_strategy(recipe, arguments[0]):
        return
    if path == "_Popart.set" and len(arguments) == 2:
        given = recipe.keys.get("options", {}).get("_Popart", {}).get("set", {})
        recipe.set("options._Popart.set", {**given, arguments[0]: _plain(arguments[1])})
        return
    value: Any = arguments[0] if len(arguments) == 1 else list(arguments)
    value = getattr(value, "name", value) if type(value).__module__.startswith("ipurun.emulator") else value
    plain = _location(value) if type(value).__name__ == "TensorLocationSettings" else _plain(value)
    found = None if plain is _MISSING else translate(name, plain)
    if not arguments or plain is _MISSING:
        recipe.notes.append(f"options.{path}({', '.join(map(str, arguments))}): write it by hand")
    elif found is None or found[1] is None:
        recipe.set(f"options.{path}", plain)
    else:
        recipe.set(*found)


def _location(settings: Any) -> Dict[str, Any]:
    """Return a TensorLocationSettings as the setters that were called on it."""
    values = dict(settings._values)
    return {_LOCATIONS.get(name, name): bool(value) if name in _SWITCHES else value for name, value in values.items()}


_LOCATIONS = {"onChip": "useOnChipStorage"}
_SWITCHES = ("onChip", "useReplicatedTensorSharding", "useIOTilesToLoad", "useIOTilesToStore")


def _set_strategy(recipe: Recipe, strategy: Any) -> bool:
    """Take over a pipelined or sharded strategy with its stages; return False for any other."""
    word = {"PipelinedExecution": "pipelined", "ShardedExecution": "sharded"}.get(type(strategy).__name__)
    if word is None:
        return False
    stages: List[Any] = []
    for stage in strategy._block_map.values():
        if stage not in stages:
            stages.append(stage)
    recipe.set("pipeline.strategy", word)
    if stages:
        listed = [{"blocks": list(stage.blocks), "ipu": stage._ipu} for stage in stages]
        recipe.set("pipeline.stages", [entry if entry["ipu"] is not None else entry["blocks"] for entry in listed])
    return True


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


def lightning_words(source: str, module: str) -> Optional[List[str]]:
    """Return the words that train what a program trains with Lightning's Trainer, None for other programs.

    Args:
        source: The program's text, which is not run: Lightning would train.
        module: Name under which it can be imported.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    called = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    last = {_dotted(function).rpartition(".")[2] for function in called}
    if "lightning" not in source or "Trainer" not in last or last.intersection(("trainingModel", "inferenceModel")):
        return None
    bases = {
        node.name: [_dotted(base).rpartition(".")[2] for base in node.bases]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    words = []
    for key, kind in (("model", "LightningModule"), ("data", "LightningDataModule")):
        own = next((name for name, parents in bases.items() if kind in parents), None)
        words.append(f"{key}._target_={f'{module}.{own}' if own else f'MODULE.{kind}'}")
    for function, call in called.items():
        if _dotted(function).rpartition(".")[2] == "Trainer":
            words += filter(None, map(_translated, call.keywords))
    return words


def _dotted(node: Any) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _translated(keyword: ast.keyword) -> str:
    """Return an argument of the Trainer as a word of the command line, if its value is written there."""
    name, value = keyword.arg or "", getattr(keyword.value, "value", None)
    if name in ("devices", "precision", "max_steps") and isinstance(value, (int, str)):
        return f"{name}={value}"
    found = None if value is None or value is False else translate(name, value)
    return "" if found is None or found[1] is None else f"{found[0]}={found[1]}"
