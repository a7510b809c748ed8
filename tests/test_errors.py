"""Suggestions for misspelled names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ipurun
from ipurun.errors import error_chain, in_short, nearest, underlying_os_error


def test_spelling_last_part_and_parts_of_longer_names() -> None:
    assert nearest("epoch", ["seed", "epochs"]) == ["epochs"]
    assert nearest("shuffle", ["loader.shuffle", "seed"]) == ["loader.shuffle"]
    assert nearest("batch_size", ["micro_batch_size", "seed"]) == ["micro_batch_size"]


def test_one_module_finds_similar_names() -> None:
    files = Path(ipurun.__file__).parent.rglob("*.py")
    own = [path.name for path in files if "difflib" in path.read_text(encoding="utf-8")]
    assert own == ["errors.py"]


def test_suggestions_need_no_torch() -> None:
    code = "import sys, ipurun.errors, ipurun.config.foreign; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_interrupt_is_described_without_the_name_of_the_exception() -> None:
    assert in_short(KeyboardInterrupt()) == "stopped by a signal before it could save"
    assert in_short(ValueError("odd")) == "ValueError: odd"


def test_a_chain_that_is_a_loop_ends():
    first, second = ValueError("first"), OSError("second")
    first.__cause__, second.__context__ = second, first
    assert list(error_chain(first)) == [first, second]
    assert underlying_os_error(first) is second
