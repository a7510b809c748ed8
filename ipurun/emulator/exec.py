"""Run a PopTorch program as ``python`` would, with the emulator as ``poptorch``."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import os
import runpy
import shutil
import sys
import types
import zipfile
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ipurun.emulator.install import install, load_whole_objects

__all__ = ["RecordedProgram", "record_script", "run_module", "run_script"]

_INTERRUPTED = 130
_IMPORT_SYSTEM = ("<frozen importlib", importlib.util.__file__)


def run_script(path: str, args: Sequence[str]) -> int:
    """Behave like ``python path args``.

    Args:
        path: The Python file, or a folder or archive with a ``__main__.py``.
        args: Arguments of the program, for sys.argv.

    Returns:
        The exit code that Python would return.
    """
    if not os.path.exists(path):
        print(f"{sys.executable}: can't open file {path!r}: No such file", file=sys.stderr)
        return 2
    is_file = not (os.path.isdir(path) or zipfile.is_zipfile(path))
    _prepare(os.path.dirname(os.path.realpath(path)) if is_file else None)
    sys.argv = [path, *args]
    if not is_file:
        if not _has_main(path):
            print(f"{sys.executable}: can't find '__main__' module in {path!r}", file=sys.stderr)
            return 1
        return _guarded(lambda: runpy.run_path(path, run_name="__main__"), __file__)
    return _guarded(lambda: _execute_file(path), __file__)


def run_module(name: str, args: Sequence[str]) -> int:
    """Behave like ``python -m name args``.

    Args:
        name: The dotted name of a module, or of a package with a ``__main__``.
        args: Arguments of the program, for sys.argv.

    Returns:
        The exit code that Python would return.
    """
    _prepare(os.getcwd())
    sys.argv = ["-m", *args]
    return _guarded(lambda: _execute_module(name), __file__)


def _prepare(first_path: Optional[str]) -> None:
    _set_first_path(first_path)
    install()
    load_whole_objects()
    # A `python3` started by the program inherits the emulator's PYTHONPATH, so it must be able to import the emulator.
    folder = os.path.dirname(sys.executable)
    started = shutil.which("python3")
    own = shutil.which("python3", path=folder)
    if own is not None and (started is None or os.path.dirname(started) != folder):
        os.environ["PATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PATH", "")]))


def _set_first_path(folder: Optional[str]) -> None:
    """Replace the folder of this command on the path, if Python added one, with that of the program."""
    launched_from = os.path.dirname(os.path.realpath(sys.argv[0]))
    if not sys.path[0] or os.path.realpath(sys.path[0]) == launched_from:
        del sys.path[0]
    # With -P or PYTHONSAFEPATH, Python adds no such folder.
    if folder is not None and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _has_main(path: str) -> bool:
    return importlib.machinery.PathFinder.find_spec("__main__", [path]) is not None


def _execute_module(name: str) -> None:
    missing = _missing_module(name)
    if missing:
        raise SystemExit(f"{sys.executable}: No module named {missing}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _missing_module(name: str) -> str:
    """Return the module that cannot be run, and why, in Python's words; empty if it can be run."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The packages around the module are imported: what they import and do not find is not this module.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return name
    if spec is None:
        return name
    is_package = spec.submodule_search_locations is not None
    if is_package and importlib.util.find_spec(f"{name}.__main__") is None:
        return f"{name}.__main__; {name!r} is a package and cannot be directly executed"
    return ""


def _execute_file(path: str) -> None:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    names: Dict[str, Any] = main.__dict__
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names.update(__file__=path, __builtins__=builtins, __cached__=None, __loader__=loader, __spec__=None)
    # Classes of the program are pickled by the name __main__, and worker processes re-read its __file__.
    sys.modules["__main__"] = main
    exec(code, names)


def _guarded(program: Callable[[], Any], own_file: str) -> int:
    try:
        program()
    except SystemExit as end:
        return _exit_code(end.code)
    except KeyboardInterrupt as interrupt:
        _report(interrupt, own_file)
        return _INTERRUPTED
    except BaseException as error:  # report every exception of the program as Python does
        _report(error, own_file)
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException, own_file: str) -> None:
    """Print the traceback from the program's first frame, with the program's excepthook if it set one."""
    traceback: Optional[types.TracebackType] = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith((own_file, *_IMPORT_SYSTEM)):
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


