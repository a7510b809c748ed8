"""The emulator's names, parameters, defaults and enum values compared with the manifest of PopTorch 3.4."""

import abc
import enum
import importlib
import inspect

import pytest
import torch

import ipurun.emulator as poptorch
from ipurun.api.manifest import load as load_manifest

MANIFEST = load_manifest()
MODULES = {
    name: importlib.import_module(name.replace("poptorch", "ipurun.emulator", 1)) for name in MANIFEST["modules"]
}

# Public names of the package that PopTorch 3.4 does not have, with the reason.
EXTRA_NAMES = {
    "autocast": "PopTorch up to 3.0, for older programs",
    "autocasting": "PopTorch up to 3.0, for older programs",
    "exec": "runs an unmodified PopTorch program",
    "graph": "captured graphs, for tools that inspect models",
    "install": "makes `import poptorch` import the emulator",
    "logger": "imported by PopTorch for internal use, and used by its examples",
    "processes": "the processes that train together, for the launcher of ipurun",
    "register_cpu_implementation": "Python code of a custom op",
    "shim": "provides poptorch in child processes",
    "testing": "also an attribute of PopTorch once imported",
}
EXTRA_METHODS = {
    ("poptorch.options", "_PrecisionOptions"): {"autocastEnabled", "autocastPolicy"},
    ("poptorch.options", "_IExecutionStrategy"): {"stage_manager"},
    ("poptorch", "PoplarExecutor"): {"placements"},
    ("poptorch.optim", "Optimizer"): {"add_param_group"},  # inherited from torch, the second base
}


def expression(text):
    return eval(text, {"enums": poptorch.enums, "poptorch": poptorch, "torch": torch, **vars(poptorch.enums)})


def described(function, skip_self):
    parameters = list(inspect.signature(function).parameters.values())
    if skip_self:
        parameters = parameters[1:]
    kinds = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional_or_keyword",
        inspect.Parameter.KEYWORD_ONLY: "keyword_only",
        inspect.Parameter.VAR_POSITIONAL: "var_positional",
        inspect.Parameter.VAR_KEYWORD: "var_keyword",
    }
    return [(p.name, kinds[p.kind], p.default) for p in parameters]


def expected_parameters(entries):
    return [
        (entry["name"], entry["kind"], expression(entry["default"]) if "default" in entry else inspect.Parameter.empty)
        for entry in entries
    ]


def functions():
    for module, entry in MANIFEST["modules"].items():
        for name, function in entry.get("functions", {}).items():
            yield pytest.param(module, name, function, id=f"{module}.{name}")


def classes():
    for module, entry in MANIFEST["modules"].items():
        for name, described_class in entry.get("classes", {}).items():
            yield pytest.param(module, name, described_class, id=f"{module}.{name}")


def methods():
    for module, entry in MANIFEST["modules"].items():
        for class_name, described_class in entry.get("classes", {}).items():
            for name, method in described_class.get("methods", {}).items():
                yield pytest.param(module, class_name, name, method, id=f"{module}.{class_name}.{name}")


@pytest.mark.parametrize(("module", "name", "entry"), list(functions()))
def test_function(module, name, entry):
    assert described(getattr(MODULES[module], name), skip_self=False) == expected_parameters(entry["params"])


@pytest.mark.parametrize(("module", "name", "entry"), list(classes()))
def test_class(module, name, entry):
    found = getattr(MODULES[module], name)
    if entry["kind"] == "enum":
        assert {member: value.value for member, value in found.__members__.items()} == entry["members"]
        expected = enum.IntEnum if entry["bases"] == ["enum.IntEnum"] else enum.Enum
        assert issubclass(found, expected)
        assert issubclass(found, int) == (expected is enum.IntEnum)
        return
    ancestors = {base.__name__ for base in found.__mro__}
    assert {base.rsplit(".", 1)[-1] for base in entry["bases"]} <= ancestors
    if "init" in entry:
        assert described(found.__init__, skip_self=True) == expected_parameters(entry["init"])
    for attribute, details in entry.get("properties", {}).items():
        described_property = inspect.getattr_static(found, attribute)
        assert isinstance(described_property, property)
        assert (described_property.fset is not None) == details["settable"]


