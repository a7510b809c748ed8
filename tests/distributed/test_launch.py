"""`ipurun train distributed=...` and `ipurun exec --instances`: start, signals, deaths, and what is left."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from user_project import enter_project

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.distributed.launch import run_torchrun
from ipurun.distributed.notes import EXIT_LOST, LaunchFolder
from ipurun.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
CODE = """
def splits(samples=48, seconds=0.0):
    class Points(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            time.sleep(seconds)
            return super().__getitem__(index)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=random)
    return {"train": Points(x, x.argmax(1) % 3), "test": Points(x[:10], x[:10].argmax(1) % 3)}
"""
LONG = ["+data.seconds=0.01", "max_steps=60", "checkpoint.every_steps=5", "eval.every_epochs=null"]
EXACT = "distributed.deterministic=true"


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    enter_project(tmp_path, monkeypatch, "launch_code", CODE, "epochs: 1\ndevices: 2\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the launch, whose notes tell the process ids


@contextlib.contextmanager
def started(*words):
    """A run of several processes in a separate session, none of which is left afterwards."""
    command = [sys.executable, "-m", "ipurun", "train", "+recipe=tiny", "distributed=torchrun", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, start_new_session=True
    )
    try:
        yield process
    finally:
        for pid in [process.pid, *instances().values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def instances(attempt=0):
    """Return the process ids of the instances by rank."""
    found = Path().glob(f"ipurun-launch-*/{attempt}/*.pid")
    return {int(path.stem): int(path.read_text()) for path in found}


def wait_for(condition, process):
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def checkpoints():
    return list(Path().glob("runs/tiny/*/checkpoints/step-*.json"))


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_over(pids):
    end = time.monotonic() + 30
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(lives, pids))


def weights(*words):
    """Return the weights of the same run in one process."""
    assert main(["train", "+recipe=tiny", "runs_dir=reference", "--quiet", EXACT, *words]) == 0
    return load(latest(RunFolder(next(Path("reference/tiny").iterdir()))))["model"]


def only_run():
    (path,) = Path("runs/tiny").iterdir()
    return RunFolder(path)


def test_a_killed_instance_restarts_all_from_the_last_checkpoint(capsys):
    with started(*LONG, EXACT, "distributed.max_restarts=1") as process:
        wait_for(checkpoints, process)
        first = instances()
        os.kill(first[1], signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search("instance 1 was killed( by SIGKILL)?: all instances were started again, 1 of 1", out)
    assert "resuming after step" in out
    assert is_over(first.values())
    expected = weights("max_steps=60", "eval.every_epochs=null")
    resumed = load(latest(only_run()))["model"]
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())


def test_without_restarts_the_message_names_the_instance_and_shows_its_log():
    with started(*LONG, "distributed.max_restarts=0") as process:
        wait_for(checkpoints, process)
        pids = instances()
        os.kill(pids[1], signal.SIGSEGV)
        err = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert "error: instance 1 was killed" in err
    assert "logs/instance-1.log" in err
    assert "step " in err.partition("seen")[2], "the end of its log"
    assert f"ipurun train resume={only_run()}" in err
    assert is_over(pids.values())


DIES = """
import os, signal, sys, time
from ipurun.distributed.environment import launched
from ipurun.distributed.notes import LaunchFolder, run_instance
def act():
    notes, started = LaunchFolder.of_this_process(), launched()
    if started.attempt:
        open(f"culprit-{started.rank}", "w").write(str(notes.culprit(started.attempt - 1)))
        return False
    while len(notes.pids()) < started.count:
        time.sleep(0.01)
    if started.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
