"""Traces of models, and measured speeds of loading data, kept on disk by config for further plans.

A profile is used only if nothing has changed that it depends on: the config keys of model, loss and precision, the
shapes of a sample, the parameters, torch, the files that define the model's classes, and every other module outside of
installed packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

import torch
from torch import nn

from ipurun.config.schema import RunConfig
from ipurun.executables import cache_root
from ipurun.files import write_atomically
from ipurun.inspect.batch_items import map_tensors
from ipurun.inspect.facts import EndedBlock, LoadingRate, ModuleCall, UserBlock
from ipurun.inspect.trace import ForwardOrder
from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter

__all__ = ["Profiles", "keep_loading_rate", "stored_loading_rate"]

_Result = TypeVar("_Result")
_MOST_FILES = 256
_PACKAGE = Path(__file__).resolve().parents[1]
_OWN_FILES = ("estimate", "inspect", "planning", os.path.join("emulator", "_capture"), os.path.join("emulator", "_ops"))


# Keys of a data set that say how much there is or which values it has, not how it is loaded.
_AMOUNTS = ("train_samples", "eval_samples", "test_samples", "predict_samples", "seed")


def stored_loading_rate(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Optional[LoadingRate]:
    """Return the last measurement of a run's data set and collate function on this host; None if there is none."""
    try:
        found = json.loads(_loading_path(config, environ).read_text(encoding="utf-8"))
        rate = LoadingRate(
            samples_per_second=float(found["samples_per_second"]),
            cpus=int(found["cpus"]),
            day=str(found["day"]),
            core_seconds=float(found["core_seconds"]),
            has_ipus=bool(found["has_ipus"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rate if min(rate.samples_per_second, rate.cpus, rate.core_seconds) > 0 else None


def keep_loading_rate(config: RunConfig, rate: LoadingRate, environ: Mapping[str, str] = os.environ) -> None:
    """Store a measurement. A folder that cannot be written is ignored."""
    path = _loading_path(config, environ)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dataclasses.asdict(rate)))


def _loading_path(config: RunConfig, environ: Mapping[str, str]) -> Path:
    data = {key: value for key, value in dict(config.data).items() if key not in _AMOUNTS}
    loader = (config.loader.collate, config.loader.collate_args, config.loader.on_error)
    about = (platform.node(), sys.version_info[:2], torch.__version__, data, config.sample, loader)
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:32]
    return Path(cache_root(environ)) / "loading" / f"{name}.json"


