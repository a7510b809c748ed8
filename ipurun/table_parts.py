"""Split big tables, embeddings and heads, into layers with a parameter each, so that several IPUs can hold them.

The parts of `wte` are the modules `wte.part0`, `wte.part1` and so on. State dicts have the whole weight under its own
name, so that weights can be loaded with and without the split.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from ipurun.config.patterns import TABLE_WORDS, flat_names, match_modules
from ipurun.errors import ConfigError, Findings, listing

__all__ = ["load_whole_weights", "look_up", "parts_by_table", "split_tables", "tables_by_word"]

_KEY = "memory.serialize"
_FIELDS = ("factor", "mode", "keep_precision")


def look_up(weight: torch.Tensor, first: int, indices: torch.Tensor, padding: Optional[int] = None) -> torch.Tensor:
    """Return the rows that some rows of a table have for indices into all of it; zeros for the others.

    Args:
        weight: Rows of the table.
        first: Number of rows before them.
        indices: Indices into the whole table.
        padding: Index of the row that gets no gradient.
    """
    local = indices - first
    inside = (local >= 0) & (local < weight.shape[0])
    own = padding - first if padding is not None and first <= padding < first + weight.shape[0] else None
    found = functional.embedding(local * inside.to(local.dtype), weight, padding_idx=own)
    return found * inside.unsqueeze(-1).to(found.dtype)


class TablePart(nn.Embedding):
    """Consecutive rows of an embedding, which returns zeros for indices of other rows."""

    first = 0
    padding: Optional[int] = None

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Look up the indices of the whole table that are rows of this part."""
        return look_up(self.weight, self.first, indices, self.padding)


class SplitEmbedding(nn.Embedding):
    """An embedding whose table is divided by rows."""

    ipus: Tuple[int, ...]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # code that reads it gets the whole table
        """The whole table."""
        return torch.cat([part.weight for part in _parts(self)])

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Add up what the parts return."""
        first, *others = _parts(self)
        total = first(indices)
        for part in others:
            total = total + part(indices)
        return total


class SplitLinear(nn.Linear):
    """A linear layer whose weight is divided by output channels."""

    ipus: Tuple[int, ...]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # code that reads it gets the whole weight
        """The whole weight."""
        return torch.cat([part.weight for part in _parts(self)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Join what the parts return."""
        product = torch.cat([part(values) for part in _parts(self)], dim=-1)
        return product if self.bias is None else product + self.bias


def split_tables(model: nn.Module, serialize: Mapping[str, Any]) -> None:
    """Split the layers that `memory.serialize` gives a list of parts on each IPU, and those that share their weights.

    Raises:
        ConfigError: With all problems: a wrong list, no such layer, or a layer that cannot be split.
    """
    written = flat_names(serialize, _FIELDS).items()
    entries = {name: entry for name, entry in written if isinstance(entry, (list, tuple))}
    if not entries:
        return
    found = Findings()
    modules = {name: module for name, module in model.named_modules() if name}
    wanted: Dict[int, Tuple[str, Tuple[int, ...]]] = {}
    tables = tables_by_word(model)
    for pattern, counts in entries.items():
        ipus = _ipus(pattern, counts, found)
        if pattern in TABLE_WORDS and pattern not in tables:
            continue  # the plan has a note
        matched = match_modules(tables.get(pattern, pattern), _KEY, list(modules), found) if ipus else []
        for name in matched:
            if _check_layer(name, modules[name], len(ipus), found):
                _add(wanted, name, modules[name], ipus, found)
    owners: Dict[int, List[str]] = {}
    for name, module in modules.items():
        for own, parameter in module._parameters.items():
            if id(parameter) in wanted and (own != "weight" or _check_layer(name, module, 1, found)):
                owners.setdefault(id(parameter), []).append(name)
    if found.problems:
        raise ConfigError(found.problems)
    for identity, names in owners.items():
        ipus = wanted[identity][1]
        weight: nn.Parameter = modules[names[0]].weight  # type: ignore[assignment]
        parts = _cut(weight, len(ipus))
        for module in {id(modules[name]): modules[name] for name in names}.values():
            _divide(module, parts, ipus)


def tables_by_word(model: nn.Module) -> Dict[str, str]:
    """Return the names of the tables that a model of transformers says it has, by the word of `TABLE_WORDS`.

    A module that is called like a word is meant itself.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: Dict[str, str] = {word: word for word in TABLE_WORDS if word in names.values()}
    for word, method in TABLE_WORDS.items():
        owner = next((module for module in model.modules() if callable(getattr(module, method, None))), None)
        if owner is None or word in found:
            continue
        try:
            table = getattr(owner, method)()
        except NotImplementedError:  # models without words
            continue
        if isinstance(table, (nn.Embedding, nn.Linear)) and id(table) in names:
            found[word] = names[id(table)]
    return found


def parts_by_table(model: nn.Module) -> Dict[str, Tuple[int, ...]]:
    """Return the split layers of a model with the IPU of each part."""
    return {name: module.ipus for name, module in model.named_modules() if isinstance(module, _SPLIT)}


def load_whole_weights(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values, as a state dict names them, into the parts of split layers."""
    names = {f"{name}.weight" for name in parts_by_table(model)}
    model.load_state_dict({name: value for name, value in values.items() if name in names}, strict=False)


