"""`ipurun env`: what a bug report needs to know about this machine."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError

__all__ = ["run"]


_USAGE = """\
usage: ipurun env [--json]

Shows the engine that engine=auto would take, the versions of PopTorch, the SDK, torch and Python, the IPUs, the
operating system, and the variables that PopTorch reads. Made for pasting into a bug report.
"""


def run(argv: List[str]) -> int:
    """Show the environment."""
    flags, rest = split(argv)
    if flags.help:
        print(_USAGE, end="")
        return 0
    if rest:
        raise ConfigError(f"`env` takes no `{rest[0]}`", "command line", fix="ipurun env")
    with only_json(flags.json):
        found = _gather()
    if flags.json:
        print_json(found)
        return 0
    for label, text in _rows(found):
        print(f"{label:<12}{text}")
    return 0


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
