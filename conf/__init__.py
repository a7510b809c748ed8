"""What Hydra reads. A package, so that `pkg://ipurun.conf` finds it in a wheel as well as in a clone."""
