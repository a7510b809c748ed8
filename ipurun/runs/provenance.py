"""What a run depends on besides its config: versions, machine, and the git state of the working folder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any, Dict, List, Optional
from ipurun import __version__

__all__ = ["git_diff", "git_state", "versions"]

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "poptorch", "rich", "torchmetrics", "transformers")
_LARGEST_DIFF = 1_000_000


def versions() -> Dict[str, str]:
    """Versions of what computes, without importing any of it."""
    found = {"ipurun": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["os"] = _operating_system()
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs"
    found["executable"] = sys.executable
    return found


def git_state(folder: str = ".") -> Dict[str, Any]:
    """Commit, branch and changed files of the repository around a folder; empty outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    status = _git(folder, "status", "--porcelain", "--", ".") or ""
    changed: List[str] = [line[3:] for line in status.splitlines()]
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "",
        "dirty": bool(changed),
        "changed_files": changed[:100],
    }


def git_diff(folder: str = ".") -> str:
    """What the working folder has changed since its commit; empty where that is nothing, or too long to keep."""
    difference = _git(folder, "diff", "HEAD", "--", ".") or ""
    return difference + "\n" if 0 < len(difference) < _LARGEST_DIFF else ""


def _git(folder: str, *arguments: str) -> Optional[str]:
    try:
        done = subprocess.run(
            ("git", "-C", folder) + arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip("\n")


def _operating_system() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8") as stream:
            fields = dict(line.rstrip().split("=", 1) for line in stream if "=" in line)
        return f"{fields['PRETTY_NAME'].strip(chr(34))}, {platform.system()} {platform.release()}"
    except (OSError, KeyError, ValueError):
        return platform.platform()