sys.exit(run_instance(act))
"""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_one_that_was_killed_is_named_not_those_that_its_launcher_ends(rank):
    Path("dies.py").write_text(DIES)
    outcome = run_torchrun([sys.executable, "dies.py", str(rank)], 3, max_restarts=1)
    assert outcome.failure is None
    assert {path.read_text() for path in Path().glob("culprit-*")} == {str((rank, "was killed by SIGKILL"))}


def test_whoever_lost_another_names_it(tmp_path):
    notes = LaunchFolder(tmp_path / "notes")
    notes.path.mkdir()
    living, dying = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    notes.begin(0, 0)
    for rank, process in ((1, living), (2, dying)):
        (notes.path / "0" / f"{rank}.pid").write_text(str(process.pid))
    dying.kill()
    os.waitid(os.P_PID, dying.pid, os.WEXITED | os.WNOWAIT)  # it is not collected yet, as under load
    notes.end(0, 0, "lost", code=EXIT_LOST)
    living.kill()  # by the launcher, which has found the first
    for process in (living, dying):
        process.communicate()
    notes.end(0, 1, "failed", code=1)  # on the launcher's signal, in the middle of an import
    notes.note_exits(0, {0: EXIT_LOST, 1: 1, 2: -signal.SIGKILL})
    assert notes.culprit(0) == (2, "was killed by SIGKILL")


def test_a_signal_saves_and_ends_all_with_the_interrupt_exit_code():
    with started(*LONG, "interrupt_exit_code=85") as process:
        wait_for(checkpoints, process)
        pids = instances()
        process.send_signal(random.choice([signal.SIGTERM, signal.SIGINT]))
        out, err = process.communicate(timeout=120)
    assert process.returncode == 85, err
    assert "saving and stopping" in out
    assert f"ipurun train resume={only_run()}" in out
    assert is_over(pids.values())
    assert not [*Path().glob("ipurun-launch-*"), *Path().glob("torchelastic_*")]


def test_instances_do_not_outlive_the_process_that_started_them():
    with started(*LONG) as process:
        wait_for(checkpoints, process)
        pids = instances()
        process.kill()
        process.wait()
        assert is_over(pids.values())
    assert latest(only_run()) is not None


def test_poprun_gets_the_planned_command_and_runs_it(monkeypatch, capfd):
    Path("bin").mkdir()
    shutil.copy(Path(__file__).with_name("fake_poprun.py"), "bin/poprun")
    Path("bin/poprun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd() / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    words = ["devices=4", EXACT]
    given = [
        "distributed=poprun",
        "distributed.instances=2",
        "distributed.partition=mine",
        "distributed.environment=[HOME]",
    ]
    assert main(["train", "+recipe=tiny", *words, *given]) == 0
    out = capfd.readouterr().out
    assert "poprun --num-instances=2 --num-replicas=4 --ipus-per-replica=1 --vipu-partition=mine" in out
    assert "-x HOME" in out
    assert "'--vipu-partition': 'mine'" in Path("poprun.txt").read_text()
    run = only_run()
    assert "popdist.poptorch.Options(ipus_per_replica=1)" in run.plan_file.read_text()
    assert (run.path / "logs" / "instance-1.log").is_file()
    expected = weights(*words)
    assert all(torch.equal(value, load(latest(run))["model"][name]) for name, value in expected.items())


PROGRAM = """
import sys, torch, poptorch, popdist, popdist.poptorch
import horovod.torch as hvd
popdist.init()
hvd.init()
rank = popdist.getInstanceIndex()
opts = popdist.poptorch.Options(ipus_per_replica=1)
opts.randomSeed(42)
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(-1, 1), torch.zeros(32, 1))
loader = poptorch.DataLoader(opts, data, batch_size=2, shuffle=True, drop_last=True, auto_distributed_partitioning=True)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.loss = torch.nn.Linear(1, 1), torch.nn.MSELoss()
    def forward(self, x, y):
        out = self.layer(x / 32)
        return out, self.loss(out, y)

net = Net()
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
training = poptorch.trainingModel(net, opts, poptorch.optim.SGD(net.parameters(), lr=0.1))
seen = []
for x, y in loader:
    training(x, y)
    seen += x.reshape(-1).tolist()
assert sorted(sum(hvd.allgather_object(seen), [])) == list(range(32)), "every sample once"
weights = hvd.allgather(torch.cat([value.detach().reshape(1, -1) for value in net.parameters()]))
assert torch.equal(weights[:2], weights[2:]), "the instances have other weights"
assert hvd.allreduce(torch.tensor([float(rank)])).item() == 0.5
assert hvd.allreduce(torch.tensor([rank + 1]), op=hvd.Max).item() == 2
assert hvd.broadcast_object({"seed": rank}, root_rank=1) == {"seed": 1}
for length in (10, 1500, 3000):  # both short, one of them, and none
    assert hvd.allgather_object([rank] * (length + 999 * rank)) == [[0] * length, [1] * (length + 999)]
assert popdist.execute_on_instances({1}, lambda: hvd.allgather_object(rank)) == ([1] if rank else None)
assert popdist.execute_on_instances({0, 1}, lambda: hvd.allgather_object(rank)) == [0, 1]
answers = popdist.getNumInstances(), popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas()
sys.stdout.write(f"{rank}: {answers} {popdist.getReplicaIndexOffset()} {sys.argv[1:]}\\n")
sys.exit(3 if "fail" in sys.argv and rank else 0)
"""


def test_exec_runs_a_popdist_program_as_several_instances(capfd):
    Path("program.py").write_text(PROGRAM)
    assert main(["exec", "--instances", "2", "--replicas=4", "program.py", "--epochs", "1"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["0: (2, 2, 4) 0 ['--epochs', '1']", "1: (2, 2, 4) 2 ['--epochs', '1']"], err
    assert main(["exec", "--instances", "3", "--replicas", "4", "program.py"]) == 2
    assert "--replicas 3 or --replicas 6" in capfd.readouterr().err
