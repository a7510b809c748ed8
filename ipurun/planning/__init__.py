"""From a config to a plan: pure arithmetic, and PopTorch calls as data."""

from __future__ import annotations

from typing import Mapping, Optional

from ipurun.config.schema import RunConfig
from ipurun.inspect.facts import Facts
from ipurun.planning.plan import Plan

__all__ = ["make_plan"]


def make_plan(
    config: RunConfig,
    facts: Facts,
    environ: Optional[Mapping[str, str]] = None,
    keys: Optional[Mapping[str, str]] = None,
) -> Plan:
    """Everything that a run will do, before anything is done.

    Args:
        config: The typed config.
        facts: What is known of the engine, the data and the model.
        environ: Environment variables; None: those of this process.
        keys: The keys that were set, with where (`Point.given`); None: those that differ from their defaults.

    Raises:
        ConfigError: With all problems at once.
    """
    # Deferred, because the config room writes setters as the `Call`s of `ipurun.planning.plan`.
    from ipurun.planning import make

    return make.make_plan(config, facts, environ, keys)
