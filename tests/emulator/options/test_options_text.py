"""Options from files, JSON and the environment."""

import json

import pytest

from ipurun import emulator as poptorch


def write(tmp_path, *lines):
    path = tmp_path / "options.conf"
    path.write_text("\n".join(lines))
    return str(path)


def test_file_of_statements(tmp_path):
    path = write(
        tmp_path,
        "deviceIterations(2)",
        "  replicationFactor(4)  ",
        "",
        "# a comment",
        "Training.gradientAccumulation(8) # trailing",
        "setExecutionStrategy(poptorch.ShardedExecution())",
        "autoRoundNumIPUs(True).modelName('net')",
        "_Popart.set('enableOutlining', False)",
    )
    options = poptorch.Options()
    assert options.loadFromFile(path) is options
    assert (options.device_iterations, options.replication_factor, options.model_name) == (2, 4, "net")
    assert options.Training.gradient_accumulation == 8
    assert isinstance(options._execution_strategy, poptorch.ShardedExecution)
    assert options._Popart.options["enableOutlining"] is False


def test_files_accumulate(tmp_path):
    options = poptorch.Options().loadFromFile(write(tmp_path, "deviceIterations(2)", "replicationFactor(4)"))
    options.loadFromFile(write(tmp_path, "deviceIterations(3)"))
    assert (options.device_iterations, options.replication_factor) == (3, 4)


def test_syntax_error_names_kept_line_and_applies_nothing(tmp_path):
    path = write(tmp_path, "deviceIterations(2)", "", "# comment", "outputMode(poptorch.OutputMode.All")
    options = poptorch.Options()
    with pytest.raises(poptorch.ConfigFileError) as caught:
        options.loadFromFile(path)
    first, second = str(caught.value).split("\n")
    assert first == "SyntaxError at line 2 of options.conf: unexpected EOF while parsing"
    assert second == "> options.outputMode(poptorch.OutputMode.All"
    assert options.device_iterations == 1
    assert not isinstance(caught.value, poptorch.Error)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("deviceIterations('2')", AssertionError),
        ("Precision.setPartialsType(3)", ValueError),
        ("noSuchSetter(3)", AttributeError),
        ("Precision.setPartialsType(torch.float16)", NameError),
    ],
)
def test_other_errors_propagate_and_earlier_lines_stay(tmp_path, line, error):
    options = poptorch.Options()
    with pytest.raises(error):
        options.loadFromFile(write(tmp_path, "replicationFactor(4)", line))
    assert options.replication_factor == 4


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        poptorch.Options().loadFromFile(str(tmp_path / "none.conf"))


def test_json_calls_setters():
    text = json.dumps(
        {
            "deviceIterations": 4,
            "Training.gradientAccumulation": 2,
            "connectionType": "ConnectionType.OnDemand",
            "logDir": "my.logs",
            "_Popart.set": ["saveInitializersToFile", "my_file.onnx"],
        }
    )
    options = poptorch.Options()
    assert options.from_json(text) is options
    assert (options.device_iterations, options.Training.gradient_accumulation) == (4, 2)
    assert (options.connection_type, options.log_dir) == (1, "my.logs")
    assert options._Popart.options["saveInitializersToFile"] == "my_file.onnx"


def test_items_of_lists_stay_strings():
    with pytest.raises(AssertionError):
        poptorch.Options().from_json('{"outputMode": ["OutputMode.EveryN", 2]}')


def test_default_options_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 7}')
    assert poptorch.Options().device_iterations == 7
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "{")
    with pytest.raises(json.JSONDecodeError):
        poptorch.Options()
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"noSuchSetter": 7}')
    with pytest.raises(AttributeError):
        poptorch.Options()


def test_cache_folder_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "folder")
    backend = poptorch.Options()._Popart.options
    assert (backend["cachePath"], backend["enableEngineCaching"]) == ("folder", True)
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "cachePath" not in poptorch.Options()._Popart.options
