"""The estimate is plain arithmetic: it runs without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ipurun.estimate

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # an import of it fails
import ipurun.estimate
for found in pkgutil.iter_modules(ipurun.estimate.__path__):
    if found.name == "plan_estimate":
        continue  # it traces the model first
    importlib.import_module(f"ipurun.estimate.{found.name}")
import ipurun.log.estimate_text, ipurun.pages.plan
"""


def test_every_module_of_the_estimate_loads_without_torch() -> None:
    root = Path(ipurun.estimate.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=str(root), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
