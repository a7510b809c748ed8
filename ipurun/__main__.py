"""``python -m ipurun`` is the ``ipurun`` command."""

from ipurun.cli.main import console

console()
