"""From a config to a plan: pure arithmetic, and PopTorch calls as data."""

from __future__ import annotations

from ipurun.planning.make import make_plan

__all__ = ["make_plan"]
