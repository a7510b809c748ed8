"""Text of a tensor as ipu_print_tensor shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, List, Sequence

import torch

_ELLIPSIS = "..."
_LARGEST_FIXED = 1e4
_SMALLEST_FIXED = 1e-4


@dataclass(frozen=True)
class PrintFormat:
    """How values are laid out.

    Args:
        summarise_threshold: Tensors of more elements show only their edges.
        edge_items: Items at each edge of a summarised dimension.
        max_line_width: Width past which a row continues on the next line.
        digits: Significant digits.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: Text between the items of a row.
        open_bracket: Text before a row.
        close_bracket: Text after a row.
    """

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"

    def text(self, title: str, tensor: torch.Tensor) -> str:
        """Returns the title and the values of `tensor`."""
        summarised = tensor.numel() > self.summarise_threshold
        return f"{title}: " + "\n".join(self._lines(tensor, self._number_format(tensor), 0, summarised))

    def _number_format(self, tensor: torch.Tensor) -> Callable[[object], str]:
        if not tensor.is_floating_point():
            return lambda value: str(int(value))  # type: ignore[call-overload]  # int() of a tensor element
        decimals = max(self.digits - 1, 0)
        magnitudes = tensor.detach().to(torch.float64).abs()
        finite = magnitudes[torch.isfinite(magnitudes) & (magnitudes > 0)]
        largest = float(finite.max()) if finite.numel() else 1.0
        smallest = float(finite.min()) if finite.numel() else 1.0
        outside = largest >= _LARGEST_FIXED or smallest < _SMALLEST_FIXED
        if self.float_format == "none":
            return lambda value: f"{float(value):.{max(self.digits, 1)}g}"  # type: ignore[arg-type]
        if self.float_format == "scientific" or (self.float_format == "auto" and outside):
            return lambda value: f"{float(value):.{decimals}e}"  # type: ignore[arg-type]
        integer_digits = max(math.floor(math.log10(largest)) + 1, 1)
        decimals = max(self.digits - integer_digits, 0)
        return lambda value: f"{float(value):.{decimals}f}"  # type: ignore[arg-type]

    def _edges(self, size: int, summarised: bool) -> List[int]:
        """Returns the positions that are shown; -1 stands for what is left out."""
        if not summarised or size <= 2 * self.edge_items:
            return list(range(size))
        return list(range(self.edge_items)) + [-1] + list(range(size - self.edge_items, size))

    def _lines(self, tensor: torch.Tensor, number: Callable[[object], str], depth: int, summarised: bool) -> List[str]:
        if tensor.dim() == 0:
            return [number(tensor.item())]
        positions = self._edges(tensor.shape[0], summarised)
        indent = " " * depth
        if tensor.dim() == 1:
            items = [_ELLIPSIS if index < 0 else number(tensor[index].item()) for index in positions]
            return self._row(items, indent)
        lines = [indent + self.open_bracket]
        for index in positions:
            if index < 0:
                lines.append(f"{indent} {_ELLIPSIS}")
            else:
                lines.extend(self._lines(tensor[index], number, depth + 1, summarised))
        lines.append(indent + self.close_bracket)
        return lines

    def _row(self, items: Sequence[str], indent: str) -> List[str]:
        lines: List[str] = []
        line = indent + self.open_bracket
        for position, item in enumerate(items):
            piece = item + (self.separator if position < len(items) - 1 else self.close_bracket)
            if position and len(line) + len(item) > self.max_line_width:
                lines.append(line)
                line = f"{indent}  "
            line += piece
        return lines + [line if items else line + self.close_bracket]
