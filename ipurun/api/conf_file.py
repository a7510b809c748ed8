"""poptorch.conf files (PopTorch's `Options.loadFromFile`), read as data and never executed.

Each line is what would follow ``options.`` in Python: ``Training.gradientAccumulation(8)``. Lines are parsed with
`ast`; literals, enumeration members, settings objects and strategies are understood, anything else is refused.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Sequence, Tuple, Type

from ipurun.api.calls import Call, Symbol
from ipurun.api.options import bind
from ipurun.api.setters import class_setters, enum_members, option_setters
from ipurun.api.values import BadValueError, convert
from ipurun.errors import Problem, listing, nearest

__all__ = ["NotDataError", "evaluate", "read_conf"]

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


_CLASSES = (
    "TensorLocationSettings",
    "PipelinedExecution",
    "ShardedExecution",
    "SerialPhasedExecution",
    "ParallelPhasedExecution",
    "Stage",
    "Phase",
)
_ARITHMETIC: Dict[Type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class NotDataError(ValueError):
    """An expression that would have to be run."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


def evaluate(node: ast.expr) -> Any:
    """The value of an expression made of literals and PopTorch's names.

    Raises:
        NotDataError: Anything else.
        BadValueError: A setter of a settings object got what it does not take.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [evaluate(item) for item in node.elts]
    if isinstance(node, ast.Set):
        return {evaluate(item) for item in node.elts}
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {evaluate(key): evaluate(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _number(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _calculate(node)
    if isinstance(node, ast.Attribute):
        return _name(node)
    if isinstance(node, ast.Call):
        return _object(node)
    raise NotDataError(_source(node))


def _number(node: ast.expr) -> Any:
    value = evaluate(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotDataError(_source(node))
    return value


def _calculate(node: ast.BinOp) -> Any:
    try:
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    except (ZeroDivisionError, OverflowError) as error:
        raise NotDataError(_source(node)) from error


def _name(node: ast.Attribute) -> Symbol:
    path = _dotted(node)
    parts = path.split(".")
    if parts[0] == "poptorch" and len(parts) in (3, 4) and parts[-3] in ("poptorch", "enums"):
        members = enum_members(parts[-2])
        if members is not None and parts[-1] not in members:
            raise BadValueError(f"a member of {parts[-2]}", listing(members), f"poptorch.{parts[-2]}.{members[0]}")
        if members is not None:
            return Symbol(f"poptorch.{parts[-2]}.{parts[-1]}")
    if path in ("torch.float16", "torch.half", "torch.float32", "torch.float"):
        return Symbol(path)
    raise NotDataError(_source(node))


def _object(node: ast.Call) -> Call:
    """A settings object or a strategy, with the setters chained to it."""
    if not isinstance(node.func, ast.Attribute) or any(keyword.arg is None for keyword in node.keywords):
        raise NotDataError(_source(node))
    args = tuple(evaluate(argument) for argument in node.args)
    named = {str(keyword.arg): evaluate(keyword.value) for keyword in node.keywords}
    if isinstance(node.func.value, ast.Call):
        made = _object(node.func.value)
        setter = class_setters(made.path.rpartition(".")[2]).get(node.func.attr)
        if setter is None:
            known = listing(class_setters(made.path.rpartition(".")[2]))
            raise BadValueError(f"setters of {made.path}, not `{node.func.attr}`", known)
        names = [parameter.name for parameter in setter.parameters]
        given = {**dict(zip(names, args)), **named}
        unknown = [name for name in given if name not in names]
        if unknown or len(args) > len(names):
            raise BadValueError(f"arguments of {node.func.attr}", listing(names))
        values = tuple(
            convert(given[parameter.name], parameter.annotation) if given.get(parameter.name) is not None else None
            for parameter in setter.parameters
            if parameter.name in given
        )
        return Call(made.path, made.args, made.kwargs, made.origin, (*made.chain, Call(node.func.attr, values)))
    path = _dotted(node.func)
    if path.startswith("poptorch.") and path.rpartition(".")[2] in _CLASSES and not named:
        return Call(f"poptorch.{path.rpartition('.')[2]}", args)
    raise NotDataError(_source(node))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise NotDataError(_source(node))


def _source(node: ast.expr) -> str:
    unparse = getattr(ast, "unparse", None)  # Python 3.9
    return str(unparse(node)) if unparse else type(node).__name__
