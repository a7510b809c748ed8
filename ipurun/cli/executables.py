"""`ipurun cache` and `ipurun compile`: manage compiled executables, and compile without a device."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipurun import executables
from ipurun.cli.common import Flags, only_json, print_json, split
from ipurun.errors import EXIT_FAILED, ConfigError, nearest, visible
from ipurun.executables import Entry
from ipurun.log.style import print_table

__all__ = ["run_cache", "run_compile"]

_CACHE_USAGE = """\
usage: ipurun cache ls
       ipurun cache show KEY
       ipurun cache why +recipe=NAME [key=value ...]
       ipurun cache prune [--older-than 30d] [--max-size 5GB] [--stale]
       ipurun cache verify
       ipurun cache clear

Compiled executables are kept, so that the next run with the same program starts at once.

actions
  ls          list the executables: when they were last used, how often, how long they took to compile
  show KEY    show one with the config and the versions that compiled it; the beginning of its key is enough
  why         say before a run whether it will find its executables, and what differs from the nearest ones
  prune       remove those that were not used for a time, that other versions compiled, or beyond a total size;
              and what was set aside, or left unfinished, more than a day ago (or for that time)
  verify      compare all with their checksums; damaged ones are set aside, damaged records of them are removed and
              written again by the next run, and the exit code is then 1
  clear       remove all

flags
  --dir DIR         the folder; by default POPTORCH_CACHE_DIR and the folders below IPURUN_CACHE_DIR or ~/.cache/ipurun
  --older-than AGE  such as 12h, 30d or 8w
  --max-size SIZE   such as 500MB or 5GB; the least recently used are removed first
  --stale           those of other versions than the installed ones, which no run can load
  --json            one JSON document on standard output

examples
  ipurun cache why +recipe=mnist device_iterations=8
  ipurun cache prune --older-than 30d --max-size 10GB
"""
_COMPILE_USAGE = """\
usage: ipurun compile +recipe=NAME [key=value ...] [flags]

Compiles a config for training and for inference, without a device, into the executable cache: `ipurun train` with the
same words then starts at once. It takes as long as the first start of a run would, on a machine without IPUs too.

flags
  --ipu-version N  the kind of IPU: 2 for Mk2 (GC200 and Bow, the default), 21 for Mk2 with FP8, 1 for Mk1
  --export FILE    write a PopTorch export of the model for training instead, and of that for inference beside it,
                   for `ipurun train precompiled=FILE` and `poptorch.load`; such a file holds pickled Python objects,
                   and loading it runs code: use only files from those you trust
  --quiet          only errors and the last line
  --json           one JSON document on standard output
  --debug          show tracebacks

examples
  ipurun compile +recipe=gpt model=gpt2_small devices=4
  ipurun compile +recipe=mnist --export mnist.poptorch
