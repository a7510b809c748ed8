"""Check a machine for what commonly goes wrong, and say what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Callable, List, Mapping, Optional, Sequence, Tuple

from ipurun.executables import cache_folders, entries
from ipurun.host.tools import ToolOutput, ipu_ids, partitions, read_ipus, run_tool

__all__ = ["Check", "TOOLS", "diagnose"]

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"
TOOLS: Tuple[Tuple[str, ...], ...] = (("gc-info", "-l"), ("gc-monitor", "-j"), ("vipu", "list", "partitions"))
_GIB = 2**30
_SMALL_SHM = _GIB
_SMALL_DISK = 5 * _GIB
_FEW_FILES = 4096
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_EXACT = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)\s*\(?==\s*(?P<version>[\w.]+)")
_NEEDED = {"hydra-core": ((1, 3, 2), (1, 4, 0)), "omegaconf": ((2, 3, 0), (2, 4, 0)), "torch": ((2, 0, 1), (99, 0, 0))}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: What it is.
        state: ok, warning, problem, or absent for what this machine does not have and may not need.
        found: What was seen.
        fix: What to do; "" if nothing.
    """

    name: str
    state: str
    found: str
    fix: str = ""


def diagnose(runs_dir: str = ".", environ: Optional[Mapping[str, str]] = None) -> List[Check]:
    """Look at everything; never fails.

    Args:
        runs_dir: Folder of the runs.
        environ: Environment variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    folders = cache_folders(environ)
    has_poptorch = importlib.util.find_spec("poptorch") is not None and _version_of("poptorch") is not None
    checks: List[Check] = []
    for look in (
        lambda: _sdk(environ, has_poptorch),
        lambda: _poptorch(environ, has_poptorch),
        _packages,
        lambda: _ipus(run_tool(*TOOLS[0]), run_tool(*TOOLS[1])),
        lambda: _partitions(run_tool(*TOOLS[2]), environ),
        _shared_memory,
        _limits,
        lambda: _disks(runs_dir, str(folders[0])),
        lambda: _cache(folders),
    ):
        checks += _guarded(look)
    return checks


def _guarded(look: Callable[[], List[Check]]) -> List[Check]:
    try:
        return look()
    except Exception as error:  # a doctor that fails helps nobody: the rest is still worth knowing
        return [Check("doctor", WARNING, f"a check failed: {type(error).__name__}: {error}", "report it with --bundle")]


def _sdk(environ: Mapping[str, str], has_poptorch: bool) -> List[Check]:
    folder = environ.get("POPLAR_SDK_ENABLED", "")
    if not folder:
        if has_poptorch:
            fix = "source <sdk>/enable (or its poplar and popart enable.sh) in this shell, then start again"
            return [Check("SDK", PROBLEM, "PopTorch is installed, but no SDK is sourced in this shell", fix)]
        found = "none: runs use the CPU engine"
        return [
            Check("SDK", ABSENT, found, "on an IPU host: source <sdk>/enable, and install the SDK's poptorch wheel")
        ]
    if not Path(folder).exists():
        fix = "source the enable script of an SDK that is installed"
        return [Check("SDK", PROBLEM, f"POPLAR_SDK_ENABLED names {folder}, which does not exist", fix)]
    return [Check("SDK", OK, folder)]


def _poptorch(environ: Mapping[str, str], has_poptorch: bool) -> List[Check]:
    sdk = environ.get("POPLAR_SDK_ENABLED", "")
    if not has_poptorch:
        if not sdk:
            return []
        fix = f"{sys.executable} -m pip install <sdk>/poptorch-*.whl (for Python 3.8)"
        return [Check("PopTorch", PROBLEM, f"an SDK is sourced, but Python {platform.python_version()} lacks it", fix)]
    version = _version_of("poptorch") or ""
    checks = [Check("PopTorch", OK, version)]
    theirs, ours = _sdk_version(sdk), _release(version)
    if theirs and ours and theirs[:2] != ours[:2]:
        found = f"PopTorch {version} in an SDK {'.'.join(map(str, theirs))}"
        checks.append(Check("versions", PROBLEM, found, "install the poptorch wheel that comes with the sourced SDK"))
    for requirement in metadata.requires("poptorch") or ():
        exact = _EXACT.match(requirement)
        if exact is None or exact["name"] != "torch":
            continue
        torch = (_version_of("torch") or "absent").partition("+")[0]
        if torch != exact["version"]:
            found, fix = f"PopTorch needs torch {exact['version']}, torch {torch} is installed", "pip install torch=="
            checks.append(Check("versions", PROBLEM, found, fix + exact["version"]))
    return checks


def _sdk_version(folder: str) -> Optional[Tuple[int, ...]]:
    """Return the version in the name of an SDK's folder, such as poplar_sdk-ubuntu_20_04-3.4.0+1507."""
    for part in reversed(Path(folder).parts):
        found = re.search(r"-(\d+\.\d+\.\d+)\+", part)
        if found and "sdk" in part:
            return _release(found[1])
    return None


def _packages() -> List[Check]:
    checks = []
    for name, (lowest, limit) in _NEEDED.items():
        version = _version_of(name)
        release = _release(version or "")
        if version is None or release is None:
            checks.append(Check("packages", PROBLEM, f"{name} is not installed", f"pip install {name}"))
        elif not lowest <= release < limit:
            wanted = f">={'.'.join(map(str, lowest))}" + (f",<{limit[0]}.{limit[1]}" if limit[0] < 99 else "")
            fix = f"pip install '{name}{wanted}'"
            checks.append(Check("packages", PROBLEM, f"{name} {version} does not fit ipurun", fix))
    versions = ", ".join(f"{name} {_version_of(name)}" for name in _NEEDED)
    return checks or [Check("packages", OK, versions)]


