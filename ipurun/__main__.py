"""``python -m ipurun`` is the ``ipurun`` command."""

from ipurun.module_search import drop_working_folder

drop_working_folder()  # `python -m` has put it first: before the modules that the next line imports

from ipurun.cli.main import console  # noqa: E402

console()
