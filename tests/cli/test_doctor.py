"""`env --doctor` and `--bundle`, with Graphcore's tools replaced by scripts."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List
from unittest import mock

import pytest

from ipurun.cli.main import main
from ipurun.host import doctor
from ipurun.host.tools import ipu_ids, partitions, read_ipus, run_tool

GC_INFO = """\
Graphcore device listing:
Partition: p1 [active]
-+- Id: [0], target: [Fabric], IPU-M host: [10.1.5.10], IPU#: [3]
-+- Id: [1], target: [Fabric], IPU-M host: [10.1.5.10], IPU#: [2]
-+- Id: [2], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [10.1.5.10], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [10.1.5.10], IPU#: [2]
"""
VIPU = """\
 Partition   | Cluster  | ILDs | GW Routing | ILD Routing | Size | GCDs | State
---------------------------------------------------------------------------------
 p1          | c1       | 1    | DEFAULT    | RINGSWNC    | 2    | 1    | {state}
---------------------------------------------------------------------------------
"""


def monitor(*processes: str) -> str:
    ipus = [
        {
            "id": str(number),
            "average board temp": "29.6 C",
            "average die temp": "39.2 C",
            "clock": "1330MHz",
            "ipu power": f"{100 + number}.5 W",
            "ipu utilisation": "12.00%",
            "ipu utilisation (session)": "3.00%",
            "hexoatt active size (bytes)": "1024",
            "hexopt active size (bytes)": "1000",
            "user process id": process,
        }
        for number, process in enumerate(processes)
    ]
    return json.dumps({"cards": [{"type": "M2000", "ipus": ipus}]})


@pytest.fixture(name="tools")
def fixture_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts programs with a given output on an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))

    def install(name: str, output: str, code: int = 0) -> None:
        (folder / f"{name}.txt").write_text(output)
        script = folder / name
        script.write_text(f"#!/bin/sh\n/bin/cat {folder}/{name}.txt\nexit {code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    return install


def checks(**environ: str) -> Dict[str, doctor.Check]:
    return {check.name: check for check in doctor.diagnose(environ={**os.environ, **environ})}


def test_free_ipus_and_partitions_are_counted(tools: Callable[..., None]) -> None:
    tools("gc-info", GC_INFO)
    tools("gc-monitor", monitor("4711", "N/A"))
    tools("vipu", VIPU.format(state="ACTIVE"))
    found = checks(IPUOF_VIPU_API_PARTITION_ID="p1")
    assert (found["IPUs"].state, found["IPUs"].found) == ("ok", "2 IPUs, 1 free")
    assert found["partitions"].found == "p1 (2 IPUs, ACTIVE)"


def test_ipus_in_use_are_reported_with_what_to_do(tools: Callable[..., None]) -> None:
    tools("gc-info", GC_INFO)
    tools("gc-monitor", monitor("4711", "4712"))
    check = checks()["IPUs"]
    assert check.state == "warning" and "4711, 4712" in check.found and "poplar.wait_for_ipu_minutes" in check.fix


@pytest.mark.parametrize(
    ("output", "code", "seen"), [("", 0, "lists no IPU"), ("no driver\n", 3, "exit code 3: no driver")]
)
def test_tools_that_find_nothing_or_fail(tools: Callable[..., None], output: str, code: int, seen: str) -> None:
    tools("gc-info", output, code)
    check = checks()["IPUs"]
    assert check.state == "problem" and seen in check.found and check.fix


def test_a_partition_that_does_not_exist_or_is_broken(tools: Callable[..., None]) -> None:
    tools("vipu", VIPU.format(state="ERROR"))
    assert "vipu reset partition p1" in checks()["partitions"].fix
    check = checks(IPUOF_VIPU_API_PARTITION_ID="other")["partitions"]
    assert check.state == "problem" and "no partition other" in check.found


def test_an_sdk_that_is_not_there_or_not_sourced(tools: Callable[..., None]) -> None:
    assert checks()["SDK"].state == "absent"
    missing = checks(POPLAR_SDK_ENABLED="/nowhere")["SDK"]
    assert missing.state == "problem" and "/nowhere" in missing.found
    with mock.patch.object(doctor, "_version_of", return_value="3.4.0"), mock.patch("importlib.util.find_spec"):
        assert "source" in checks()["SDK"].fix


def test_versions_that_do_not_fit_together(tools: Callable[..., None], tmp_path: Path) -> None:
    sdk = tmp_path / "poplar_sdk-ubuntu_20_04-3.3.0+1403"
    sdk.mkdir()
    versions = {"poptorch": "3.4.0+123", "torch": "1.13.1", "hydra-core": "1.3.2", "omegaconf": "2.3.0"}
    with mock.patch.object(doctor, "_version_of", versions.get), mock.patch("importlib.util.find_spec"), mock.patch(
        "importlib.metadata.requires", return_value=["torch==2.0.1"]
    ):
        found = doctor.diagnose(environ={"POPLAR_SDK_ENABLED": str(sdk)})
    texts = [check.found for check in found if check.name == "versions"]
    assert texts == [
        "PopTorch 3.4.0+123 in an SDK 3.3.0",
        "PopTorch needs torch 2.0.1, torch 1.13.1 is installed",
    ]


def test_small_shared_memory_and_few_files(tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: mock.Mock(free=64 * 2**20, total=64 * 2**20))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 1024))
    tools("gc-info", GC_INFO)
    found = checks()
    assert "--shm-size" in found["/dev/shm"].fix
    assert "ulimit -n" in found["ulimit -n"].fix and "memlock" in found["ulimit -l"].fix
    assert found["disk of runs"].state == "warning" and "cache.dir" in found["disk of cache"].fix


def test_an_empty_executable_in_the_cache(tools: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "cache/executables/mnist"
    folder.mkdir(parents=True)
    (folder / "whole.popef").write_text("x")
    assert checks()["cache"].state == "ok"
    (folder / "cut.popef").touch()
    check = checks()["cache"]
    assert check.state == "warning" and "cut.popef" in check.fix


def test_a_check_that_fails_does_not_end_the_others(
    tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_limits", lambda: 1 / 0)
    names = [check.name for check in doctor.diagnose()]
    assert "doctor" in names and "cache" in names


def test_the_command_shows_each_check_with_advice_and_an_exit_code(tools: Callable[..., None], capsys: Any) -> None:
    assert main(["env", "--doctor"]) == 0
    text = capsys.readouterr().out
    assert "SDK" in text and "try  " in text
    tools("gc-info", "", 1)
    assert main(["env", "--doctor"]) == 1
    assert "FAIL IPUs" in capsys.readouterr().out
    assert main(["env", "--doctor", "--json"]) == 1
    assert {check["name"] for check in json.loads(capsys.readouterr().out)["doctor"]} >= {"SDK", "IPUs", "cache"}


def test_a_bundle_has_what_a_report_needs_and_no_secrets(
    tools: Callable[..., None], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "WARN")
    tools("gc-info", GC_INFO + "token=sesame99\nused 0123456789abcdef\n")
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: a\n")
    (run / "log.txt").write_text("the key is 0123456789abcdef\n")
    assert main(["env", "--bundle", "--run", str(run)]) == 0
    assert "wrote ipurun-report.zip" in capsys.readouterr().out
    with zipfile.ZipFile("ipurun-report.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"environment.json", "doctor.txt", "tools/gc-info.txt", "run/config.yaml", "run/log.txt"} <= set(texts)
    everything = "".join(texts.values())
    assert "0123456789abcdef" not in everything and "sesame99" not in everything
    assert "POPTORCH_LOG_LEVEL" in texts["environment.json"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--run", "x"], "`--run` goes with --bundle"),
        (["--bundle=report"], "`--bundle` writes a zip file"),
        (["--bundle=nowhere/report.zip"], "the bundle cannot be written"),
        (["--bundle", "--run", "nowhere"], "`nowhere` is not a run folder"),
    ],
)
def test_bad_words_have_one_message(tools: Callable[..., None], capsys: Any, words: List[str], what: str) -> None:
    assert main(["env", *words]) == 2
    error = capsys.readouterr().err
    assert what in error and "  try " in error and "  at " in error


def test_what_gc_monitor_says_about_each_ipu() -> None:
    first, second = read_ipus(monitor("4711", ""))
    assert first.sensors == {
        "power_watts": 100.5,
        "board_celsius": 29.6,
        "die_celsius": 39.2,
        "clock_mhz": 1330.0,
        "utilisation_percent": 12.0,
        "memory_bytes": 2024.0,
    }
    assert (first.ipu, first.process, second.ipu, second.process) == ("0", "4711", "1", "")


def test_groups_of_ipus_are_not_counted_as_ipus() -> None:
    assert ipu_ids(GC_INFO) == [0, 1]
    assert [(each.name, each.size) for each in partitions(VIPU.format(state="ACTIVE"))] == [("p1", 2)]


def test_a_tool_that_hangs_is_left_alone(tools: Callable[..., None], tmp_path: Path) -> None:
    script = tmp_path / "bin/gc-info"
    script.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    script.chmod(0o755)
    assert "no answer" in run_tool("gc-info", "-l", timeout_seconds=0.2).problem
