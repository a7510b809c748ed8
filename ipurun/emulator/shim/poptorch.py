"""Import the emulator as PopTorch in processes with this folder on PYTHONPATH."""

import importlib.util
import os
import sys

if importlib.util.find_spec("ipurun") is None:
    # Child processes of a program that runs from a source tree do not have that tree on their path.
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))

from ipurun.emulator.install import install

install()
