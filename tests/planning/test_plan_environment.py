"""Variables of Graphcore's libraries as keys: what is set, who wins, and what a run records about it."""

import json

import pytest


def test_each_key_sets_its_variables(plan_of):
    keys = {
        "debug.log_level": "TRACE_ALL",
        "poplar.log_level": "DEBUG",
        "poplar.popart_log_level": "INFO",
        "poplar.log_dest": "poplar.log",
        "poplar.ipu_model_version": "ipu21",
    }
    assert plan_of(keys).environment == {
        "POPTORCH_LOG_LEVEL": "TRACE_ALL",
        "POPLAR_LOG_LEVEL": "DEBUG",
        "POPART_LOG_LEVEL": "INFO",
        "POPTORCH_LOG_DEST": "poplar.log",
        "POPART_LOG_DEST": "poplar.log",
        "POPLAR_LOG_DEST": "poplar.log",
        "POPTORCH_IPU_MODEL_VERSION": "ipu21",
    }


def test_a_key_wins_over_a_variable_of_poptorch_and_says_so(plan_of):
    plan = plan_of({"debug.log_level": "DEBUG"}, environ={"POPTORCH_LOG_LEVEL": "OFF"})
    assert plan.environment["POPTORCH_LOG_LEVEL"] == "DEBUG"
    assert "debug.log_level=DEBUG wins over POPTORCH_LOG_LEVEL=OFF of the environment" in plan.notes


def test_variables_of_poplar_win_over_keys_entry_by_entry(plan_of):
    keys = {"poplar.target_options": {"gatewayMode": "false", "ipuLinkTopology": "torus"}}
    environ = {"POPLAR_TARGET_OPTIONS": '{"gatewayMode": "true"}'}
    plan = plan_of(keys, environ=environ)
    merged = json.loads(plan.environment["POPLAR_TARGET_OPTIONS"])
    assert merged == {"gatewayMode": "true", "ipuLinkTopology": "torus"}
    assert any("POPLAR_TARGET_OPTIONS of the environment wins" in note for note in plan.notes)
    # The command starts over with the variable set, and must then have nothing to change.
    again = plan_of(keys, environ={"POPLAR_TARGET_OPTIONS": plan.environment["POPLAR_TARGET_OPTIONS"]})
    assert again.environment == plan.environment


def test_engine_options_are_passed_to_poptorch(composed):
    options = composed({"poplar.engine_options": {"opt.useAutoloader": "true"}})
    assert options._Popart.options["engineOptions"] == {"opt.useAutoloader": "true"}


def test_engine_options_of_the_environment_win(composed):
    environ = {"POPLAR_ENGINE_OPTIONS": '{"opt.useAutoloader": "false"}'}
    options = composed({"poplar.engine_options": {"opt.useAutoloader": "true"}}, environ=environ)
    assert options._Popart.options["engineOptions"] == {"opt.useAutoloader": "false"}


def test_the_origin_of_a_variable_is_the_key_and_where_it_was_set(plan_of):
    plan = plan_of({"poplar.log_level": "DEBUG"}, places={"poplar.log_level": "command line"})
    assert plan.environment_origins == {"POPLAR_LOG_LEVEL": "poplar.log_level (command line)"}


@pytest.mark.parametrize("text", ["gatewayMode=true", "[1]"])
def test_a_variable_that_is_not_json_is_reported(problems_of, text):
    problem = problems_of({"poplar.target_options": {"a": "b"}}, environ={"POPLAR_TARGET_OPTIONS": text})[0]
    assert "POPLAR_TARGET_OPTIONS is not a JSON object" in problem.what and problem.fix


def test_a_wait_that_is_not_a_number_is_reported(problems_of):
    problem = problems_of({}, environ={"POPTORCH_WAIT_FOR_IPU": "yes"})[0]
    assert problem.where == "environment" and "poplar.wait_for_ipu_minutes" in problem.fix


def test_a_wait_without_a_limit_is_noted(plan_of):
    plan = plan_of({"poplar.wait_for_ipu_minutes": 3.0}, environ={"POPTORCH_WAIT_FOR_IPU": "1"})
    assert any("without a limit" in note for note in plan.notes)


def test_an_empty_destination_is_reported(problems_of):
    assert problems_of({"poplar.log_dest": ""})[0].key == "poplar.log_dest"