class RecordedProgram:
    """Objects that a program created up to its first compiled model.

    Attributes:
        setters: Calls of option setters in order, as (path, arguments): ``("Training.gradientAccumulation", (8,))``.
        model: The user's model.
        optimizer: The optimizer of a training model.
        training: Whether the first compiled model is trained.
        loaders: Arguments of the data loaders, by name, the data set under ``dataset``.
    """

    def __init__(self) -> None:
        self.setters: List[Tuple[str, Tuple[Any, ...]]] = []
        self.model: Any = None
        self.optimizer: Any = None
        self.training = False
        self.loaders: List[Dict[str, Any]] = []


class _FirstModel(BaseException):
    """Ends a recorded program; not an Exception, so that the program does not handle it."""


def record_script(path: str, args: Sequence[str]) -> RecordedProgram:
    """Run a program up to its first compiled model, with its output on standard error.

    Args:
        path: The Python file.
        args: Arguments of the program, for sys.argv.

    Returns:
        What it made; without a model if it compiles none.

    Raises:
        BaseException: That of the program.
    """
    from ipurun.emulator import DataLoader, Options
    from ipurun.emulator._poplar_executor import PoplarExecutor

    recorded = RecordedProgram()
    own_words, own_path = sys.argv, list(sys.path)
    _prepare(os.path.dirname(os.path.realpath(path)))
    sys.argv = [path, *args]
    with contextlib.ExitStack() as patches:
        # Later processes of data loaders read the file of __main__, which would be the program.
        patches.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        patches.enter_context(contextlib.redirect_stdout(sys.stderr))
        options = Options()
        groups = [("", options)]
        groups += [
            (f"{name}.", getattr(options, name)) for name in ("Training", "Precision", "TensorLocations", "_Popart")
        ]
        for prefix, group in groups:
            for name in [name for name in dir(type(group)) if not name.startswith("_") and name not in _NOT_SETTERS]:
                setter = getattr(type(group), name)
                if isinstance(setter, types.FunctionType):
                    patches.enter_context(_patched(type(group), name, _recording(setter, prefix + name, recorded)))
        made = PoplarExecutor.__init__

        def remember(executor: Any, *given: Any, **named: Any) -> None:
            made(executor, *given, **named)
            vars(executor)["_given_optimizer"] = named.get("optimizer")
            vars(executor)["_is_training"] = named.get("training", given[2] if len(given) > 2 else False)

        def stop(executor: Any, *_: Any, **__: Any) -> None:
            recorded.model = vars(executor)["_user_model"]
            recorded.optimizer = vars(executor)["_given_optimizer"]
            recorded.training = bool(vars(executor)["_is_training"])
            raise _FirstModel

        loads = DataLoader.__init__

        def load(loader: Any, options: Any, dataset: Any, batch_size: int = 1, *given: Any, **named: Any) -> None:
            recorded.loaders.append({"dataset": dataset, "batch_size": batch_size, **named})
            loads(loader, options, dataset, batch_size, *given, **named)

        patches.enter_context(_patched(PoplarExecutor, "__init__", remember))
        patches.enter_context(_patched(PoplarExecutor, "__call__", stop))
        patches.enter_context(_patched(PoplarExecutor, "compile", stop))
        patches.enter_context(_patched(DataLoader, "__init__", load))
        try:
            _execute_file(path)
        except _FirstModel:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            sys.argv, sys.path[:] = own_words, own_path
    return recorded


_NOT_SETTERS = ("toDict", "clone", "loadFromFile", "defaultOutputMode")


@contextlib.contextmanager
def _patched(owner: type, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _recording(setter: Callable[..., Any], path: str, recorded: RecordedProgram) -> Callable[..., Any]:
    @functools.wraps(setter)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = setter(group, *args, **kwargs)
        if not str(sys._getframe(1).f_globals.get("__name__", "")).startswith("ipurun.emulator"):
            recorded.setters.append((path, (*args, *kwargs.values())))  # not what setters and loaders call
        return result

    return call
