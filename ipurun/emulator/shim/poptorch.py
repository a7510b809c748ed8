"""Stand-in for PopTorch in processes that find this folder on PYTHONPATH: imports the emulator."""

import importlib.util
import os
import sys

if importlib.util.find_spec("ipurun") is None:
    # A child of a program that runs from a source tree does not have that tree on its path.
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))

from ipurun.emulator.install import install

install()
