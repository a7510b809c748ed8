"""What a compile leaves behind where asked to: the exported model, the profile report, the traced program."""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping

from ipurun.emulator._logging import TRACE, native_logger, trace

__all__ = ["write_compile_files"]

_PROTO_VARIABLE = "POPTORCH_EXPORT_PROTO_FILE"
_PROTO_NAME = "model.proto"
_PROFILE_NAME = "profile.pop"


def write_compile_files(
    program: Callable[[], str], options: Any, default_name: str, environment: Mapping[str, str]
) -> None:
    """Writes the program where options, environment or the log level ask for it.

    On a device these files hold the compiled code and its memory profile. Here each of them holds the
    captured program as JSON: which operations there are, and where they run.

    Args:
        program: Returns the compiled program as text.
        options: The executor's options.
        default_name: Name of the model where the options give none.
        environment: Environment variables.
    """
    if native_logger.isEnabledFor(TRACE):
        trace("PopART IR: %s", program())
    proto = environment.get(_PROTO_VARIABLE, "")
    if proto:
        _write(proto if os.path.splitext(proto)[1] else os.path.join(proto, _PROTO_NAME), program())
    engine = options._Popart.options.get("engineOptions", {})
    if engine.get("autoReport.all", "false") == "true":
        name = options.model_name if options.exists("model_name") else default_name
        _write(os.path.join(engine.get("autoReport.directory", "."), name, _PROFILE_NAME), program())


def _write(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
