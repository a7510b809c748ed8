"""Loggers and their levels."""

import logging
import subprocess
import sys

import pytest

from ipurun import emulator as poptorch
from ipurun.emulator import _logging


@pytest.fixture(autouse=True)
def _restore_level():
    yield
    poptorch.setLogLevel("WARN")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("TRACE", 5),
        (0, 5),
        ("DEBUG", 4),
        (1, 4),
        ("INFO", 3),
        (2, 3),
        ("WARN", 2),
        (3, 2),
        ("ERR", 1),
        (4, 1),
        ("OFF", 0),
        (6, 0),
    ],
)
def test_levels(level, shown, capsys):
    poptorch.setLogLevel(level)
    _logging.trace("line")
    for write in (_logging.native_logger.debug, _logging.logger.info, _logging.logger.warning, _logging.logger.error):
        write("line")
    assert capsys.readouterr().err.count("line") == shown


@pytest.mark.parametrize("level", [5, 7, -1])
def test_unknown_numbers(level):
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(level)


def test_unknown_names():
    expected = "Unknown log level: wibble. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"
    with pytest.raises(ValueError, match=expected):
        poptorch.setLogLevel("wibble")


def test_format(capsys):
    logging.getLogger("poptorch::python").warning("a %s", "message")
    assert " [poptorch::python] [warning] a message\n" in capsys.readouterr().err


@pytest.mark.parametrize("level", [0, "FOO"])
def test_backend_levels_are_names(level):
    with pytest.raises(ValueError, match="Level must be one of"):
        _logging.setPopartLogLevel(level)
    _logging.setPopartLogLevel("DEBUG")


def run_python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_environment_sets_level_and_destination(tmp_path, child_environment):
    log_file = tmp_path / "native.log"
    code = "from ipurun.emulator import _logging as l; l.native_logger.info('native'); l.logger.info('python')"
    child_environment.update(POPTORCH_LOG_LEVEL="INFO", POPTORCH_LOG_DEST=str(log_file))
    ran = run_python(code, **child_environment)
    assert ran.returncode == 0, ran.stderr
    assert "native" in log_file.read_text()
    assert "native" not in ran.stderr
    assert "python" in ran.stderr


def test_unknown_level_in_the_environment_fails_the_import(child_environment):
    child_environment.update(POPTORCH_LOG_LEVEL="LOUD")
    ran = run_python("import ipurun.emulator", **child_environment)
    assert ran.returncode == 1
    assert "ValueError: Unknown log level: LOUD" in ran.stderr


def test_programs_write_to_the_logger_of_the_package(capsys):
    poptorch.logger.warning("no IPU for %s", "this example")
    assert "] [poptorch::python] [warning] no IPU for this example\n" in capsys.readouterr().err
