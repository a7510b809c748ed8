"""`ipurun watch`: pages of runs served on this machine, made again from the files whenever they are asked for.

Read-only. The server listens on the loopback address, answers only requests that name it by that address (a page on
the web could otherwise reach it through a name that points here, DNS rebinding) and that know the token in the address
that was printed (other users of the machine do not). An address names a run by a hash that is looked up among the runs
that are there: no part of a request becomes a path.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple
from urllib.parse import parse_qs, urlsplit

from ipurun.errors import ConfigError
from ipurun.pages.data import is_sweep, read_run, read_sweep, runs_below
from ipurun.pages.listing import entries_below, index_page
from ipurun.pages.report import recipe_config, run_page, sweep_page

__all__ = ["Watcher", "make_server"]

_LOOPBACK = "127.0.0.1"
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)


class Watcher:
    """The pages of a run, of a sweep, or of everything below a folder.

    Args:
        folder: The folder.
        token: The first part of every address.
    """

    def __init__(self, folder: Path, token: Optional[str] = None) -> None:
        self.folder = folder
        self.token = token or secrets.token_urlsafe(16)
        self._is_list = not (is_sweep(folder) or (folder / "config.yaml").is_file())
        self._recipes: Dict[Tuple[str, ...], Optional[Dict[str, Any]]] = {}  # composing one takes a while
        self._lock = threading.Lock()

    def answer(self, path: str, known_version: str = "") -> Tuple[int, str]:
        """Return the status and the page of an address.

        Args:
            path: The path of the address.
            known_version: The version that the reader has: the status is 204 if there is no newer one.
        """
        parts = [part for part in path.split("/") if part]
        if not parts or not secrets.compare_digest(parts[0].encode(), self.token.encode()):
            return 403, "the address is not the one that `ipurun watch` printed"
        with self._lock:
            if len(parts) == 1:
                return self._list(known_version) if self._is_list else self._page(self.folder, path, known_version, "")
            target = self._find(parts[1]) if len(parts) == 2 else None
            if target is None:
                return 404, "there is no such run"
            return self._page(target, path, known_version, f"/{self.token}/")

    def _list(self, known_version: str) -> Tuple[int, str]:
        version = _version(runs_below(self.folder))
        if version == known_version:
            return 204, ""
        found = entries_below(self.folder, with_size=False)
        return 200, index_page(self.folder, found, self._link, f"/{self.token}/", version)

    def _page(self, folder: Path, live: str, known_version: str, home: str) -> Tuple[int, str]:
        version = _version([folder])
        if version == known_version:
            return 204, ""
        if is_sweep(folder):
            try:
                return 200, sweep_page(read_sweep(folder), self._link, live, version, home)
            except ConfigError as error:
                return 404, error.problems[0].what
        run = read_run(folder)
        names = tuple(run.recipes)
        if names not in self._recipes:
            self._recipes[names] = recipe_config(run)
        return 200, run_page(run, recipe=self._recipes[names], live=live, version=version, home=home)

    def _link(self, folder: Path) -> str:
        return f"/{self.token}/{_identity(folder)}"

    def _find(self, identity: str) -> Optional[Path]:
        """Return the run, sweep or point with an identity."""
        candidates: List[Path] = [self.folder] if not self._is_list else runs_below(self.folder)
        for candidate in candidates:
            if _identity(candidate) == identity:
                return candidate
        for sweep in filter(is_sweep, candidates):
            for config in sorted(sweep.glob("*/config.yaml")):
                if _identity(config.parent) == identity:
                    return config.parent
        return None


def _identity(folder: Path) -> str:
    return hashlib.sha256(str(folder.absolute()).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _version(folders: List[Path]) -> str:
    """Return a text that changes when the files of runs do."""
    digest = hashlib.sha256()
    for folder in folders:
        files = ("metrics.jsonl", "summary.json", "lock.json", "manifest.json", "env.json")
        points = sorted(folder.glob("*/metrics.jsonl")) if is_sweep(folder) else []
        for path in [*(folder / name for name in files), *points]:
            try:
                found = path.lstat()
                # A running process renews its lock every few seconds: that it is there is enough.
                state = "there" if path.name == "lock.json" else f"{found.st_size} {found.st_mtime_ns}"
            except OSError:
                state = "-"
            digest.update(f"{path} {state}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    server_version = "ipurun"
    sys_version = ""
    timeout = 20  # seconds for a request
    watcher: Watcher

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        host, (_, port, *_) = self.headers.get("Host", ""), self.server.socket.getsockname()
        allowed = {f"{name}:{port}" for name in (_LOOPBACK, "localhost")}
        if host not in allowed:
            self._send(421, "this server is only for its own machine", with_body)
            return
        address = urlsplit(self.path)
        version = parse_qs(address.query).get("version", [""])[0]
        status, text = self.watcher.answer(address.path, version)
        self._send(status, text, with_body)

    def _send(self, status: int, text: str, with_body: bool) -> None:
        body = text.encode("utf-8", "replace")
        kind = "text/html" if status == 200 else "text/plain"
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS:
            self.send_header(name, value)
        self.end_headers()
        if with_body and status != 204:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the runs."""


def make_server(watcher: Watcher, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of pages on the loopback address.

    Args:
        watcher: Makes the pages.
        port: The port; 0 for any that is free.

    Raises:
        ConfigError: The port cannot be used.
    """
    handler = type("Handler", (_Handler,), {"watcher": watcher})
    try:
        server = ThreadingHTTPServer((_LOOPBACK, port), handler)
    except (OSError, OverflowError) as error:
        seen = str(getattr(error, "strerror", None) or error)
        raise ConfigError(f"port {port} cannot be used", seen=seen, fix="--port 0 takes any that is free") from error
    server.daemon_threads = True
    return server
