"""Shared code of the stand-ins for modules of PopTorch's SDK."""

import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_STAND_INS = {"popdist": "ipurun.emulator._sdk.popdist", "pva": "ipurun.emulator._sdk.pva"}


def hand_over(name: str) -> None:
    """Put the installed module of this name in place of the one being imported, or the emulator's where there is none.

    Args:
        name: Name of a stand-in in this folder.
    """
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, elsewhere)
        # A folder without __init__.py is a namespace package: something else of that name.
        if spec is not None and spec.loader is not None and spec.origin is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return
    importlib.import_module("poptorch")  # the stand-in beside this one, which finds the emulator and installs it
    sys.modules[name] = importlib.import_module(_STAND_INS[name])
