"""Export the weights of a run: as safetensors for torch and transformers, or as a checkpoint for Lightning."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, cast

import torch
from torch import nn

from ipurun.errors import ConfigError, RunError, listing, underlying_os_error
from ipurun.files import replacing, write_atomically
from ipurun.inspect.lightning.trainer import call_hook, is_lightning
from ipurun.runs.folder import RunFolder
from ipurun.runs.reload import LoadedModel, load_model

__all__ = ["ExportedWeights", "export_run", "write_safetensors"]

_ENDING = ".safetensors"
_FILE = f"model{_ENDING}"
_CONFIG_FILE = "config.json"
_LIGHTNING_FILE = "model.ckpt"
_LIGHTNING_VERSION = "2.0.0"  # of the form of the file, which later versions read
_ALIGNMENT = 8
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True)
class ExportedWeights:
    """Result of an export.

    Args:
        files: The weights, and the config of transformers where a folder was asked for.
        checkpoint: The checkpoint that the weights are from.
        step: Number of weight updates that produced them.
        tensors: Number of tensors.
        parameters: Number of values.
        size: Bytes of the weights.
        warnings: What looks wrong about them.
    """

    files: Tuple[Path, ...]
    checkpoint: Path
    step: int
    tensors: int
    parameters: int
    size: int
    warnings: Tuple[str, ...]


def export_run(
    folder: RunFolder,
    argv: Sequence[str],
    out: Optional[str] = None,
    checkpoint_file: Optional[str] = None,
    use_best: bool = False,
    half: bool = False,
    progress: Optional[Progress] = None,
    lightning: bool = False,
) -> ExportedWeights:
    """Write the weights of a run to a file, or to a folder that transformers loads.

    Args:
        folder: The run folder.
        argv: Overrides on top of the config that the run stored.
        out: A file that ends in ``.safetensors``, or a folder for transformers; None: a file in the run folder.
        checkpoint_file: A checkpoint of the run; None: the newest one.
        use_best: Take the best checkpoint instead of the newest.
        half: Write floating-point weights in float16.
        progress: Called with the bytes written and their total.
        lightning: Write a checkpoint of Lightning, a ``.ckpt`` file, in place of safetensors.

    Raises:
        ConfigError: Invalid config, place or checkpoint, or a folder for a model that transformers does not have.
        RunError: The weights cannot be written, or do not fit float16.
    """
    if lightning:
        return _export_for_lightning(folder, argv, out, checkpoint_file, use_best, half)
    for_transformers, file = _place(folder, out)
    loaded = load_model(folder, argv, checkpoint_file, use_best)
    document: Optional[Dict[str, Any]] = None
    weights: Mapping[str, torch.Tensor] = _tensors_of(loaded.model.state_dict())
    if for_transformers:
        document, weights = _for_transformers(loaded.model, weights)
        document = {**document, "torch_dtype": "float16" if half else "float32"}
    warnings = _warnings(weights)
    if half:
        weights = _halved(weights)
    metadata = {"format": "pt", "step": str(loaded.step), "run": str(loaded.config.name or "run")}
    made = _make_folder(file.parent) if for_transformers else False
    try:
        size = write_safetensors(file, weights, metadata, progress)
        files = [file]
        if document is not None:
            files.append(file.with_name(_CONFIG_FILE))
            write_atomically(files[-1], json.dumps(document, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        if made and not any(file.parent.iterdir()):
            file.parent.rmdir()
        seen = str(underlying_os_error(error))
        fix = "--out FILE in a writable folder with enough free space"
        raise RunError("the weights could not be written", str(file), seen=seen, fix=fix) from error
    return _report(loaded, files, weights, size, warnings)


def _export_for_lightning(
    folder: RunFolder, argv: Sequence[str], out: Optional[str], checkpoint_file: Optional[str], best: bool, half: bool
) -> ExportedWeights:
    """Write what `LightningModule.load_from_checkpoint` reads: weights and hyperparameters, without optimizer state."""
    file = folder.path / _LIGHTNING_FILE if out is None else Path(out).expanduser()
    if file.is_dir():
        file = file / _LIGHTNING_FILE
    if file.suffix != ".ckpt" or not file.parent.is_dir():
        raise ConfigError(
            f"`{file}` cannot be written", "--out", seen=str(out), fix="--out FILE.ckpt in a folder that exists"
        )
    loaded = load_model(folder, argv, checkpoint_file, best)
    model = loaded.model
    if not is_lightning(model):
        raise ConfigError(
            f"{type(model).__name__} is not a LightningModule",
            "--lightning",
            seen="it has no training_step and configure_optimizers",
            fix=f"leave --lightning out: --out FILE{_ENDING} for plain torch",
        )
    weights = _tensors_of(model.state_dict())
    warnings = _warnings(weights)
    weights = _halved(weights) if half else weights
    hparams = getattr(model, "hparams", None)
    plain = {key: value for key, value in dict(hparams or {}).items() if _is_plain(value)}
    content: Dict[str, Any] = {
        "state_dict": weights,
        "global_step": loaded.step,
        "epoch": 0,
        "pytorch-lightning_version": _LIGHTNING_VERSION,
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": plain,
    }
    call_hook(model, "on_save_checkpoint", "model", content)
    try:
        with replacing(file) as stream:
            torch.save(content, stream)
    except OSError as error:
        seen = str(underlying_os_error(error))
        raise RunError(
            "the weights could not be written", str(file), seen=seen, fix="--out FILE.ckpt elsewhere"
        ) from error
    return _report(loaded, [file], weights, file.stat().st_size, warnings)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], progress: Optional[Progress] = None
) -> int:
    """Write tensors atomically in the safetensors format, and return the size of the file.

    The format: the length of the header in 8 bytes, a header in JSON with type, shape and place of each tensor, then
    their bytes. Tensors that share memory are written once for each name, so that every name can be loaded.

    Raises:
        ConfigError: A tensor has a type that the format does not have.
        OSError: The file cannot be written.
    """
    unknown = {name: str(tensor.dtype) for name, tensor in tensors.items() if tensor.dtype not in _TYPES}
    if unknown:
        seen = ", ".join(f"{name}: {kind}" for name, kind in unknown.items())
        raise ConfigError("safetensors has no such type of tensors", str(path), seen=seen, fix="convert them first")
    # The widest types first, so that every tensor begins at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: Dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    written = 0
    with replacing(path) as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for name in order:
            content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            stream.write(memoryview(content))
            written += content.nbytes
            if progress is not None:
                progress(written, end)
    return 8 + len(text) + end


def _place(folder: RunFolder, out: Optional[str]) -> Tuple[bool, Path]:
    """Return whether the weights are for transformers, and the file to write."""
    if out is None:
        return False, folder.path / _FILE
    path = Path(out).expanduser()
    for_transformers = path.is_dir() or (not path.suffix and not path.exists()) or out.endswith(os.sep)
    if not for_transformers and path.suffix != _ENDING:
        fix = f"--out FILE{_ENDING}, or --out FOLDER for a model that transformers loads"
        raise ConfigError(f"weights cannot be exported as `{path.suffix or path.name}`", "--out", seen=out, fix=fix)
    parent = path.parent if not path.is_dir() else path
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"`{path}` cannot be written", "--out", seen=f"the folder {parent}", fix="--out FILE")
    return for_transformers, path / _FILE if for_transformers else path


def _make_folder(path: Path) -> bool:
    if path.is_dir():
        return False
    path.mkdir()
    return True


def _tensors_of(state: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    others = sorted(name for name, value in state.items() if not isinstance(value, torch.Tensor))
    if others:
        seen = ", ".join(f"{name}: {type(state[name]).__name__}" for name in others)
        fix = "leave such values out of get_extra_state, or use the checkpoint itself"
        raise ConfigError("the model's state has values that are not tensors", seen=seen, fix=fix)
    return dict(state)


def _for_transformers(
    model: nn.Module, weights: Mapping[str, torch.Tensor]
) -> Tuple[Dict[str, Any], Dict[str, torch.Tensor]]:
    """Return the config and the weights of a model as transformers names them."""
    if hasattr(model, "to_transformers"):  # a model of a recipe or of the user's
        return cast(Tuple[Dict[str, Any], Dict[str, torch.Tensor]], cast(Any, model).to_transformers())
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return {**cast(Any, config).to_dict(), "architectures": [type(model).__name__]}, dict(weights)
    raise ConfigError(
        f"{type(model).__name__} is not a model that transformers has",
        "--out",
        seen="neither a `config` of transformers nor a method `to_transformers`",
        fix=f"--out FILE{_ENDING} for plain torch, or let the model return (config, weights) from to_transformers()",
    )


def _warnings(weights: Mapping[str, torch.Tensor]) -> Tuple[str, ...]:
    wrong = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    return (f"values that are not finite in {listing(wrong)}",) if wrong else ()


def _halved(weights: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    made = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    too_large = [
        name
        for name, tensor in made.items()
        if tensor.is_floating_point() and tensor.isinf().sum() > weights[name].isinf().sum()
    ]
    if too_large:
        fix = "leave --half out"
        raise RunError("some weights are too large for float16", seen=listing(too_large), fix=fix)
    return made


def _report(
    loaded: LoadedModel, files: List[Path], weights: Mapping[str, torch.Tensor], size: int, warnings: Tuple[str, ...]
) -> ExportedWeights:
    parameters = sum(tensor.numel() for tensor in weights.values())
    return ExportedWeights(tuple(files), loaded.checkpoint, loaded.step, len(weights), parameters, size, warnings)
