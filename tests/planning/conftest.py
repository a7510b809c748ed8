import pytest

from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError
from ipurun.inspect.facts import Facts
from ipurun.planning import make_plan

NAMES = ("conv1", "conv2", "body", "body.0", "body.1", "body.1.norm", "fc")


def config_of(keys):
    """Return a config with dotted keys set."""
    config = RunConfig()
    for key, value in keys.items():
        node = config
        *groups, last = key.split(".")
        for group in groups:
            node = getattr(node, group)
        assert hasattr(node, last), key
        setattr(node, last, value)
    return config


@pytest.fixture
def plan_of():
    """Return a function that plans a config given as dotted keys, with some facts, environment and places of keys."""

    def plan(keys=None, facts=None, environ=None, places=None):
        surroundings = {"engine": "cpu", "engine_version": "test", "train_samples": 1000, "module_names": NAMES}
        surroundings.update(facts or {})
        return make_plan(config_of(keys or {}), Facts(**surroundings), environ or {"HOME": "/home/somebody"}, places)

    return plan


@pytest.fixture
def problems_of(plan_of):
    """Return a function that gives the problems of a config that cannot be planned."""

    def problems(keys, facts=None, environ=None, places=None):
        with pytest.raises(ConfigError) as raised:
            plan_of(keys, facts, environ, places)
        return raised.value.problems

    return problems


@pytest.fixture
def composed(plan_of):
    """Return a function that gives the emulator's `Options` of a planned config, for training or inference."""

    def compose(keys=None, mode="training", **more):
        from ipurun import emulator
        from ipurun.api.calls import apply_calls

        plan = plan_of(keys, **more)
        calls = plan.training_options if mode == "training" else plan.inference_options
        return apply_calls(emulator.Options(), calls, emulator)

    return compose