def _ipus(listing: ToolOutput, monitor: ToolOutput) -> List[Check]:
    if not listing.is_installed:
        return [Check("IPUs", ABSENT, "gc-info is not on PATH: no IPUs, or the SDK is not sourced")]
    if listing.problem:
        fix = "check the driver and the partition: IPUOF_VIPU_API_PARTITION_ID, or ~/.ipuof.conf.d"
        return [Check("IPUs", PROBLEM, f"`{listing.command}`: {listing.problem}", fix)]
    ids = ipu_ids(listing.text)
    if not ids:
        return [
            Check("IPUs", PROBLEM, "gc-info lists no IPU", "ask for a partition: `vipu list partitions` shows them")
        ]
    if not monitor.is_installed or monitor.problem:
        return [Check("IPUs", OK, f"{len(ids)} IPUs; gc-monitor cannot say which are free ({monitor.problem})")]
    try:
        used = {reading.ipu: reading.process for reading in read_ipus(monitor.text) if reading.process}
    except ValueError:
        return [
            Check("IPUs", WARNING, f"{len(ids)} IPUs; `{monitor.command}` printed no JSON", "update the SDK's tools")
        ]
    if len(used) >= len(ids):
        processes = ", ".join(sorted(set(used.values())))
        fix = "wait for them with poplar.wait_for_ipu_minutes=30, or end those processes"
        return [Check("IPUs", WARNING, f"all {len(ids)} IPUs are in use (processes {processes})", fix)]
    return [Check("IPUs", OK, f"{len(ids)} IPUs, {len(ids) - len(used)} free")]


def _partitions(listing: ToolOutput, environ: Mapping[str, str]) -> List[Check]:
    if not listing.is_installed:
        return []
    if listing.problem:
        fix = "set VIPU_CLI_API_HOST to the host of the V-IPU controller"
        return [Check("partitions", WARNING, f"`{listing.command}`: {listing.problem}", fix)]
    found = partitions(listing.text)
    chosen = environ.get("IPUOF_VIPU_API_PARTITION_ID", "")
    names = ", ".join(f"{each.name} ({each.size} IPUs, {each.state})" for each in found) or "none"
    if chosen and chosen not in [each.name for each in found]:
        fix = f"export IPUOF_VIPU_API_PARTITION_ID=<one of {', '.join(each.name for each in found) or 'a new one'}>"
        return [Check("partitions", PROBLEM, f"there is no partition {chosen}; there are: {names}", fix)]
    broken = [each.name for each in found if each.state.upper() not in ("ACTIVE", "READY")]
    if broken:
        fix = f"vipu reset partition {broken[0]}, or ask the administrator"
        return [Check("partitions", WARNING, names, fix)]
    if not found:
        return [Check("partitions", PROBLEM, "there is no partition", "vipu create partition NAME --size 4")]
    return [Check("partitions", OK, names)]


def _shared_memory() -> List[Check]:
    if not os.path.isdir("/dev/shm"):
        return [Check("/dev/shm", WARNING, "does not exist", "mount it, or run without loader.workers")]
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _SMALL_SHM:
        fix = "docker run --shm-size=8g (or --ipc=host); loader.mode=async and loader.workers keep batches there"
        return [Check("/dev/shm", WARNING, found, fix)]
    return [Check("/dev/shm", OK, found)]


def _limits() -> List[Check]:
    checks = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        fix = f"ulimit -n {_FEW_FILES * 16}: every loader process and cached executable needs some"
        checks.append(Check("ulimit -n", WARNING, f"{files} open files", fix))
    if locked != resource.RLIM_INFINITY and shutil.which("gc-info"):
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1:-1): IPUs read the host's memory through it"
        checks.append(Check("ulimit -l", WARNING, f"{locked // 1024} KiB of locked memory", fix))
    return checks or [Check("ulimits", OK, f"{_limit(files)} open files, {_limit(locked)} bytes of locked memory")]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _disks(runs_dir: str, cache_root: str) -> List[Check]:
    checks = []
    for name, folder, key in (("runs", runs_dir, "runs_dir"), ("cache", cache_root, "cache.dir")):
        existing = Path(folder).expanduser().absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        free = shutil.disk_usage(existing).free
        found = f"{free / _GIB:.1f} GiB free for {folder}"
        small = free < _SMALL_DISK
        fix = f"free some space, or {key}=<a folder on another disk>"
        checks.append(Check(f"disk of {name}", WARNING if small else OK, found, fix if small else ""))
    return checks


def _cache(folders: Sequence[Path]) -> List[Check]:
    present = [folder for folder in folders if folder.is_dir()]
    if not present:
        return [Check("cache", OK, f"{folders[0]} is empty")]
    for folder in present:
        if not os.access(str(folder), os.W_OK | os.X_OK):
            fix = "cache.dir=<a folder you can write to>, or IPURUN_CACHE_DIR"
            return [Check("cache", PROBLEM, f"no permission to write in {folder}", fix)]
    found = [entry for folder in present for entry in entries(folder)]
    text = f"{len(found)} executables, {sum(entry.size for entry in found) / 1e6:.1f} MB in {present[0]}"
    empty = [entry for entry in found if not entry.size]
    if empty:
        return [Check("cache", WARNING, f"{text}; {len(empty)} of them empty", "ipurun cache verify sets them aside")]
    return [Check("cache", OK, text)]


def _version_of(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> Optional[Tuple[int, ...]]:
    found = _VERSION.match(version)
    return tuple(int(part or 0) for part in found.groups()) if found else None