def _ipus(pattern: str, counts: Sequence[Any], found: Findings) -> Tuple[int, ...]:
    """Return the IPU of each part: [2, 1] means two parts on IPU 0 and one on IPU 1."""
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts) or not any(
        counts
    ):
        found.problem(
            f"`{_KEY}`: the list of `{pattern}` takes the number of parts on each IPU",
            seen=str(list(counts)),
            fix=f"{_KEY}={{{pattern}: [2, 2]}}",
            key=_KEY,
        )
        return ()
    return tuple(ipu for ipu, count in enumerate(counts) for _ in range(count))


def _check_layer(name: str, module: nn.Module, parts: int, found: Findings) -> bool:
    """Check that a layer can be split."""
    reason = ""
    if type(module) not in (nn.Embedding, nn.Linear):
        reason = f"a {type(module).__name__}"
    elif isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        reason = "an embedding with max_norm or scale_grad_by_freq"
    elif parts > module.weight.shape[0]:  # type: ignore[index]
        reason = f"{module.weight.shape[0]} rows"  # type: ignore[index]
    if reason:
        found.problem(
            f"`{_KEY}`: `{name}` cannot be split over IPUs",
            seen=f"{reason}; {parts} parts",
            known="torch.nn.Embedding, and torch.nn.Linear by output channels; also those that share their weights",
            key=_KEY,
        )
    return not reason


def _add(
    wanted: Dict[int, Tuple[str, Tuple[int, ...]]],
    name: str,
    module: nn.Module,
    ipus: Tuple[int, ...],
    found: Findings,
) -> None:
    other, before = wanted.setdefault(id(module.weight), (name, ipus))
    if before != ipus:
        found.problem(
            f"`{_KEY}`: `{other}` and `{name}` share one weight, but are split differently",
            fix=f"write a list for one of them: {listing([other, name])}",
            key=_KEY,
        )


def _cut(weight: nn.Parameter, parts: int) -> List[nn.Parameter]:
    """Divide a weight by rows; the last parts are a row shorter where the number of rows is not divisible."""
    with torch.no_grad():
        pieces = torch.tensor_split(weight.detach(), parts)
        return [nn.Parameter(piece.clone(), requires_grad=weight.requires_grad) for piece in pieces]


def _divide(module: nn.Module, weights: Sequence[nn.Parameter], ipus: Tuple[int, ...]) -> None:
    """Turn a layer into its parts, in place: other modules may refer to it."""
    is_table = isinstance(module, nn.Embedding)
    del module._parameters["weight"]
    module.__class__ = SplitEmbedding if is_table else SplitLinear
    module.ipus = ipus  # type: ignore[assignment]
    first = 0
    for number, weight in enumerate(weights):
        with torch.device("meta"):  # draws no random numbers
            part = TablePart(*weight.shape) if is_table else nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        part.weight = weight
        if isinstance(part, TablePart):
            part.first, part.padding = first, module.padding_idx  # type: ignore[assignment]
        first += weight.shape[0]
        module.add_module(f"part{number}", part)
    module._register_state_dict_hook(_join_parts)
    module._register_load_state_dict_pre_hook(_SplitWeight([weight.shape[0] for weight in weights]))


def _parts(module: nn.Module) -> List[nn.Module]:
    return [part for name, part in module._modules.items() if name.startswith("part") and part is not None]


def _join_parts(module: nn.Module, state: Dict[str, Any], prefix: str, local_metadata: Any) -> None:
    names = [f"{prefix}part{number}.weight" for number in range(len(_parts(module)))]
    state[f"{prefix}weight"] = torch.cat([state.pop(name).detach() for name in names])


class _SplitWeight:
    """Divides the weight of a state dict that is being loaded."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    def __call__(self, state: Dict[str, Any], prefix: str, *others: Any) -> None:
        weight = state.get(f"{prefix}weight")
        if weight is None or weight.shape[0] != sum(self._rows):
            return  # torch reports what is missing
        del state[f"{prefix}weight"]
        for number, part in enumerate(weight.split(self._rows)):
            state[f"{prefix}part{number}.weight"] = part


_SPLIT = (SplitEmbedding, SplitLinear)
