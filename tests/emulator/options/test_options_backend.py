"""Backend checks of options at compile time."""

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.api.manifest import load as load_manifest

KEYS = load_manifest()["popart_option_keys"]
EXAMPLES = {"bool": True, "uint64": 1, "double": 0.5, "string": "text"}


def validate(**popart):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    for key, value in popart.items():
        options._Popart.set(key, value)
    poptorch.poptorch_core._validateOptions(options.toDict())


def own_key(key):
    """Keys that Options itself sets cannot be set again."""
    options = poptorch.Options().outputMode(poptorch.OutputMode.All).useIpuModel(True).useIpuId(0).randomSeed(1)
    options.modelName("m").useOfflineIpuTarget()
    options.TensorLocations.numIOTiles(32)
    phases = poptorch.SerialPhasedExecution("A")
    return key in options.toDict() or key in phases.backendOptions()


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in EXAMPLES for key in KEYS[kind] if not own_key(key)])
def test_known_keys_pass_with_their_type(kind, key):
    validate(**{key: EXAMPLES[kind]})


@pytest.mark.parametrize("key", [entry["key"] for entry in KEYS["enum"] if not own_key(entry["key"])])
def test_enum_keys_are_ints_in_range(key):
    validate(**{key: 0})
    with pytest.raises(poptorch.Error):
        validate(**{key: 99})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hardwareInstrumentations", {0, 1}),
        ("dotChecks", ["FINAL", "ALL"]),
        ("customCodelets", []),
        ("engineOptions", {"debug.allowOutOfMemory": "true"}),
        ("matmulOptions", {"a": "b"}),
        ("accumulateOuterFragmentSettings.excludedVirtualGraphs", ("0", "1")),
    ],
)
def test_containers_pass(key, value):
    validate(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("asdfasdf", True, "Unknown .* option asdfasdf"),
        ("enableOutlining", 1, "Unknown .* option enableOutlining"),
        ("enableOutlining", "true", "Unknown .* option enableOutlining"),
        ("outlineThreshold", 1, "Unknown .* option outlineThreshold"),
        ("defaultPrefetchBufferingDepth", 2.0, "Unknown .* option defaultPrefetchBufferingDepth"),
        ("enableOutlining", ["a"], "Unknown .* option enableOutlining"),
        ("enableOutlining", {"a": "b"}, "Unknown .* option enableOutlining"),
        ("dotChecks", torch.empty(1), "Unknown value type .* for option dotChecks"),
    ],
)
def test_unknown_keys_and_wrong_types(key, value, message):
    with pytest.raises(poptorch.Error, match=message) as caught:
        validate(**{key: value})
    assert caught.value.type == "poptorch_cpp_error"


def test_post_and_loss_is_out_of_range():
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.PostAndLoss)
    with pytest.raises(poptorch.Error):
        poptorch.poptorch_core._validateOptions(options.toDict())


def test_structured_options_pass():
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.anchorTensor("a", "b")
    options.setAvailableMemoryProportion({"IPU0": 0.1})
    options.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    options._Popart.setPatterns({"PadSum": True}, 0)
    poptorch.poptorch_core._validateOptions(options.toDict())


def test_values_are_logged_at_debug(capsys):
    poptorch.setLogLevel("DEBUG")
    try:
        validate(enableOutlining=True, dotChecks=["ALL"], engineOptions={"a.b": "c"}, autoRecomputation=1, logDir="x")
    finally:
        poptorch.setLogLevel("WARN")
    logged = capsys.readouterr().err
    for line in (
        "poptorch.Options set enableOutlining to value true",
        "poptorch.Options added ALL to dotChecks",
        "poptorch.Options set engineOptions[a.b] to c",
        "poptorch.Options set autoRecomputation to value 1",
        "poptorch.Options set replication_factor to value 1",
        "poptorch.Options set execution_mode to value 0",
        "[warning] Ignoring the PopART option logDir",
    ):
        assert line in logged
