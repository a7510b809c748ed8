import json
import os

import pytest

HOME_CACHE = os.path.join(os.path.expanduser("~"), ".cache", "ipurun")


class TestCache:
    @pytest.mark.parametrize(
        ("keys", "environ", "folder"),
        [
            ({"name": "mnist"}, {}, f"{HOME_CACHE}/executables/mnist"),
            ({"name": "mnist"}, {"IPURUN_CACHE_DIR": "/data"}, "/data/executables/mnist"),
            ({"name": "a/../b c"}, {"IPURUN_CACHE_DIR": "/data"}, "/data/executables/a_.._b_c"),
            ({"cache.dir": "/mine"}, {"IPURUN_CACHE_DIR": "/data"}, "/mine"),
            ({}, {"POPTORCH_CACHE_DIR": "/users"}, "/users"),
            ({"name": "x"}, {"POPTORCH_CACHE_DIR": "/users", "IPURUN_CACHE_DIR": "/data"}, "/data/executables/x"),
        ],
    )
    def test_folder_is_stable(self, plan_of, composed, keys, environ, folder):
        environ = environ or {"PATH": "/bin"}
        assert plan_of(keys, environ=environ).cache_dir == folder
        for mode in ("training", "inference"):
            kept = composed(keys, mode, environ=environ)._Popart.options
            assert (kept["cachePath"], kept["enableEngineCaching"]) == (folder, True)

    def test_off(self, plan_of, composed):
        assert plan_of({"cache.enabled": False}).cache_dir is None
        assert "cachePath" not in composed({"cache.enabled": False})._Popart.options

    def test_off_overrides_poptorchs_variable(self, composed, plan_of):
        environ = {"POPTORCH_CACHE_DIR": "/users"}
        assert plan_of({"cache.enabled": False}, environ=environ).cache_dir is None
        assert composed({"cache.enabled": False}, environ=environ)._Popart.options["enableEngineCaching"] is False

    def test_relative_folders_become_absolute(self, plan_of, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert plan_of({"cache.dir": "here"}).cache_dir == str(tmp_path / "here")


class TestProfile:
    def test_none(self, plan_of, composed):
        plan = plan_of({})
        assert (plan.profile_dir, dict(plan.environment)) == (None, {})
        assert "engineOptions" not in composed({})._Popart.options

    def test_graph(self, plan_of, composed):
        keys, environ = {"name": "n", "profile.kind": "graph"}, {"IPURUN_CACHE_DIR": "/data"}
        expected = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": "/data/profiles/n",
            "autoReport.all": "true",
        }
        for mode in ("training", "inference"):
            assert composed(keys, mode, environ=environ)._Popart.options["engineOptions"] == expected
        assert plan_of(keys, environ=environ).profile_dir == "/data/profiles/n"

    def test_graph_is_merged_with_the_users_variable(self, plan_of, composed):
        users = {"autoReport.directory": "/users", "target.hostSyncTimeout": "30", "autoReport.all": "false"}
        environ = {"POPLAR_ENGINE_OPTIONS": json.dumps(users)}
        keys = {"profile.kind": "graph", "profile.engine_options": {"autoReport.outputSerializedGraph": "false"}}
        plan = plan_of(keys, environ=environ)
        merged = json.loads(plan.environment["POPLAR_ENGINE_OPTIONS"])
        assert merged == {
            **users,
            "debug.allowOutOfMemory": "true",
            "autoReport.outputSerializedGraph": "false",
        }
        assert plan.profile_dir == "/users"
        kept = composed(keys, environ=environ)._Popart.options["engineOptions"]
        assert kept["autoReport.directory"] == "/users"

    def test_the_configs_folder_wins_over_the_variable(self, plan_of):
        environ = {"POPLAR_ENGINE_OPTIONS": '{"autoReport.directory": "/users"}'}
        plan = plan_of({"profile.kind": "graph", "profile.dir": "/mine"}, environ=environ)
        assert plan.profile_dir == "/mine"
        assert json.loads(plan.environment["POPLAR_ENGINE_OPTIONS"])["autoReport.directory"] == "/mine"

    def test_system(self, plan_of, composed):
        keys = {"name": "n", "profile.kind": "system"}
        plan = plan_of(keys, environ={"IPURUN_CACHE_DIR": "/data", "PVTI_OPTIONS": '{"buffer": "9"}'})
        assert json.loads(plan.environment["PVTI_OPTIONS"]) == {
            "enable": "true",
            "directory": "/data/profiles/n",
            "buffer": "9",
        }
        assert plan.profile_dir == "/data/profiles/n"
        assert "engineOptions" not in composed(keys)._Popart.options

    def test_a_variable_that_is_not_json_is_refused(self, problems_of):
        problem = problems_of({"profile.kind": "graph"}, environ={"POPLAR_ENGINE_OPTIONS": "autoReport.all=true"})[0]
        assert "POPLAR_ENGINE_OPTIONS" in problem.what
        assert problem.seen == "autoReport.all=true"


def test_log_level_is_set_before_the_engine_is_imported(plan_of):
    assert plan_of({"debug.log_level": "DEBUG"}).environment == {"POPTORCH_LOG_LEVEL": "DEBUG"}
