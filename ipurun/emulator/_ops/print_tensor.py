"""ipu_print_tensor: shows a tensor, and its gradient, each time the device computes it."""

from __future__ import annotations

import functools
import sys
from typing import Callable, Tuple

import torch

from ipurun.emulator._capture.recorder import current
from ipurun.emulator._ops.op_log import call_recorded
from ipurun.emulator._ops.print_format import PrintFormat
from ipurun.emulator._ops.recording import active_recorder, one_tensor, require_tensor
from ipurun.emulator._run.anchors import GRADIENT_PREFIX, name_of

_FLOAT_FORMATS = {"auto": 0, "fixed": 1, "scientific": 2, "none": 3}


class _Printer:
    """Writes a tensor to stderr, except while a compile runs: nothing is computed on the device then."""

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
    """Prints a tensor to stderr at each run of a compiled model; does nothing outside an executor.

    Args:
        tensor: What is printed.
        title: Text before the values, the name of the tensor if empty; the gradient's has "_gradient" added.
        print_gradient: Whether training prints the gradient too.
        summarise_threshold: Tensors of more elements show only their edges.
        edge_items: Items at each edge of a summarised dimension.
        max_line_width: Width past which a row continues on the next line.
        digits: Significant digits.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: Text between the items of a row.
        open_bracket: Text before a row.
        close_bracket: Text after a row.

    Returns:
        The tensor, to be used in place of the one given: a result that nothing uses is not printed.

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
    # Asked for when it prints: the names are those of the finished graph.
    name = functools.partial(name_of, recorder.graph, recorder.value_of(tensor))
    printer = _Printer(title, name, layout, print_gradient)
    return one_tensor(call_recorded(recorder, printer.value, [tensor], printer.gradient, "ipu_print_tensor"))
