"""Shared code of the replacements for SDK modules."""

import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_STAND_INS = "ipurun.emulator._sdk"


def hand_over(name: str) -> None:
    """Replace the module being imported with the installed one of this name, or with the emulator's.

    Args:
        name: Name of a module in this folder.
    """
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, elsewhere)
        # A folder without __init__.py is a namespace package, not the SDK module.
        if spec is not None and spec.loader is not None and spec.origin is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return
    importlib.import_module("poptorch")  # the module in this folder, which finds and installs the emulator
    sys.modules[name] = importlib.import_module(f"{_STAND_INS}.{name}")