"""
_IPU_VERSIONS = ("1", "2", "21")
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def run_cache(argv: List[str]) -> int:
    """Run one action on the cache."""
    flags, rest = split(argv, switches=("--stale",), with_value=("--dir", "--older-than", "--max-size"))
    if flags.help or not rest:
        print(_CACHE_USAGE, end="")
        return 0 if flags.help else 2
    action, words = rest[0], rest[1:]
    actions = {"ls": _ls, "show": _show, "why": _why, "prune": _prune, "verify": _verify, "clear": _clear}
    if action not in actions:
        close = nearest(action, actions, most=1)
        raise ConfigError(
            f"`cache` has no action `{action}`",
            "command line",
            known=", ".join(actions),
            fix=f"ipurun cache {close[0] if close else 'ls'}",
        )
    if words and action not in ("show", "why"):
        raise ConfigError(f"`cache {action}` takes no `{words[0]}`", "command line", fix=f"ipurun cache {action}")
    return actions[action](words, flags)


def run_compile(argv: List[str]) -> int:
    """Compile what the command line describes."""
    flags, rest = split(argv, with_value=("--ipu-version", "--export"))
    if flags.help:
        print(_COMPILE_USAGE, end="")
        return 0
    version = str(flags.values.get("ipu-version", "2"))
    if version not in _IPU_VERSIONS:
        known = ", ".join(_IPU_VERSIONS)
        raise ConfigError(f"`--ipu-version` cannot be `{version}`", "command line", known=known, fix="--ipu-version 2")
    file = flags.values.get("export")
    with only_json(flags.json):
        from ipurun.interface import compile_words

        job = compile_words(rest, int(version), None if file is None else str(file), flags.quiet or flags.json)
    if flags.json:
        compiled = {mode: vars(done) for mode, done in job.compiled.items()}
        files = {mode: str(path) for mode, path in job.files.items()}
        print_json({"name": job.plan.name, "cache_dir": job.plan.cache_dir, "compiled": compiled, "files": files})
    elif job.files:
        print(f"{job.plan.name}: exported {' and '.join(str(path) for path in job.files.values())}")
        print("these files hold pickled Python objects, and loading them runs code: use only those that you trust")
    else:
        states = ", ".join(f"{mode} {done.cache}" for mode, done in job.compiled.items())
        print(f"{job.plan.name}: {states}; cache: {job.plan.cache_dir}")
    return 0


def _folders(flags: Flags) -> List[Path]:
    chosen = flags.values.get("dir")
    if chosen is not None and not os.path.isdir(executables.absolute(str(chosen))):
        raise ConfigError("`--dir` is not a folder", "command line", str(chosen), fix="--dir=FOLDER that exists")
    return executables.cache_folders(os.environ, None if chosen is None else str(chosen))


def _found(flags: Flags) -> List[Entry]:
    everything = [entry for folder in _folders(flags) for entry in executables.entries(folder)]
    return sorted(everything, key=lambda entry: -entry.last_use)


def _ls(words: Sequence[str], flags: Flags) -> int:
    found = _found(flags)
    if flags.json:
        print_json([_document(entry) for entry in found])
        return 0
    if not found:
        print(f"no executables in {', '.join(map(str, _folders(flags)[:2]))}")
        return 0
    header = ("key", "run", "mode", "engine", "size", "compiled in", "hits", "last used")
    rows = [
        (
            visible(entry.key),
            visible(entry.name),
            visible(entry.mode or "?"),
            entry.engine,
            _size(entry.size),
            _seconds(entry.compile_seconds),
            str(entry.hits),
            _age(entry.last_use),
        )
        for entry in found
    ]
    print_table(sys.stdout, header, rows, numeric=(4, 5, 6), droppable=(3, 6, 5, 2, 7))
    aside = sum(path.suffix == ".broken" for folder in _folders(flags) for path in executables.leftovers(folder))
    print(f"{_count(found)}, {_size(sum(entry.size for entry in found))}" + (f"; {aside} set aside" if aside else ""))
    return 0


def _show(words: Sequence[str], flags: Flags) -> int:
    if len(words) != 1:
        raise ConfigError("`cache show` takes the key of an executable", "command line", fix="ipurun cache ls")
    found = _found(flags)
    matching = [entry for entry in found if entry.key.startswith(words[0])]
    if len(matching) != 1:
        what = "several executables have" if matching else "no executable has"
        known = ", ".join(visible(entry.key) for entry in (matching or found)[:5])
        raise ConfigError(f"{what} a key that begins like this", "command line", words[0], known, "ipurun cache ls")
    (entry,) = matching
    if flags.json:
        print_json(_document(entry))
        return 0
    rows: List[Tuple[str, str]] = [
        ("file", str(entry.path)),
        ("run", entry.name),
        ("mode", entry.mode or "?"),
        ("size", _size(entry.size)),
        ("compiled", f"in {_seconds(entry.compile_seconds)}, {_age(entry.modified)}"),
        ("last used", f"{_age(entry.last_use)}; {entry.hits} hits"),
        ("checksum", executables.verify(entry) or "right"),
    ]
    rows += [("versions" if index == 0 else "", f"{k} {v}") for index, (k, v) in enumerate(entry.versions.items())]
    rows += [("config" if index == 0 else "", f"{k}={v}") for index, (k, v) in enumerate(entry.config.items())]
    for label, text in rows:
        print(f"{label:<11}{visible(text)}")
    return 0


def _why(words: Sequence[str], flags: Flags) -> int:
    with only_json(flags.json):
        from ipurun.engine import check_environment
        from ipurun.interface import explain_cache_words

        check_environment()
        given = [f"cache.dir={flags.values['dir']}"] if "dir" in flags.values else []
        plan, prospects = explain_cache_words([*words, *given])
    if flags.json:
        documents = [
            {
                "mode": each.mode,
                "state": each.state,
                "why": each.why,
                "nearest": None if each.entry is None else each.entry.key,
                "differences": [{"key": k, "here": here, "there": there} for k, here, there in each.differences],
                "versions": [{"name": n, "here": here, "there": there} for n, here, there in each.other_versions],
            }
            for each in prospects
        ]
        print_json({"folder": plan.cache_dir, "executables": documents})
        return 0
    print(f"folder     {plan.cache_dir or 'none: cache.enabled=false'}")
    for each in prospects:
        print(f"{each.mode:<11}{each.state}{f': {each.why}' if each.why else ''}")
        if each.entry is not None and each.state == "hit":
            took = _seconds(each.entry.compile_seconds)
            print(f"           {visible(each.entry.key)}, compiled in {took}, last used {_age(each.entry.last_use)}")
        elif each.entry is not None:
            print(f"           differs from the nearest one, {visible(each.entry.key)}, in")
            rows = [
                *each.differences,
                *((f"version of {name}", here, there) for name, here, there in each.other_versions),
            ]
            for name, here, there in rows:
                print(f"             {visible(name)}: {visible(str(here))} here, {visible(str(there))} there")
            if not rows:
                print("             nothing that a config says: the code of the model, or its data, changed")
        elif each.state == "miss":
            print("           nothing was compiled under this name for this mode")
    return 0


def _prune(words: Sequence[str], flags: Flags) -> int:
    age, size, stale = (flags.values.get(name) for name in ("older-than", "max-size", "stale"))
    if age is None and size is None and stale is None:
        fix = "ipurun cache prune --older-than 30d, --max-size 5GB or --stale"
        raise ConfigError("`cache prune` needs to know what to remove", "command line", fix=fix)
    seconds = None if age is None else _parse_age(str(age))
    try:
        most = None if size is None else executables.parse_size(str(size))
    except ValueError as error:
        raise ConfigError("`--max-size` is not a size", "command line", str(error), fix="--max-size 5GB") from error
    for folder in _folders(flags):
        executables.remove_leftovers(folder, _SECONDS["d"] if seconds is None else seconds)
    removed = executables.prune(
        _found(flags), older_than_seconds=seconds, max_bytes=most, stale_for=_versions_now() if stale else None
    )
    return _report_removed(removed, flags)


def _clear(words: Sequence[str], flags: Flags) -> int:
    removed: List[Entry] = []
    for folder in _folders(flags):
        removed += executables.clear(folder)[0]
    return _report_removed(removed, flags)


def _report_removed(removed: Sequence[Entry], flags: Flags) -> int:
    if flags.json:
        print_json([_document(entry) for entry in removed])
    else:
        print(f"removed {_count(removed)}, {_size(sum(entry.size for entry in removed))}")
    return 0


def _verify(words: Sequence[str], flags: Flags) -> int:
    found = _found(flags)
    problems = {entry.path: what for entry in found for what in [executables.verify(entry)] if what}
    aside: Dict[Path, Optional[Path]] = {}
    for entry in found:
        if entry.path not in problems and executables.verify_about(entry):
            problems[entry.about_path] = executables.verify_about(entry)
            aside[entry.about_path] = None
            with contextlib.suppress(OSError):
                entry.about_path.unlink()
        elif entry.path in problems:
            try:
                aside[entry.path] = executables.set_aside(entry)
            except OSError:
                aside[entry.path] = None
    if flags.json:
        print_json(
            {
                "checked": len(found),
                "damaged": [
                    {"file": str(path), "problem": what, "set_aside": None if aside[path] is None else str(aside[path])}
                    for path, what in problems.items()
                ],
            }
        )
    else:
        for path, what in problems.items():
            then = "set aside" if aside[path] is not None else "it cannot be renamed" if path.exists() else "removed"
            print(f"{visible(str(path))}: {what}; {then}")
        print(f"{_count(found)} checked, {len(problems)} damaged")
    return EXIT_FAILED if problems else 0


def _versions_now() -> Dict[str, Dict[str, str]]:
    from ipurun import engine as engines
    from ipurun.build.cached_executables import current_versions

    try:
        return current_versions(engines.load("auto"))
    except ConfigError:  # no IPU here: executables of IPUs stay
        return current_versions()


def _parse_age(text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([mhdw])\s*", text, re.ASCII)
    if found is None:
        raise ConfigError("`--older-than` is not an age", "command line", text, "30m, 12h, 30d, 8w", "--older-than 30d")
    return float(found[1]) * _SECONDS[found[2]]


def _document(entry: Entry) -> Dict[str, Any]:
    return {
        "key": entry.key,
        "file": str(entry.path),
        "engine": entry.engine,
        "run": entry.name,
        "mode": entry.mode,
        "bytes": entry.size,
        "compile_seconds": entry.compile_seconds,
        "hits": entry.hits,
        "last_use": entry.last_use,
        "versions": dict(entry.versions),
        "config": dict(entry.config),
    }


def _count(found: Sequence[Entry]) -> str:
    return "1 executable" if len(found) == 1 else f"{len(found)} executables"


def _size(size: int) -> str:
    from ipurun.log.format import size_text

    return size_text(size)


def _seconds(seconds: Optional[float]) -> str:
    from ipurun.log.format import spelled_duration

    return "?" if seconds is None else spelled_duration(seconds)


def _age(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            number = int(seconds // unit)
            return f"{number} {name}{'' if number == 1 else 's'} ago"
    return "just now"
