"""The version that the emulator claims to be: PopTorch's, with a snapshot of its own."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "3.4.0-emulated"
