"""poptorch.conf files (PopTorch's `Options.loadFromFile`), read as data and never executed.

Each line is what would follow ``options.`` in Python: ``Training.gradientAccumulation(8)``. Lines are parsed with
`ast`; literals, enumeration members, settings objects and strategies are understood, anything else is refused.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import Any, Callable, Dict, List, Tuple, Type

from ipurun.api.calls import Call, Symbol
from ipurun.api.options import bind
from ipurun.api.setters import class_setters, enum_members, option_setters
from ipurun.api.values import BadValueError, convert
from ipurun.errors import Problem, listing, nearest

__all__ = ["read_conf"]

_PREFIX = "options."
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


class _LineError(Exception):
    """A line that is not a call of a setter with values that it takes."""

    def __init__(self, what: str, known: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.known = known
        self.fix = fix


class _NotDataError(ValueError):
    """An expression whose value is known only by executing it."""

    def __init__(self, node: ast.AST) -> None:
        unparse = getattr(ast, "unparse", None)  # Python 3.9
        self.source = str(unparse(node)) if unparse else type(node).__name__
        super().__init__(self.source)


def read_conf(path: str) -> Tuple[List[Call], List[Problem]]:
    """Return the calls of a file, and its problems by line."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        seen = f"{path}: {getattr(error, 'strerror', None) or error}"
        what = "`poptorch_conf` cannot be read"
        return [], [Problem(what, seen=seen, fix="poptorch_conf=FILE", key="poptorch_conf")]
    if text.lstrip().startswith("{"):
        what = "`poptorch_conf` is JSON, not lines of PopTorch's setters"
        fix = f"ipurun import {path}, which turns an IPUConfig of optimum into keys"
        return [], [Problem(what, f"{path}:1", fix=fix, key="poptorch_conf")]
    calls: List[Call] = []
    problems: List[Problem] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        try:
            calls += [_setter_call(setter, node, where) for setter, node in _unchain(_parse(line))]
        except _LineError as error:
            problems.append(Problem(error.what, where, line, error.known, error.fix))
    return calls, problems


def _parse(line: str) -> ast.expr:
    try:
        statements = ast.parse(_PREFIX + line).body
    except SyntaxError as error:
        column = max((error.offset or 1) - len(_PREFIX), 1)
        raise _LineError(f"not Python: {error.msg}, column {column}") from error
    if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
        raise _LineError("a line of poptorch.conf must be one call of a setter", fix="write deviceIterations(4)")
    return statements[0].value


def _unchain(node: ast.expr) -> List[Tuple[str, ast.Call]]:
    """Return the setters that ``Training.a(1).b(2)`` calls, each with its group, in the order of the calls."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        raise _LineError("a line of poptorch.conf must be one call of a setter", fix="write deviceIterations(4)")
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
        raise _LineError("a line of poptorch.conf must begin with the name of a setter")
    return [(".".join(reversed(names)), node)]


def _setter_call(path: str, node: ast.Call, where: str) -> Call:
    if path not in option_setters():
        close = nearest(path, option_setters())
        name = path[len(_PREFIX) :] if path.startswith(_PREFIX) else ""
        fix = f"leave out `{_PREFIX}`" if name in option_setters() else (f"{close[0]}(...)" if close else "")
        raise _LineError(f"poptorch.Options has no setter `{path}`", listing(close), fix)
    try:
        args, kwargs = _arguments(node)
        return bind(path, args, kwargs, where)
    except _NotDataError as error:
        raise _LineError(
            f"`{error.source}` is not data",
            known="numbers, strings, lists, dicts, poptorch.<Enum>.<Member>, TensorLocationSettings(), strategies",
            fix="write the value itself",
        ) from error
    except BadValueError as error:
        raise _LineError(f"`{path}` takes {error.takes}", error.known, error.fix) from error


def _arguments(node: ast.Call) -> Tuple[List[Any], Dict[str, Any]]:
    if any(keyword.arg is None for keyword in node.keywords):
        raise _NotDataError(node)
    args = [_evaluate(argument) for argument in node.args]
    return args, {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression made of literals and PopTorch's names.

    Raises:
        _NotDataError: Anything else.
        BadValueError: A setter of a settings object got a value that it does not take.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Set):
        return {_evaluate(item) for item in node.elts}
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {_evaluate(key): _evaluate(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _number(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _calculate(node)
    if isinstance(node, ast.Attribute):
        return _name(node)
    if isinstance(node, ast.Call):
        return _object(node)
    raise _NotDataError(node)


def _number(node: ast.expr) -> Any:
    value = _evaluate(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _NotDataError(node)
    return value


def _calculate(node: ast.BinOp) -> Any:
    try:
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    except (ZeroDivisionError, OverflowError) as error:
        raise _NotDataError(node) from error


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
    raise _NotDataError(node)


def _object(node: ast.Call) -> Call:
    """Return a settings object or a strategy, with the setters chained to it."""
    if not isinstance(node.func, ast.Attribute):
        raise _NotDataError(node)
    name = node.func.attr
    args, named = _arguments(node)
    if not isinstance(node.func.value, ast.Call):
        if not _dotted(node.func).startswith("poptorch.") or name not in _CLASSES or named:
            raise _NotDataError(node)
        return Call(f"poptorch.{name}", tuple(args))
    made = _object(node.func.value)
    setters = class_setters(made.path.rpartition(".")[2])
    if name not in setters:
        raise BadValueError(f"setters of {made.path}, not `{name}`", listing(setters))
    parameters = {parameter.name: parameter.annotation for parameter in setters[name].parameters}
    given = {**dict(zip(parameters, args)), **named}
    if len(args) > len(parameters) or not set(given) <= set(parameters):
        raise BadValueError(f"arguments of {name}", listing(parameters))
    values = tuple(
        None if given[parameter] is None else convert(given[parameter], annotation)
        for parameter, annotation in parameters.items()
        if parameter in given
    )
    return replace(made, chain=(*made.chain, Call(name, values)))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _NotDataError(node)
