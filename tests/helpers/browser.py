"""Chromium without a window, for tests of pages; `CHROMIUM` names one that is not on the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), "")
OPTIONS = (  # as root, and without anything from the network
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WHY_SKIPPED = f"no Chromium on PATH ({', '.join(NAMES)}), and CHROMIUM is not set"


class Browser:
    """Chromium without a window, spoken to over two pipes."""

    def __init__(self, folder: str) -> None:
        from_us, self._commands = os.pipe()
        self._answers, to_us = os.pipe()
        # Recent versions show the page only to users who asked for such pages, on chrome://chrome-urls.
        (Path(folder) / "Local State").write_text('{"internal_only_uis_enabled": true}')
        options = [*OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]

        def keep_pipes() -> None:  # Chromium reads from descriptor 3 and writes to 4
            commands, answers = os.dup(from_us), os.dup(to_us)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *options],
            preexec_fn=keep_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._number = 0
        self._received = b""

    def call(self, method: str, session: str = "", **params: Any) -> Dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        left = memoryview(json.dumps(message).encode() + b"\0")
        while left:
            left = left[os.write(self._commands, left) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer and "exceptionDetails" not in answer["result"], answer
                result: Dict[str, Any] = answer["result"]
                return result

    def _read(self) -> Dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._answers, 65536)
            assert part, "Chromium has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: Dict[str, Any] = json.loads(message)
        return answer

    def close(self) -> None:
        os.close(self._commands)
        self._process.kill()
        self._process.wait()
        os.close(self._answers)
