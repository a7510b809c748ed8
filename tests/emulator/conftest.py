"""Fixtures shared by several parts of the emulator's tests."""

import os

import pytest

import ipurun


@pytest.fixture
def child_environment():
    """Return an environment for a child Python that can import ipurun, without this process's poptorch settings."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(ipurun.__file__)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POPTORCH_", "PVTI_"))}
    kept.update(PYTHONPATH=root, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    return kept


@pytest.fixture
def at_once_where_possible(monkeypatch):
    """Compute micro-batches at once wherever that is possible, whether or not it is quicker on this machine."""
    from ipurun.emulator._run import chunks, forms

    monkeypatch.setattr(forms, "_remembered", {})
    monkeypatch.setattr(chunks, "choose", lambda size, *measured: forms.Form(size, "not measured"))
