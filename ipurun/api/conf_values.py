"""Arguments in a poptorch.conf file: an expression's value, without running it."""

from __future__ import annotations

import ast
import operator
from typing import Any, Callable, Dict, Type

from ipurun.api.calls import Call, Symbol
from ipurun.api.setter_names import class_setters, enum_members
from ipurun.api.setter_values import BadValueError, convert
from ipurun.errors import listing

__all__ = ["NotDataError", "evaluate"]

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
