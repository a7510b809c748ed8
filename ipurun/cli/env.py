"""`ipurun env`: what a bug report needs to know about this machine, and what is wrong with it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Tuple

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import EXIT_FAILED, ConfigError

__all__ = ["run"]


_USAGE = """\
usage: ipurun env [--doctor] [--bundle[=FILE.zip]] [--run RUN_FOLDER] [--json]

Shows the engine that engine=auto would take, the versions of PopTorch, the SDK, torch and Python, the IPUs, the
operating system, and the variables that Graphcore's libraries read. Made for pasting into a bug report.

flags
  --doctor         check the SDK, versions, IPUs and partitions, /dev/shm, limits, disks and the cache, with what to do;
                   the exit code is 1 if something is wrong
  --bundle[=FILE]  write all of that, and what Graphcore's tools print, to one zip file, without secrets
  --run FOLDER     include the config, plan, log and summary of a run in the bundle
  --json           one JSON document on standard output

examples
  ipurun env --doctor
  ipurun env --bundle --run runs/mnist/2026-01-31_12-00-00
"""
_DEFAULT_BUNDLE = "ipurun-report.zip"
_MARKS = {"ok": "ok", "warning": "warn", "problem": "FAIL", "absent": "-"}
_WIDTH = 100
_NARROWEST = 34


def run(argv: List[str]) -> int:
    """Show the environment."""
    words = [f"{word}={_DEFAULT_BUNDLE}" if word == "--bundle" else word for word in argv]
    flags, rest = split(words, switches=("--doctor",), with_value=("--bundle", "--run"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    if rest:
        raise ConfigError(f"`env` takes no `{rest[0]}`", "command line", fix="ipurun env")
    bundle, run_folder = flags.values.get("bundle"), flags.values.get("run")
    if run_folder is not None and bundle is None:
        raise ConfigError("`--run` goes with --bundle", "command line", fix=f"ipurun env --bundle --run {run_folder}")
    if bundle is not None and not str(bundle).endswith(".zip"):
        fix = f"--bundle={str(bundle) or _DEFAULT_BUNDLE[:-4]}.zip"
        raise ConfigError("`--bundle` writes a zip file", "command line", seen=f"--bundle={bundle}", fix=fix)
    with only_json(flags.json):
        from ipurun.host.doctor import diagnose

        found = _gather()
        checks = diagnose() if bundle is not None or "doctor" in flags.values else []
        names = _write_bundle(str(bundle), found, checks, run_folder) if bundle is not None else []
    code = EXIT_FAILED if any(check.state == "problem" for check in checks) else 0
    if flags.json:
        shown = {"doctor": [vars(check) for check in checks]} if "doctor" in flags.values else {}
        print_json({**found, **shown, **({"bundle": str(bundle)} if bundle is not None else {})})
        return code
    if bundle is not None:
        print(f"wrote {bundle}: {', '.join(names)}")
        print("values that look like secrets are masked; look into it before you send it")
        return 0
    if checks:
        _show_checks(checks)
        return code
    for label, text in _rows(found):
        line = f"{label:<12}{text}"
        print(textwrap.fill(line, _width(), subsequent_indent=" " * 12) if sys.stdout.isatty() else line)
    return 0


def _write_bundle(path: str, found: Dict[str, Any], checks: List[Any], run_folder: Any) -> List[str]:
    from ipurun.host.bundle import write_bundle

    return write_bundle(Path(path), found, checks, None if run_folder is None else str(run_folder))


def _width() -> int:
    return max(_NARROWEST, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))


def _show_checks(checks: List[Any]) -> None:
    width = _width()
    for check in checks:
        head = f"{_MARKS[check.state]:<5}{check.name:<14}"
        for line in textwrap.wrap(check.found, width - len(head)) or [""]:
            print(head + line)
            head = " " * len(head)
        if check.fix:
            for line in textwrap.wrap(f"try  {check.fix}", width - 19, subsequent_indent=" " * 5):
                print(" " * 19 + line)
    counts = []
    for state in ("problem", "warning"):
        number = sum(check.state == state for check in checks)
        counts += [f"{number} {state}{'s' if number > 1 else ''}"] if number else []
    print(f"\n{' and '.join(counts) if counts else 'nothing is wrong'}")


def _gather() -> Dict[str, Any]:
    from ipurun.engine import probe
    from ipurun.runs.folder import git_state, versions

    return {**versions(), **probe(), "git": git_state()}


def _rows(found: Dict[str, Any]) -> List[Tuple[str, str]]:
    problem = found.get("poptorch_problem")
    poptorch = found.get("poptorch") or (f"cannot be imported: {problem}" if problem else "not installed")
    engine = found.get("engine", "cpu")
    chosen = {"ipu": "ipu (PopTorch on hardware)", "cpu": "cpu (ipurun.emulator)"}.get(engine, engine)
    rows = [
        ("ipurun", found.get("ipurun")),
        ("engine", f"{chosen}: what engine=auto takes here"),
        ("IPUs", found.get("ipus") or "none"),
        ("PopTorch", poptorch),
        ("Poplar SDK", found.get("sdk") or "not enabled"),
        ("torch", found.get("torch") or "not installed"),
        ("Python", f"{found.get('python')} ({found.get('executable')})"),
        ("Hydra", found.get("hydra-core") or found.get("hydra") or "not installed"),
        ("OmegaConf", found.get("omegaconf") or "not installed"),
        ("numpy", found.get("numpy") or "not installed"),
        ("OS", found.get("os") or found.get("platform")),
        ("machine", found.get("machine")),
    ]
    git = found.get("git") or {}
    if git:
        rows.append(("git", f"{git['commit'][:12]} on {git['branch']}{', with changes' if git['dirty'] else ''}"))
    rows += [("variable", f"{name}={value}") for name, value in (found.get("environment") or {}).items()]
    return [(label, str(text)) for label, text in rows]
