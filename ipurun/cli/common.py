"""Code shared by commands: flags, the JSON document and exit codes for errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ipurun.errors import EXIT_FAILED, ConfigError, IpurunError, Problem, error_chain
from ipurun.log.style import has_colour, paint_problem

__all__ = [
    "Flags",
    "answer",
    "check_output",
    "explain",
    "forgiving_output",
    "guarded",
    "only_json",
    "print_json",
    "show_problems",
    "split",
]

_COMMON = {"--quiet": "quiet", "-q": "quiet", "--json": "json", "--debug": "debug", "--help": "help", "-h": "help"}


@dataclass(frozen=True)
class Flags:
    """The flags of one command line.

    Args:
        quiet: Only errors and the last line.
        json: One JSON document on standard output and nothing else.
        debug: Tracebacks.
        help: Show help.
        values: Value of each further flag of the command; True for a flag without a value.
    """

    quiet: bool = False
    json: bool = False
    debug: bool = False
    help: bool = False
    values: Dict[str, object] = field(default_factory=dict)


def split(argv: Sequence[str], switches: Sequence[str] = (), with_value: Sequence[str] = ()) -> Tuple[Flags, List[str]]:
    """Separate ipurun's flags from the other words of a command line.

    Args:
        argv: The words after the command.
        switches: Further flags of this command without a value, such as ``--explain``.
        with_value: Further flags that take a value, such as ``--html``.

    Raises:
        ConfigError: A flag lacks its value.
    """
    common = dict.fromkeys(_COMMON.values(), False)
    values: Dict[str, object] = {}
    rest: List[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if word in _COMMON:
            common[_COMMON[word]] = True
        elif word in switches:
            values[word.lstrip("-")] = True
        elif flag in with_value:
            if not equals:
                if not waiting:
                    raise ConfigError(f"`{flag}` needs a value", "command line", fix=f"{flag} VALUE")
                value = waiting.pop(0)
            values[flag.lstrip("-")] = value
        else:
            rest.append(word)
    return Flags(values=values, **common), rest


class _Forgiving(io.FileIO):
    """A descriptor whose disk may be full and whose reader may go away: what cannot be written is dropped.

    Args:
        descriptor: The descriptor.
        needs_reader: Whether a reader that goes away (`| head`) raises BrokenPipeError.
    """

    def __init__(self, descriptor: int, needs_reader: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._needs_reader = needs_reader
        self.error: Optional[OSError] = None  # the first one

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self._needs_reader and isinstance(error, BrokenPipeError):
                raise
            self.error = self.error or error
            # Libraries write to the descriptor themselves.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def forgiving_output(needs_reader: bool = False) -> None:
    """Keep standard output and error, when closed or full, from ending a command in the middle.

    Args:
        needs_reader: Whether the command is to end when the reader of its standard output goes away. A run is not: its
            log has every line.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        try:
            if stream is not getattr(sys, f"__{name}__") or stream.fileno() != descriptor:
                continue  # a test's or a notebook's
            stream.flush()
        except (AttributeError, OSError, ValueError):
            if stream is not getattr(sys, f"__{name}__"):
                continue
        raw = _Forgiving(descriptor, needs_reader and name == "stdout")
        encoding, errors = getattr(stream, "encoding", "utf-8"), getattr(stream, "errors", "replace")
        made = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=encoding,
            errors=errors,
            line_buffering=name == "stderr" or os.isatty(descriptor),
        )
        setattr(sys, name, made)


def check_output(code: int) -> int:
    """Report standard output that could not be written, after a command whose result it is.

    Args:
        code: The exit code of the command.

    Returns:
        The exit code: not 0 if something is missing.
    """
    sys.stdout.flush()
    error = getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "error", None)
    if error is None:
        return code
    what = f"standard output cannot be written: {error.strerror}"
    fix = "write to a disk with free space, or to a pipe: ipurun ... | less"
    print(Problem(what, "standard output", fix=fix), file=sys.stderr)
    return code or EXIT_FAILED


@contextlib.contextmanager
def only_json(active: bool) -> Iterator[None]:
    """Keep standard output clean while models, data sets and native libraries run.

    Args:
        active: Whether ``--json`` was given; otherwise nothing changes.
    """
    if not active:
        yield
        return
    sys.stdout.flush()
    descriptor = _descriptor()
    kept = None if descriptor is None else os.dup(descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if descriptor is not None:
                os.dup2(2, descriptor)
            yield
    finally:
        if descriptor is not None and kept is not None:
            os.dup2(kept, descriptor)
            os.close(kept)


def print_json(document: Any) -> None:
    """Print the one document of ``--json``."""
    print(json.dumps(document, indent=2, default=str))


def _descriptor() -> Any:
    # Libraries write to descriptor 1. Other streams, such as a test's, are redirected by Python alone.
    try:
        return 1 if sys.stdout.fileno() == 1 else None
    except (OSError, ValueError, AttributeError):
        return None


_USERS = ""
_DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "PyYAML"}  # whose name differs from that of the module


