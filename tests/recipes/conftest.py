import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    # A command puts the working folder there; the next test has another one.
    monkeypatch.setattr(sys, "path", list(sys.path))