class Profiles:
    """The stored traces of one model on one kind of sample. A folder that cannot be read or written is ignored.

    Args:
        config: The run.
        model: Its model, with or without values.
        sample: One item of the data; None if it cannot be taken.
        environ: Environment variables, which name the folder.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, sample: Any, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._folder = Path(cache_root(environ)) / "profiles"
        self._about = (config, model, sample)
        self._fingerprint = ""

    def trace(self, *what: object) -> Optional[TracedModel]:
        """Return the stored trace of the model under some conditions."""
        return self._read("trace", what, _traced_model)

    def keep_trace(self, traced: TracedModel, *what: object) -> None:
        """Store a trace."""
        self._write("trace", what, _document(traced))

    def order(self) -> Optional[Tuple[Optional[ForwardOrder], str]]:
        """Return the stored forward order, or None in its place and the reason why there is none."""
        return self._read("order", (), _forward_order)

    def keep_order(self, order: Optional[ForwardOrder], reason: str) -> None:
        """Store a forward order."""
        plain: Optional[Dict[str, Any]] = None
        if order is not None:
            plain = {
                "calls": [(call.module, call.operations) for call in order.calls],
                "operations": order.operations,
                "blocks": [dataclasses.asdict(block) for block in order.blocks],
                "ended": [dataclasses.asdict(block) for block in order.ended],
            }
        self._write("order", (), {"order": plain, "reason": reason})

    def suggestions(self, *what: object) -> Optional[List[Tuple[str, Tuple[str, ...]]]]:
        """Return the stored titles and overrides of changes that helped, for an estimate under some conditions."""
        return self._read("suggestions", what, lambda found: [(t, tuple(words)) for t, words in found["suggestions"]])

    def keep_suggestions(self, suggestions: Sequence[Tuple[str, Sequence[str]]], *what: object) -> None:
        """Store changes that help."""
        self._write("suggestions", what, {"suggestions": [[title, list(words)] for title, words in suggestions]})

    def has_loss(self) -> bool:
        """Return whether the model is known to return its loss."""
        return self._read("loss", (), lambda found: found["has_loss"]) is True

    def keep_loss(self) -> None:
        """Store that the model returns its loss."""
        self._write("loss", (), {"has_loss": True})

    def _path(self, kind: str, what: Sequence[object]) -> Path:
        self._fingerprint = self._fingerprint or _fingerprint(*self._about)
        name = hashlib.sha256(repr((self._fingerprint, kind, what)).encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"

    def _read(self, kind: str, what: Sequence[object], understood: Callable[[Any], _Result]) -> Optional[_Result]:
        """Return what a file holds; None if there is none, or it is not what this version of ipurun writes."""
        try:
            path = self._path(kind, what)
            found = understood(json.loads(path.read_text(encoding="utf-8")))
            os.utime(path)  # the files that were not used for longest are deleted first
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found

    def _write(self, kind: str, what: Sequence[object], document: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(kind, what), json.dumps(document))
            files = list(self._folder.glob("*.json"))
            for path in sorted(files, key=lambda path: path.stat().st_mtime)[: max(0, len(files) - _MOST_FILES)]:
                path.unlink()


_OP_FIELDS = tuple(field.name for field in dataclasses.fields(TracedOp))
_PARAMETER_FIELDS = tuple(field.name for field in dataclasses.fields(TracedParameter))


def _document(traced: TracedModel) -> Dict[str, Any]:
    """Return a traced model as rows: most operations of a model are equal to others but for a few fields."""
    plain = {field.name: getattr(traced, field.name) for field in dataclasses.fields(traced)}
    plain["ops"] = [[getattr(op, name) for name in _OP_FIELDS] for op in traced.ops]
    plain["parameters"] = [[getattr(item, name) for name in _PARAMETER_FIELDS] for item in traced.parameters]
    return {"fields": [_OP_FIELDS, _PARAMETER_FIELDS], "traced": plain}


def _traced_model(document: Mapping[str, Any]) -> Optional[TracedModel]:
    if document.get("fields") != [list(_OP_FIELDS), list(_PARAMETER_FIELDS)]:
        return None
    plain = dict(document["traced"])
    plain["ops"] = tuple(TracedOp(*_row(row)) for row in plain["ops"])
    plain["parameters"] = tuple(TracedParameter(*_row(row)) for row in plain["parameters"])
    fields: Dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    return TracedModel(**fields)


def _forward_order(document: Mapping[str, Any]) -> Tuple[Optional[ForwardOrder], str]:
    order = document["order"]
    if order is None:
        return None, document["reason"]
    found = ForwardOrder(
        [ModuleCall(*call) for call in order["calls"]],
        order["operations"],
        [UserBlock(**block) for block in order["blocks"]],
        [EndedBlock(**block) for block in order["ended"]],
    )
    return found, document["reason"]


def _row(row: List[Any]) -> List[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in row]


def _fingerprint(config: RunConfig, model: nn.Module, sample: Any) -> str:
    about: List[object] = [
        torch.__version__,
        sys.version_info[:2],
        config.model,
        config.loss,
        config.precision,
        config.freeze,
        config.unfreeze,
        config.sample,
        (config.loader.collate, config.loader.collate_args),
        config.custom_ops,
        config.seed,
        _shapes(sample),
        [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()],
        [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()],
        sorted(_files(model)),
    ]
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _shapes(sample: Any) -> str:
    return repr(map_tensors(lambda tensor: (tuple(tensor.shape), str(tensor.dtype)), sample))


def _files(model: nn.Module) -> Iterator[Tuple[str, int, int]]:
    """Yield the path, the time and the size of every file that a trace may depend on."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    classes = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    paths = {str(path) for folder in _OWN_FILES for path in (_PACKAGE / folder).glob("*.py")}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or (name.startswith("torch.") and name not in classes):
            continue
        is_own = (
            name != "__main__"
            and not path.startswith(installed)
            and "site-packages" not in path
            and not name.startswith("ipurun.")
        )
        if name in classes or is_own:
            paths.add(path)
    for path in paths:
        with contextlib.suppress(OSError):
            about = os.stat(path)
            yield path, about.st_mtime_ns, about.st_size
