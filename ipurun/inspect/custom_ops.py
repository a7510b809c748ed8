"""Operations of the user's own (`poptorch.custom_op`): libraries for IPUs, Python functions for the CPU engine."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, Mapping

from ipurun.config.schema import CustomOpsConfig
from ipurun.engine import Engine
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.locate import locate

__all__ = ["load_custom_ops"]

_FUNCTIONS = ("forward", "backward")


def load_custom_ops(config: CustomOpsConfig, engine: Engine) -> List[Problem]:
    """Make custom ops known to an engine, before the model that uses them is made.

    Returns:
        What is wrong with the config, a problem for each library or op.
    """
    if engine.kind == "cpu":
        each: List[Callable[[], None]] = [_registration(name, given, engine) for name, given in config.cpu.items()]
    else:
        each = [_loading(path) for path in config.libraries]
    problems: List[Problem] = []
    for make_known in each:
        try:
            make_known()
        except ConfigError as error:
            problems += error.problems
    return problems


def _loading(path: str) -> Callable[[], None]:
    def load() -> None:
        try:
            ctypes.CDLL(path)
        except OSError as error:
            fix = "build the library, and give its path from the working folder"
            raise ConfigError(
                "`custom_ops.libraries` cannot be loaded", seen=str(error), fix=fix, key="custom_ops.libraries"
            ) from error

    return load


def _registration(name: str, given: Any, engine: Engine) -> Callable[[], None]:
    key = f"custom_ops.cpu.{name}"

    def register() -> None:
        domain, separator, op = name.rpartition("/")
        if not separator or not domain or not op:
            fix = 'custom_ops.cpu={"my.domain/MyOp": module.function}'
            raise ConfigError("`custom_ops.cpu` names ops as DOMAIN/NAME", seen=name, fix=fix, key="custom_ops.cpu")
        functions = {"forward": given} if isinstance(given, str) else given
        if not isinstance(functions, Mapping) or "forward" not in functions or set(functions) - set(_FUNCTIONS):
            fix = "module.function, or {forward: module.function, backward: module.function}"
            raise ConfigError(f"`{key}` takes the function that computes the op", seen=repr(given), fix=fix, key=key)
        found = {kind: locate(path, key, engine.module) for kind, path in functions.items()}
        engine.module.ops.register_cpu_implementation(op, domain, found["forward"], found.get("backward"))

    return register
