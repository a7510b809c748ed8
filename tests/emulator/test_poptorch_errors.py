"""Error classes, their attributes and texts."""

import pickle
import re

import pytest

from ipurun import emulator as poptorch
from ipurun.api.manifest import load as load_manifest
from ipurun.emulator import _impl
from ipurun.emulator._impl import createNativeError
from ipurun.emulator.poptorch_core import TestErrorType, _throwTestError

MANIFEST = load_manifest()


def test_python_errors():
    error = poptorch.createPoptorchError("no device")
    assert type(error) is poptorch.Error
    assert str(error) == "'poptorch_py_error': no device"
    assert (error.message, error.type, error.location) == ("no device", "poptorch_py_error", "")


def test_classes():
    assert poptorch.Error.__bases__ == (Exception,)
    assert poptorch.RecoverableError.__bases__ == (poptorch.Error,)
    assert poptorch.UnrecoverableError.__bases__ == (poptorch.Error,)
    assert poptorch.ConfigFileError.__bases__ == (Exception,)
    assert poptorch.poptorch_core.Error is poptorch.Error


def test_error_types_match_the_manifest():
    assert list(TestErrorType.__members__) == MANIFEST["native_core"]["enums"]["TestErrorType"]


@pytest.mark.parametrize("error_type", list(TestErrorType))
def test_native_errors(error_type):
    with pytest.raises(poptorch.Error) as caught:
        _throwTestError(error_type)
    error = caught.value
    assert str(error).startswith("In ")
    assert f"'{error.type}': {error.message}" in str(error)
    assert "Error raised in:" in str(error)
    assert "throwTestError::bottomLevel" in str(error)
    assert error.location.count("throwTestError::topLevel") == 1
    assert "throwTestError" not in error.message


@pytest.mark.parametrize(
    ("error_type", "expected_class", "expected_type"),
    [
        (TestErrorType.Poptorch, poptorch.Error, "poptorch_cpp_error"),
        (TestErrorType.Popart, poptorch.Error, "popart_exception"),
        (TestErrorType.PopartInternal, poptorch.Error, "popart_internal_exception"),
        (TestErrorType.Poplibs, poptorch.Error, "poplibs_exception"),
        (TestErrorType.PoplarLinkError, poptorch.Error, "poplar_link_error"),
        (TestErrorType.PoplarUnrecoverable, poptorch.UnrecoverableError, "poplar_unrecoverable_runtime_error"),
        (TestErrorType.PoplarRecoverableFullReset, poptorch.RecoverableError, "poplar_recoverable_runtime_error"),
    ],
)
def test_native_error_classes(error_type, expected_class, expected_type):
    with pytest.raises(poptorch.Error) as caught:
        _throwTestError(error_type)
    assert type(caught.value) is expected_class
    assert caught.value.type == expected_type


def test_recoverable_errors_name_the_recovery_action():
    with pytest.raises(poptorch.RecoverableError) as caught:
        _throwTestError(TestErrorType.PoplarRecoverableFullReset)
    assert caught.value.recovery_action == "FULL_RESET"
    assert "FULL_RESET" in str(caught.value)


def test_native_errors_name_the_line_that_raised():
    error = createNativeError("no memory", "popart_exception")
    assert re.fullmatch(r"In test_poptorch_errors\.py:\d+: 'popart_exception': no memory", str(error))
    assert error.location == ""


def test_errors_are_pickled_with_their_attributes():
    error = _impl.createNativeError("lost", type="poplar_recoverable_runtime_error", recovery_action="IPU_RESET")
    read_back = pickle.loads(pickle.dumps(error))
    assert type(read_back) is poptorch.RecoverableError
    assert (str(read_back), read_back.message, read_back.recovery_action) == (str(error), "lost", "IPU_RESET")


def test_errors_can_be_raised_by_hand():
    assert str(poptorch.Error("mine")) == "mine"
    assert poptorch.Error("mine").message == "mine"
