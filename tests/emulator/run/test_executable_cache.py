"""The executable cache of the CPU engine: what hits, what misses, and what happens to damaged entries."""

import json
import logging
import multiprocessing
import os
import signal
import time

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.emulator._executor.cache_files import about_checksum, sealed, unsealed
from ipurun.emulator._run import chunks, forms
from ipurun.emulator.graph import cache_prospect, cache_use

SECONDS = "POPTORCH_EMULATOR_CACHE_SECONDS"


class Net(torch.nn.Module):
    """Two layers, with the constants, buffers, random numbers and blocks that programs have."""

    def __init__(self, hidden=4, scale=2.0):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(3, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.second = torch.nn.Linear(hidden, 2)
        self.scale = scale
        self.calls = []

    def forward(self, x, y):
        self.calls.append("forward")
        with poptorch.Block("a", ipu_id=0):
            hidden = torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5)
        poptorch.Block.start("b", ipu_id=0)
        out = self.second(hidden) * torch.tensor([self.scale, 1.0])
        return out, torch.nn.functional.cross_entropy(out, y)


def batch(samples=8):
    torch.manual_seed(2)
    return torch.randn(samples, 3), torch.randint(0, 2, (samples,))


@pytest.fixture(autouse=True)
def _everything_is_cached(monkeypatch):
    monkeypatch.setenv(SECONDS, "0")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def options(folder, seed=3, **settings):
    opts = poptorch.Options().randomSeed(seed)
    opts.enableExecutableCaching(str(folder))
    for name, value in settings.items():
        getattr(opts, name)(value)
    return opts


def trained(folder, model=None, optimizer=None, opts=None, calls=2):
    model = model or Net()
    optimizer = optimizer or poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, opts or options(folder), optimizer)
    samples = 8 * training.options.device_iterations
    for _ in range(calls):
        training(*batch(samples))
    return training


def state(folder, **changes):
    return cache_use(trained(folder, calls=1, **changes)).state


def entries(folder, ending=".graph"):
    return sorted(name for name in os.listdir(folder / "cpu") if name.endswith(ending))


def test_a_loaded_program_trains_to_the_same_bits_and_shows_the_same(folder):
    plain = trained(folder, opts=poptorch.Options().randomSeed(3))
    first, second = trained(folder), trained(folder)
    assert [cache_use(each).state for each in (plain, first, second)] == ["off", "miss", "hit"]
    assert cache_use(first).key == cache_use(second).key
    expected = plain.model.state_dict()
    for each in (first, second):
        found = each.model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert each.placements() == plain.placements()  # operation, block and source line
        assert each._debugGetPopartIR() == plain._debugGetPopartIR()
        assert each.getTensorNames() == plain.getTensorNames()
        assert each.model.calls == ["forward"]  # forward runs once in Python, whether captured or traced


def test_lr_and_seed_hit(folder):
    assert state(folder) == "miss"
    for lr in (0.2, 0.3):
        model = Net()
        assert (
            state(folder, model=model, optimizer=poptorch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)) == "hit"
        )
    assert state(folder, opts=options(folder, seed=9)) == "hit"
    assert state(folder, opts=options(folder, logDir="elsewhere")) == "hit"
    assert len(entries(folder)) == 1


def test_what_an_executable_holds_misses(folder):
    assert state(folder) == "miss"

    def sgd(model, **values):
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for name, value in values.items():
            optimizer.variable_attrs.markAsConstant(name)
            optimizer.param_groups[0][name] = value
        return optimizer

    for hidden, scale in ((5, 2.0), (4, 3.0)):
        assert [state(folder, model=Net(hidden, scale)) for _ in range(2)] == ["miss", "hit"]
    for changed in (
        {"opts": options(folder, deviceIterations=2)},
        {"opts": options(folder, deviceIterations=4)},
        {"opts": options(folder, outputMode=poptorch.OutputMode.Sum)},
    ):
        assert state(folder, **changed) == "miss", changed
        assert state(folder, **changed) == "hit", changed
    for momentum in (0.9, 0.8):
        model = Net()
        assert state(folder, model=model, optimizer=sgd(model, momentum=momentum)) == "miss"
        model = Net()
        assert state(folder, model=model, optimizer=sgd(model, momentum=momentum)) == "hit"


