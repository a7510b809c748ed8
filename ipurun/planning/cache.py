"""`cache`: the folder of compiled executables, the same for every run of one name."""

from __future__ import annotations

import os
import re
from typing import Mapping, Optional

from ipurun.config.device_schema import CacheConfig

__all__ = ["cache_root", "executable_dir", "profile_dir"]


def cache_root(environ: Mapping[str, str]) -> str:
    """The cache folder of ipurun: IPURUN_CACHE_DIR, else ``~/.cache/ipurun``."""
    chosen = environ.get("IPURUN_CACHE_DIR", "").strip()
    if chosen:
        return _absolute(chosen)
    base = environ.get("XDG_CACHE_HOME", "").strip() or os.path.join("~", ".cache")
    return os.path.join(_absolute(base), "ipurun")


def executable_dir(cache: CacheConfig, name: str, environ: Mapping[str, str]) -> Optional[str]:
    """Where executables are kept, None where they are not.

    A folder for each run name, because PopART opens every file of a cache folder at each start.
    """
    if not cache.enabled:
        return None
    if cache.dir:
        return _absolute(cache.dir)
    users = environ.get("POPTORCH_CACHE_DIR", "").strip()
    if users and not environ.get("IPURUN_CACHE_DIR", "").strip():
        return _absolute(users)
    return os.path.join(cache_root(environ), "executables", _folder_name(name))


def profile_dir(name: str, environ: Mapping[str, str]) -> str:
    """Where profiles are recorded before they are moved into the run's folder."""
    return os.path.join(cache_root(environ), "profiles", _folder_name(name))


def _folder_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "run"


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
