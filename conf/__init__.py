"""Configs for Hydra. A package, so that `pkg://ipurun.conf` finds it in a wheel as well as in a clone."""