def test_source_lines_are_those_of_the_code_as_it_is_now(folder, tmp_path):
    """Lines that were added above a model change nothing in the program."""
    code = "import torch\nclass Doubled(torch.nn.Module):\n    def forward(self, x):\n        return x.sin() * 2\n"

    def lines(shift):
        file = tmp_path / f"shifted_{shift}.py"
        file.write_text("\n" * shift + code)
        namespace = {"__name__": "user"}
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        executor = poptorch.inferenceModel(namespace["Doubled"](), options(folder))
        executor(torch.ones(3))
        return cache_use(executor).state, {source.rpartition(":")[2] for _, _, source in executor.placements()}

    assert lines(0) == ("miss", {"4"})
    assert lines(5) == ("hit", {"9"})


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Through(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, x):
        return poptorch.identity_loss((self.function(self.weight) * x).sum(), "none")


def with_hook(weight):
    result = weight * 2
    result.register_hook(lambda grad: grad * 5)
    return result


def test_functions_of_the_user_are_never_taken_from_the_cache(folder, caplog):
    """All of these have the same forward operations."""
    gradients = []
    for function in (lambda weight: weight * 2, OwnGradient.apply, with_hook):
        model = Through(function)
        training = poptorch.trainingModel(model, options(folder), poptorch.optim.SGD(model.parameters(), lr=1.0))
        training(torch.ones(3))
        gradients.append(float(1 - model.state_dict()["weight"][0]))
        uncached = cache_use(training)
        assert uncached.state == ("uncached" if gradients[1:] else "miss")
    assert gradients == [2, 5, 10]
    assert len(entries(folder)) == 1 and "functions or hooks" in uncached.why


def test_the_bodies_of_a_branch_are_not_cached(folder):
    class Chosen(torch.nn.Module):
        def forward(self, x):
            return poptorch.cond(x[0] > 0, torch.neg, [x], torch.abs, [x])[0]

    executor = poptorch.inferenceModel(Chosen(), options(folder))
    executor(torch.ones(3))
    assert cache_use(executor).state == "uncached" and "cond" in cache_use(executor).why
    assert entries(folder) == []


def test_weights_are_not_a_part_of_a_program(folder):
    class Scaled(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3,), value))

        def forward(self, x):
            return x * self.weight * self.weight.data

    results = [poptorch.inferenceModel(Scaled(value), options(folder))(torch.ones(3)) for value in (1.0, 2.0)]
    assert [result.tolist() for result in results] == [[1.0] * 3, [4.0] * 3]


