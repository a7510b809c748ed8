"""poptorch.conf files (PopTorch's `Options.loadFromFile`), read as data and never executed.

Each line is what would follow ``options.`` in Python: ``Training.gradientAccumulation(8)``. Lines are parsed with
`ast`; literals, enumeration members, settings objects and strategies are understood, anything else is refused.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

from ipurun.api.calls import Call
from ipurun.api.conf_values import NotDataError, evaluate
from ipurun.api.setter_names import option_setters
from ipurun.api.setter_values import BadValueError
from ipurun.api.setters import bind
from ipurun.errors import Problem, listing, nearest

__all__ = ["read_conf"]

_PREFIX = "options."


@dataclass(frozen=True)
class _Line:
    where: str
    text: str


def read_conf(path: str) -> Tuple[List[Call], List[Problem]]:
    """The calls of a file, and what is wrong with it, by line.

    Args:
        path: The file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [], [
            Problem(
                "`poptorch_conf` cannot be read",
                seen=f"{path}: {reason}",
                fix="poptorch_conf=FILE",
                key="poptorch_conf",
            )
        ]
    if text.lstrip().startswith("{"):
        fix = f"ipurun import {path}, which turns an IPUConfig of optimum into keys"
        return [], [
            Problem(
                "`poptorch_conf` is JSON, not lines of PopTorch's setters", f"{path}:1", fix=fix, key="poptorch_conf"
            )
        ]
    calls: List[Call] = []
    problems: List[Problem] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        stripped = raw.strip()
        if not stripped or stripped.startswith("#"):
            continue
        line = _Line(f"{path}:{number}", stripped)
        try:
            calls += _line_calls(line)
        except _LineError as error:
            problems.append(Problem(error.what, line.where, stripped, error.known, error.fix))
    return calls, problems


class _LineError(Exception):
    def __init__(self, what: str, known: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.known = known
        self.fix = fix


def _line_calls(line: _Line) -> List[Call]:
    try:
        statements = ast.parse(_PREFIX + line.text).body
    except SyntaxError as error:
        column = max((error.offset or 1) - len(_PREFIX), 1)
        raise _LineError(f"not Python: {error.msg}, column {column}") from error
    if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
        hint = "one call per line, such as deviceIterations(4)"
        raise _LineError("a line of poptorch.conf is one call of a setter", fix=hint)
    return [_setter_call(path, node, line) for path, node in _unchain(statements[0].value)]


def _unchain(node: ast.expr) -> List[Tuple[str, ast.Call]]:
    """``Training.a(1).b(2)`` as the setters that are called, each with its group, in the order of the calls."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        raise _LineError(
            "a line of poptorch.conf is one call of a setter",
            fix="a call with parentheses, such as deviceIterations(4)",
        )
    inner = node.func.value
    if isinstance(inner, ast.Call):
        before = _unchain(inner)
        group = before[0][0].rpartition(".")[0]
        return [*before, (f"{group}.{node.func.attr}" if group else node.func.attr, node)]
    names = [node.func.attr]
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise _LineError("a line of poptorch.conf begins with the name of a setter")
    return [(".".join(reversed(names)), node)]


def _setter_call(path: str, node: ast.Call, line: _Line) -> Call:
    if path not in option_setters():
        close = nearest(path, option_setters())
        name = path[len(_PREFIX) :] if path.startswith(_PREFIX) else ""
        fix = f"leave out `{_PREFIX}`" if name in option_setters() else (f"{close[0]}(...)" if close else "")
        raise _LineError(f"poptorch.Options has no setter `{path}`", listing(close), fix)
    try:
        args = _values(node.args)
        kwargs = {keyword.arg: evaluate(keyword.value) for keyword in node.keywords if keyword.arg}
        if len(kwargs) != len(node.keywords):
            raise NotDataError("**")
        return bind(path, args, kwargs, line.where)
    except NotDataError as error:
        raise _LineError(
            f"`{error.source}` is not data",
            known="numbers, texts, lists, dicts, poptorch.<Enum>.<Member>, TensorLocationSettings(), strategies",
            fix="write the value itself",
        ) from error
    except BadValueError as error:
        raise _LineError(f"`{path}` takes {error.takes}", error.known, error.fix) from error


def _values(nodes: Sequence[ast.expr]) -> List[Any]:
    return [evaluate(node) for node in nodes]
