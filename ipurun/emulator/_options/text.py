"""Options written as text: a file of statements, or a JSON object."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any, List

from ipurun.emulator import enums

if TYPE_CHECKING:
    from ipurun.emulator.options import Options

__all__ = ["ConfigFileError", "apply_file", "apply_json"]


class ConfigFileError(Exception):
    """A line of an options file is not Python."""


def _statements(filepath: str) -> List[str]:
    with open(filepath, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [f"options.{line}" for line in lines if line and not line.startswith("#")]


def apply_file(options: Options, filepath: str) -> None:
    """Run a file of statements such as ``deviceIterations(4)`` on the options.

    Raises:
        ConfigFileError: A line is not Python; no line was applied.
    """
    statements = _statements(filepath)
    try:
        code = compile("\n".join(statements), filepath, "exec")
    except SyntaxError as error:
        # An unclosed bracket at the end is reported one line past the last on older Pythons.
        number = min(error.lineno or 1, len(statements))
        raise ConfigFileError(
            f"{type(error).__name__} at line {number} of {os.path.basename(filepath)}: {_wording(error)}\n"
            f"> {statements[number - 1]}"
        ) from error
    exec(code, {"options": options, "poptorch": sys.modules[__package__]})


def _wording(error: SyntaxError) -> str:
    # Since 3.10 Python names the open bracket; PopTorch 3.4 runs on 3.8, whose words programs look for.
    return "unexpected EOF while parsing" if error.msg.endswith("was never closed") else error.msg


def _converted(value: Any) -> Any:
    """Turn "Enum.Member" into that member; leave anything else as it is."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    enum_name, member_name = value.split(".")
    members = getattr(getattr(enums, enum_name, None), "__members__", {})
    return members.get(member_name, value)


def apply_json(options: Options, string: str) -> None:
    """Call the setters named by a JSON object: ``{"Training.gradientAccumulation": 4}``."""
    for accessor, value in json.loads(string).items():
        setter = functools.reduce(getattr, accessor.split("."), options)
        if isinstance(value, list):
            setter(*value)
        else:
            setter(_converted(value))