def test_a_model_that_asks_for_the_device_runs_as_in_a_capture(folder):
    class Asking(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            y = x.sin()
            assert y.device.type == "cpu" and not y.is_meta
            return y * torch.full((3,), self.factor, device=y.device) + y.new_ones(3).to(x.device)

    def run(factor):
        executor = poptorch.inferenceModel(Asking(factor), options(folder))
        return executor(torch.zeros(3) + 1.0), cache_use(executor).state

    (first, missed), (second, found), (third, other) = run(2.0), run(2.0), run(3.0)
    assert [missed, found, other] == ["miss", "hit", "miss"]
    assert torch.equal(first, second) and torch.allclose(third, torch.tensor(1.0).sin() * 3 + 1)


def test_what_compiles_quickly_is_not_stored(folder, monkeypatch):
    monkeypatch.delenv(SECONDS)
    training = trained(folder)
    assert cache_use(training).state == "uncached" and "less than 2 s" in cache_use(training).why
    assert entries(folder) == []


@pytest.mark.parametrize(("cpu_seconds", "left"), [(1000.0, 1), (0.0, 0)], ids=["busy machine", "quick to compile"])
def test_an_entry_is_dropped_if_loading_it_takes_more_cpu_time(folder, monkeypatch, cpu_seconds, left):
    trained(folder)
    monkeypatch.delenv(SECONDS)
    about = next(folder.glob("cpu/*.json"))
    _change(about, compile_seconds=0.0, compile_cpu_seconds=cpu_seconds)
    assert cache_use(trained(folder)).saved_seconds < 0
    assert len(entries(folder)) == left


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other"])
def test_a_damaged_entry_is_set_aside_and_built_again(folder, damage, caplog):
    expected = trained(folder).model.state_dict()
    (name,) = entries(folder)
    path = folder / "cpu" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    damaged = {"flip": bytes(content), "truncate": path.read_bytes()[:-9], "empty": b"", "other": b"\x80\x04N."}[damage]
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        again = trained(folder)
    assert cache_use(again).state == "miss" and "damaged" in cache_use(again).why
    assert all(torch.equal(value, again.model.state_dict()[key]) for key, value in expected.items())
    assert entries(folder) == [name] and entries(folder, ".broken") == [f"{name}.broken"]
    assert (folder / "cpu" / f"{name}.broken").read_bytes() == damaged
    assert state(folder) == "hit"


def test_an_entry_runs_no_code(folder, monkeypatch):
    """Whoever can write an entry with a right checksum can name operations of torch, and nothing else."""
    trained(folder)
    (name,) = entries(folder)
    path = folder / "cpu" / name
    data = unsealed(path.read_bytes())
    hostile = [
        {**data, "ops": [["os::system"], *data["ops"][1:]]},
        {**data, "ops": [["aten::__class__.mro"], *data["ops"][1:]]},
        {**data, "nodes": [[row[0], row[1], {"a=print()": 1}, *row[3:]] for row in data["nodes"]]},
        {**data, "specs": [[row[0], row[1], "load", row[3]] for row in data["specs"]]},
    ]
    for entry in hostile:
        path.write_bytes(sealed(entry))
        assert state(folder) == "miss"
        assert state(folder) == "hit"


def test_the_file_about_an_entry(folder):
    for _ in range(3):
        trained(folder)
    (name,) = entries(folder, ".json")
    about = json.loads((folder / "cpu" / name).read_text())
    assert about["mode"] == "training" and about["hits"] == 2 and about["engine"] == "cpu"
    assert about["versions"]["torch"] == str(torch.__version__) and about["compile_seconds"] > 0
    assert about["bytes"] == (folder / "cpu" / name.replace(".json", ".graph")).stat().st_size
    assert about["created"] < about["last_use"] <= time.time()


def test_the_cache_can_be_asked_before_a_compile(folder):
    training = poptorch.trainingModel(Net(), options(folder))
    assert cache_prospect(training, batch(), {}).state == "miss"
    assert not folder.exists()
    training(*batch())
    again = poptorch.trainingModel(Net(), options(folder))
    found = cache_prospect(again, batch(), {})
    assert (found.state, found.key) == ("hit", cache_use(training).key) and found.compile_seconds > 0
    assert not again.isCompiled()


def test_a_folder_that_cannot_be_written_is_only_warned_of(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert state(tmp_path / "file") == "uncached"
    assert "could not be saved to the cache" in caplog.text


def start_forks(number, target, *args):
    """Start copies of this process, which are ended with it at the latest."""

    def run():
        torch.set_num_threads(1)  # it would wait for threads that only this process has
        target(*args)

    forks = [multiprocessing.get_context("fork").Process(target=run, daemon=True) for _ in range(number)]
    for fork in forks:
        fork.start()
    return forks


def _compile_slowly(folder, results, started):
    """Compile in a child process, slowly enough for others to come meanwhile."""

    class Slow(torch.nn.Module):
        def forward(self, x):
            started.set()
            time.sleep(0.3)
            return x * 2

    os.environ[SECONDS] = "0"
    executor = poptorch.inferenceModel(Slow(), options(folder))
    executor(torch.ones(3))
    results.put(cache_use(executor).state)


def test_of_two_processes_one_compiles_and_the_other_loads(folder):
    context = multiprocessing.get_context("fork")
    results, started = context.Queue(), context.Event()
    children = start_forks(2, _compile_slowly, folder, results, started)
    states = sorted(results.get(timeout=60) for _ in children)
    for child in children:
        child.join(60)
    assert states == ["hit", "miss"]
    assert len(entries(folder)) == 1


def _compile_and_die(folder, started):
    from ipurun.emulator._executor import cache_files

    def half_written(path, content):
        with open(f"{path}.{os.getpid()}.partial", "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            started.set()
            time.sleep(60)

    cache_files.write_completely = half_written
    os.environ[SECONDS] = "0"
    trained(folder)


def test_a_process_killed_while_it_writes_blocks_nobody(folder):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    (child,) = start_forks(1, _compile_and_die, folder, started)
    assert started.wait(60)
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert entries(folder, ".partial") and not entries(folder)
    assert state(folder) == "miss"
    assert state(folder) == "hit"
    assert entries(folder, ".partial") == []


class Foldable(Net):
    """A model without constants, so that its micro-batches can be computed at once."""

    def forward(self, x, y):
        out = self.second(self.norm(self.first(x)).relu())
        return out, torch.nn.functional.cross_entropy(out, y)


class TestForms:
    """The number of micro-batches computed at once is measured once, for all processes."""

    def _call(self, folder, state=None):
        """Make a call in a process that remembers nothing; return the number, and the state with which to resume."""
        forms._remembered.clear()
        opts = options(folder)
        opts.Training.gradientAccumulation(4)
        net = Foldable()
        model = poptorch.trainingModel(net, opts, poptorch.optim.SGD(net.parameters(), lr=0.1))
        model.compile(*batch(32))
        if state is not None:
            model.rng_state = state
        model(*batch(32))
        found = model._executable.chunks.size, model.rng_state
        model.destroy()
        return found

    def _refuse(self, *args):
        raise RuntimeError("compared or measured again")

    @pytest.mark.parametrize("size", [1, 4])
    def test_the_next_process_takes_the_choice_of_the_first(self, folder, monkeypatch, size):
        monkeypatch.setattr(chunks, "choose", lambda *args: forms.Form(size, "test"))
        assert self._call(folder)[0] == size
        monkeypatch.setattr(chunks, "choose", self._refuse)
        monkeypatch.setattr(chunks, "_compare", self._refuse)
        assert self._call(folder)[0] == size
        assert self._call(folder.with_name("other"))[0] == 1  # nothing is known there

    @pytest.mark.parametrize("size", [1, 4])
    def test_a_resumed_run_keeps_it_whatever_the_data(self, tmp_path, monkeypatch, size):
        monkeypatch.setattr(chunks, "choose", lambda *args: forms.Form(size, "test"))
        state = self._call(tmp_path / "one")[1]
        monkeypatch.setattr(chunks, "_compare", self._refuse)
        assert self._call(tmp_path / "two", state)[0] == size
        assert self._call(tmp_path / "three", state[:3])[0] == 1  # a state of another program is compared

    def test_a_damaged_file_is_ignored(self, folder, monkeypatch):
        monkeypatch.setattr(chunks, "choose", lambda *args: forms.Form(4, "test"))
        self._call(folder)
        (file,) = (folder / "cpu").glob("*.form")
        whole = file.read_bytes()
        flipped = whole.replace(b'"size":4', b'"size":2')
        wrong = [sealed(data) for data in ({"size": "x"}, {"size": -1}, {"more": 1}, {"size": 4, "program": "another"})]
        for content in (b"", b"{", b"[]", whole[:-3], flipped, *wrong):
            file.write_bytes(content)
            assert self._call(folder)[0] == 4
        assert unsealed(file.read_bytes())["size"] == 4


class TestFoldedGraphs:
    """The graph of several micro-batches is made once, and loaded by the next process."""

    def _train(self, folder):
        forms._remembered.clear()
        opts = options(folder)
        opts.Training.gradientAccumulation(4)
        net = Foldable()
        model = poptorch.trainingModel(net, opts, poptorch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            model(*batch(32))
        assert model._executable.chunks.size == 4
        model.destroy()
        return net.state_dict()

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch):
        monkeypatch.setattr(chunks, "choose", lambda *args: forms.Form(4, "test"))

    @pytest.fixture
    def folds(self, monkeypatch):
        """Return a list that grows whenever a graph is folded."""
        made, fold = [], chunks.fold
        monkeypatch.setattr(chunks, "fold", lambda *args: made.append(1) or fold(*args))
        return made

    def test_it_is_loaded_with_the_same_weights_to_the_bit(self, folder, folds):
        expected = self._train(folder)
        assert folds == [1]
        again = self._train(folder)
        assert folds == [1]
        assert all(torch.equal(value, again[key]) for key, value in expected.items())
        (name,) = [name for name in entries(folder, ".json") if "at-once" in name]
        about = json.loads((folder / "cpu" / name).read_text())
        assert about["mode"] == "training, 4 at once" and about["hits"] == 1 and about["compile_seconds"] > 0
        assert about["versions"]["torch"] == torch.__version__

    @pytest.mark.parametrize("damage", ["flip", "truncate", "another size", "another graph", "no drawings"])
    def test_a_damaged_one_is_set_aside_and_made_again(self, folder, folds, damage, caplog):
        expected = self._train(folder)
        (name,) = [name for name in entries(folder) if "at-once" in name]
        path = folder / "cpu" / name
        content = path.read_bytes()
        data = unsealed(content)
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        damaged = {
            "flip": bytes(changed),
            "truncate": content[:-5],
            "another size": sealed({**data, "size": 2}),
            "another graph": sealed({**data, "graph": {**data["graph"], "ops": [["os::system"]]}}),
            "no drawings": sealed({**data, "drawings": [[[4], [1], "float32"]]}),
        }
        path.write_bytes(damaged[damage])
        with caplog.at_level(logging.WARNING):
            again = self._train(folder)
        assert "set aside" in caplog.text and folds == [1, 1]
        assert all(torch.equal(value, again[key]) for key, value in expected.items())
        assert (folder / "cpu" / f"{name}.broken").exists()
        self._train(folder)
        assert folds == [1, 1]

    def test_what_is_made_quickly_is_not_stored(self, folder, folds, monkeypatch):
        monkeypatch.setenv(SECONDS, "1000")
        for _ in range(2):
            self._train(folder)
        assert folds == [1, 1] and entries(folder) == []

    @pytest.mark.parametrize(("cpu_seconds", "left"), [(1000.0, 1), (0.0, 0)])
    def test_one_that_takes_longer_to_load_than_to_make_is_removed(self, folder, monkeypatch, cpu_seconds, left):
        self._train(folder)
        monkeypatch.delenv(SECONDS)
        (about,) = folder.glob("cpu/*-at-once.json")
        _change(about, compile_cpu_seconds=cpu_seconds)
        self._train(folder)
        assert len(list(folder.glob("cpu/*-at-once.graph"))) == left

    def test_another_program_does_not_find_it(self, folder, folds, monkeypatch):
        self._train(folder)
        monkeypatch.setattr(
            Foldable,
            "forward",
            lambda self, x, y: (x, torch.nn.functional.cross_entropy(self.second(self.first(x)), y)),
        )
        self._train(folder)
        assert folds == [1, 1]


@pytest.mark.parametrize("damage", ["", "[]", "flipped", '{"hits": "x", "compile_seconds": "y"}'])
def test_a_damaged_file_about_an_entry_does_no_harm_and_is_written_again(folder, damage):
    trained(folder)
    (name,) = entries(folder, ".json")
    path = folder / "cpu" / name
    path.write_text(path.read_text().replace('"hits": 0', '"hits": 8') if damage == "flipped" else damage)
    found = cache_use(trained(folder))
    assert (found.state, found.saved_seconds) == ("hit", None)
    about = json.loads(path.read_text())
    assert (about["hits"], about["mode"], about["versions"]["torch"]) == (1, "training", torch.__version__)


def _change(path, **values):
    """Change what a file about an entry says, as if it had been written so."""
    about = {**json.loads(path.read_text()), **values}
    del about["checksum"]
    path.write_text(json.dumps({**about, "checksum": about_checksum(about)}))