@pytest.mark.parametrize(("module", "class_name", "name", "entry"), list(methods()))
def test_method(module, class_name, name, entry):
    owner = getattr(MODULES[module], class_name)
    static = inspect.getattr_static(owner, name)
    function = static.__func__ if isinstance(static, (staticmethod, classmethod)) else static
    skip_self = not isinstance(static, staticmethod)
    assert described(function, skip_self) == expected_parameters(entry["params"])
    assert bool(getattr(function, "__isabstractmethod__", False)) == entry.get("abstract", False)


@pytest.mark.parametrize("module", sorted(MANIFEST["modules"]["poptorch"]["re_exported"]))
def test_names_are_exported_from_the_root(module):
    source = MODULES.get(module) or importlib.import_module(module.replace("poptorch", "ipurun.emulator", 1))
    for name in MANIFEST["modules"]["poptorch"]["re_exported"][module]:
        assert getattr(poptorch, name) is getattr(source, name)


@pytest.mark.parametrize("name", MANIFEST["documented_names"])
def test_documented_names_resolve(name):
    found = poptorch
    for part in name.split("."):
        found = getattr(found, part)
    assert found.__doc__


def test_block_ids_are_strings():
    assert MANIFEST["modules"]["poptorch.options"]["type_aliases"] == {"BlockId": "str"}
    assert poptorch.BlockId is str


def test_version_names_poptorch_and_a_snapshot():
    version, snapshot = poptorch.__version__.split("-", 1)
    assert version == MANIFEST["version"]
    assert snapshot


def test_no_other_public_names_except_the_extras():
    root = MANIFEST["modules"]["poptorch"]
    known = set(root["classes"]) | set(root["functions"]) | set(root["variables"])
    known.update(name for names in root["re_exported"].values() for name in names)
    known.update(text.split(" ")[0] for text in root["submodules"])
    public = {name for name in vars(poptorch) if not name.startswith("_") or name == "__version__"}
    own = {name for name in public if not inspect.ismodule(getattr(poptorch, name)) or name in poptorch.__all__}
    own.update(name for name in public if getattr(getattr(poptorch, name), "__name__", "").startswith("ipurun"))
    standard = {"annotations"}
    assert own - known - standard <= set(EXTRA_NAMES)
    assert known <= public | {"testing"}


def public_methods(owner):
    return {
        name
        for name, member in vars(owner).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, (staticmethod, classmethod)))
    }


@pytest.mark.parametrize(("module", "name", "entry"), list(classes()))
def test_no_other_public_methods_except_the_extras(module, name, entry):
    owner = getattr(MODULES[module], name)
    if entry["kind"] == "enum":
        assert set(owner.__members__) == set(entry["members"])
        return
    inherited = {method for base in owner.__mro__[1:] for method in vars(base)}
    extras = public_methods(owner) - set(entry.get("methods", {})) - inherited
    assert extras <= EXTRA_METHODS.get((module, name), set())


@pytest.mark.parametrize("name", sorted(MANIFEST["native_core"]["enums"]))
def test_native_enums(name):
    assert list(getattr(poptorch.poptorch_core, name).__members__) == MANIFEST["native_core"]["enums"][name]


def test_private_names_that_programs_use():
    core = poptorch.poptorch_core
    for name in ("Error", "TestErrorType", "_throwTestError", "_validateOptions", "isCompilingWithDispatcher"):
        assert hasattr(core, name)
    assert poptorch._impl.isDispatchTracing() is False
    assert core.isCompilingWithDispatcher() is False
    assert poptorch.options._OptionsDict.__name__ == "OptionsDict"
    assert callable(poptorch._impl._restoreWrapperIfNecessary)
    assert callable(poptorch._logging.setPopartLogLevel)
    assert issubclass(poptorch.ICustomArgParser, abc.ABC)


def test_wrapper_of_a_trained_model():
    entry = MANIFEST["modules"]["poptorch"]["user_model_wrapper_class"]

    class Net(torch.nn.Linear):
        pass

    model = Net(2, 2)
    model.register_buffer("seen", torch.zeros(1))
    poptorch.trainingModel(model)
    assert type(model).__name__ == entry["name_pattern"].replace("<ModelClassName>", "Net")
    assert isinstance(model, Net)
    for name in entry["added_methods"]:
        assert callable(getattr(model, name)), name
    assert f"{type(model.weight).__name__}(torch.nn.Parameter)" == entry["parameter_class"]
    assert f"{type(model.seen).__name__}(torch.Tensor)" == entry["buffer_class"]
    assert model._host_weights_version == 0