def guarded(command: Callable[[], int], name: str, argv: Sequence[str]) -> int:
    """Run a command and turn whatever it raises into a message and an exit code.

    Args:
        command: The command.
        name: Its name.
        argv: The words after it.
    """
    try:
        return command()
    except IpurunError as error:
        _raise_interrupt(error)
        error.set_problems(_complete(problem, name, argv) for problem in error.problems)
        show_problems(error, as_json="--json" in argv, debug="--debug" in argv)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        _raise_interrupt(error)
        show_problems(IpurunError(explain(error)), as_json="--json" in argv, debug="--debug" in argv)
        return EXIT_FAILED


def _raise_interrupt(error: BaseException) -> None:
    """Raise the interrupt that an error came from: libraries do not expect one wherever it comes, and fail."""
    for found in error_chain(error):
        if isinstance(found, KeyboardInterrupt):
            raise found


def _complete(problem: Problem, name: str, argv: Sequence[str]) -> Problem:
    """Return a problem with a place, the word that it names, and advice."""
    named = next((word for word in argv if word and f"`{word}`" in problem.what), f"ipurun {name}")
    where = problem.where or f"command line: {named[:100]}"
    return replace(problem, where=where, fix=problem.fix or f"ipurun {name} --help")


def explain(error: Exception) -> Problem:
    """Return whose fault an unexpected error is, by the code that raised it, and what to do about it."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    packages = [_package_of(frame.filename) for frame in frames]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    users = [frame for frame, package in zip(frames, packages) if package == _USERS]
    missing = str(error.name or packages[-1]).partition(".")[0] if isinstance(error, ImportError) else "ipurun"
    if missing != "ipurun" and not users:
        fix = f"{sys.executable} -m pip install {_DISTRIBUTIONS.get(missing, missing)}"
        if isinstance(error, ModuleNotFoundError):
            return Problem(f"the package `{missing}` is not installed", where, what, fix=fix)
        return Problem(f"the package `{missing}` cannot be imported", where, what, fix="repair its installation")
    if users:
        where = f"{users[-1].filename}:{users[-1].lineno}"
        return Problem("code outside ipurun failed", where, what, fix="--debug shows the whole traceback")
    if packages and packages[-1] != "ipurun":
        fix = "--debug shows the whole traceback; `ipurun env` shows the versions in use"
        return Problem(f"the package `{packages[-1]}` failed", where, what, fix=fix)
    return Problem(what, "inside ipurun", fix="run again with --debug and report it with `ipurun env`")


def _package_of(file: str) -> str:
    """Return the package of a file: ours, Python's or an installed one by name, "" for any other code."""
    path = os.path.abspath(file)
    for module in ("ipurun", "ipurun.recipes"):
        folder = os.path.dirname(str(getattr(sys.modules.get(module), "__file__", "")))
        if folder and path.startswith(folder + os.sep):
            return "ipurun"
    for folder in ("site-packages", "dist-packages"):
        _before, found, inside = path.partition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside.partition(os.sep)[0].partition(".")[0]
    return "Python" if path.startswith(os.path.dirname(os.__file__) + os.sep) else _USERS


def show_problems(error: IpurunError, as_json: bool = False, debug: bool = False) -> None:
    """Print problems to standard error, or as JSON to standard output."""
    if debug:
        traceback.print_exc()
    if as_json:
        kind = "config" if isinstance(error, ConfigError) else "run"
        print(json.dumps({"error": kind, "problems": [problem.to_dict() for problem in error.problems]}))
        return
    texts = [str(problem) for problem in error.problems]
    if has_colour(sys.stderr):
        texts = [paint_problem(text, problem.key) for text, problem in zip(texts, error.problems)]
    print("\n\n".join(texts), file=sys.stderr)


def answer(command: str, argv: List[str]) -> Optional[int]:
    """Let Hydra answer, if the command line has one of its flags that ask for information.

    Returns:
        The exit code, or None for an ordinary command line.

    Raises:
        ConfigError: The config has problems, or a flag lacks the one it belongs to.
    """
    flagged = {word.partition("=")[0] for word in argv}
    if not flagged & {"--cfg", "-c", "--info", "-i", "--hydra-help"}:
        details = sorted(flagged & {"--resolve", "--package", "-p"})
        if details:
            raise ConfigError(f"`{details[0]}` goes with --cfg", "command line", fix="--cfg job --resolve")
        return None
    from ipurun.config import compose, hydra_main
    from ipurun.config.argv import parse_argv

    _, rest = split(argv)
    words = parse_argv(rest)
    problems = [problem for point in compose.points(rest, command).points for problem in point.problems]
    if problems:
        raise ConfigError(problems)
    return hydra_main.show_info(command, words)
