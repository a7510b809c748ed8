"""ipu_print_tensor: print a tensor and its gradient each time the device computes them."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Callable, List, Sequence, Tuple

import torch

from ipurun.emulator._capture.recorder import current
from ipurun.emulator._executor.anchors import GRADIENT_PREFIX, name_of
from ipurun.emulator._ops.recording import active_recorder, call_recorded, one_tensor, require_tensor

_ELLIPSIS = "..."
_LARGEST_FIXED = 1e4
_SMALLEST_FIXED = 1e-4
_FLOAT_FORMATS = {"auto": 0, "fixed": 1, "scientific": 2, "none": 3}


@dataclass(frozen=True)
class PrintFormat:
    """The layout of printed values.

    Args:
        summarise_threshold: Tensors with more elements show only their edges.
        edge_items: Items at each edge of a summarised dimension.
        max_line_width: Width at which rows are wrapped.
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
        """Return the title and the values of `tensor`."""
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
        """Return the positions to show; -1 marks omitted ones."""
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


class _Printer:
    """Writes a tensor to stderr, except during compilation, when nothing runs on the device."""

    def __init__(self, title: str, name: Callable[[], str], layout: PrintFormat, print_gradient: bool) -> None:
        self._title = title
        self._name = name
        self._layout = layout
        self._print_gradient = print_gradient

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        self._write(self._title or self._name(), tensor)
        return tensor

    def gradient(
        self,
        tensors: Tuple[torch.Tensor, ...],
        outputs: Tuple[torch.Tensor, ...],
        grads: Tuple[torch.Tensor, ...],
    ) -> Tuple[torch.Tensor, ...]:
        if self._print_gradient:
            title = f"{self._title}_gradient" if self._title else GRADIENT_PREFIX + self._name()
            self._write(title, grads[0])
        return grads

    def _write(self, title: str, tensor: torch.Tensor) -> None:
        if current() is None:
            sys.stderr.write(self._layout.text(title, tensor) + "\n")
            sys.stderr.flush()


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor to stderr in each run of a compiled model; do nothing outside an executor.

    Args:
        tensor: The tensor to print.
        title: Text before the values, by default the name of the tensor; "_gradient" is added for gradients.
        print_gradient: Whether training also prints the gradient.
        summarise_threshold: Tensors with more elements show only their edges.
        edge_items: Items at each edge of a summarised dimension.
        max_line_width: Width at which rows are wrapped.
        digits: Significant digits.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: Text between the items of a row.
        open_bracket: Text before a row.
        close_bracket: Text after a row.

    Returns:
        The tensor, to be used instead of the argument: an unused result is not printed.

    Raises:
        poptorch.Error: `tensor` is not a tensor.
        KeyError: `float_format` is unknown.
    """
    require_tensor(tensor, "ipu_print_tensor: the argument")
    _FLOAT_FORMATS[float_format]
    layout = PrintFormat(
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        open_bracket,
        close_bracket,
    )
    recorder = active_recorder()
    if recorder is None:
        return tensor
    # Evaluated when printing, because names are known only for the finished graph.
    name = functools.partial(name_of, recorder.graph, recorder.value_of(tensor))
    printer = _Printer(title, name, layout, print_gradient)
    return one_tensor(call_recorded(recorder, printer.value, [tensor], printer.gradient, "ipu_print_tensor"))
