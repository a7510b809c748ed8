"""Pack what a bug report needs into one file, without secrets."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipurun.config.secrets import is_secret_name, mask_text, mask_word
from ipurun.errors import ConfigError
from ipurun.host.doctor import TOOLS, Check
from ipurun.host.tools import run_tool

__all__ = ["write_bundle"]

_RUN_FILES = ("config.yaml", "overrides.yaml", "origins.yaml", "plan.txt", "env.json", "summary.json", "log.txt")
_LONGEST_FILE = 200_000  # characters; the end of a longer file is kept


def write_bundle(path: Path, found: Dict[str, Any], checks: List[Check], run: Optional[str] = None) -> List[str]:
    """Write the bundle.

    Args:
        path: The zip file.
        found: What `ipurun env` shows.
        checks: What the doctor found.
        run: A run folder to include: its config, plan, log and summary, no weights.

    Returns:
        The names of the files in it.

    Raises:
        ConfigError: It cannot be written, or there is no such run.
    """
    texts = {
        "environment.json": json.dumps(found, indent=2, default=str),
        "doctor.txt": "\n".join(
            f"{check.state:<8} {check.name}: {check.found} {check.fix}".rstrip() for check in checks
        ),
    }
    for words in TOOLS:
        output = run_tool(*words)
        texts[f"tools/{words[0]}.txt"] = f"$ {output.command}\n{output.problem or output.text}"
    if run is not None:
        texts.update(_run_texts(run))
    secrets = [value for name, value in os.environ.items() if is_secret_name(name)]
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(name, mask_text(_masked_lines(text), secrets) + "\n")
    except OSError as error:
        raise ConfigError(
            "the bundle cannot be written",
            where="command line: --bundle",
            seen=f"{path}: {error.strerror}",
            fix="--bundle=FILE.zip in a folder that exists",
        ) from error
    return list(texts)


def _run_texts(run: str) -> Dict[str, str]:
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"`{run}` is not a run folder",
            where="command line: --run",
            seen="no config.yaml in it" if folder.is_dir() else "no such folder",
            fix="--run=FOLDER, the folder that a run printed",
        )
    return {
        f"run/{name}": (folder / name).read_text(encoding="utf-8", errors="replace")[-_LONGEST_FILE:]
        for name in _RUN_FILES
        if (folder / name).is_file()
    }


def _masked_lines(text: str) -> str:
    """Mask values by the names before them: the files of a run hold none, what tools print might."""
    return "\n".join(mask_word(line) for line in text.splitlines())
