"""From a plan to engine objects."""

from ipurun.build.run import Run, build_run

__all__ = ["Run", "build_run"]
