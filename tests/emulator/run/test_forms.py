"""The number of micro-batches computed at once: measured, remembered, and the same after a resume."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ipurun import emulator
from ipurun.emulator._run import chunks, forms
from ipurun.emulator._run.forms import Form


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(forms, "_remembered", {})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, x, y):
        return functional.cross_entropy(self.layers(x), y)


def start(accumulation=8, cache=None):
    torch.manual_seed(1)
    model = Model()
    options = emulator.Options().randomSeed(7)
    if cache is not None:
        options.enableExecutableCaching(str(cache))
    options.Training.gradientAccumulation(accumulation)
    return model, emulator.trainingModel(model, options, emulator.optim.SGD(model.parameters(), lr=0.1))


def data(count, rows=32):
    generator = torch.Generator().manual_seed(3)
    made = [(torch.randn(rows, 6, generator=generator), torch.randint(0, 5, (rows,), generator=generator))]
    while len(made) < count:
        made.append((torch.randn(rows, 6, generator=generator), made[0][1].roll(len(made))))
    return made


def weights(model, training):
    training.copyWeightsToHost()
    return {name: value.clone() for name, value in model.state_dict().items()}


def choosing(monkeypatch, size):
    """Let measurements end with this choice; return a list that grows with each."""
    made = []

    def choose(*args):
        made.append(size)
        return Form(size, "so measured")

    monkeypatch.setattr(chunks, "choose", choose)
    return made


@pytest.mark.parametrize(
    ("alone", "together", "size"), [(1.0, 0.5, 8), (1.0, 1.0, 8), (1.0, 1.04, 8), (1.0, 1.2, 1), (1.0, 5.0, 1)]
)
def test_one_by_one_if_that_is_clearly_quicker(alone, together, size):
    seconds = {"alone": [alone], "together": [together]}
    calls = []

    def again(name, value):
        calls.append(name)
        seconds[name].append(value)

    form = forms.choose(8, seconds, lambda: again("alone", alone), lambda: again("together", together))
    assert form.size == size
    assert "at once" in form.why
    assert len(calls) == (0 if together <= alone else 6)  # nothing more is measured if the first runs decide


def test_a_slow_first_run_does_not_decide():
    seconds = {"alone": [1.0], "together": [3.0]}
    form = forms.choose(4, seconds, lambda: seconds["alone"].append(1.0), lambda: seconds["together"].append(0.6))
    assert form.size == 4


def test_the_slower_form_is_not_used(monkeypatch, caplog, tmp_path):
    choosing(monkeypatch, 1)
    emulator.setLogLevel("DEBUG")
    try:
        _, training = start(cache=tmp_path)
        training(*data(1)[0])
    finally:
        emulator.setLogLevel("WARN")
    assert training._executable.chunks.size == 1
    assert "Micro-batches are run one by one: so measured" in caplog.text


def test_the_log_says_what_was_measured(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(forms, "_MARGIN", float("inf"))
    emulator.setLogLevel("DEBUG")
    try:
        _, training = start(cache=tmp_path)
        training(*data(1)[0])
    finally:
        emulator.setLogLevel("WARN")
    assert "Micro-batches are run 8 at once: " in caplog.text
    assert "ms for each of 8 at once" in caplog.text


@pytest.mark.parametrize("size", [1, 8])
def test_a_resumed_run_computes_in_the_form_of_the_first(size, monkeypatch, tmp_path):
    batches = data(4)
    choosing(monkeypatch, size)
    whole, training = start(cache=tmp_path / "first")
    for batch in batches:
        training(*batch)
    expected = weights(whole, training)
    model, training = start(cache=tmp_path / "first")
    for batch in batches[:2]:
        training(*batch)
    state, random = weights(model, training), training.rng_state
    assert random[2:3] == [size]  # and the key of the program
    monkeypatch.setattr(forms, "_remembered", {})  # as in another process,
    measured = choosing(monkeypatch, 9 - size)  # which would choose otherwise
    resumed, training = start(cache=tmp_path / "second")
    resumed.load_state_dict(state)
    training.compile(*batches[0])
    training.rng_state = json.loads(json.dumps(random))
    for batch in batches[2:]:
        training(*batch)
    assert not measured
    got = weights(resumed, training)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_form_that_the_micro_batches_do_not_allow_is_not_used(at_once_where_possible):
    _, training = start(accumulation=4)
    batch = data(1, rows=32)[0]
    training.compile(*batch)
    training.rng_state = [7, 3, 8]
    training(*batch)
    assert training._executable.chunks.size == 4
    assert training.rng_state[:3] == [7, 7, 4]


def test_the_random_state_of_earlier_versions_loads(at_once_where_possible):
    _, training = start()
    batch = data(1)[0]
    training.compile(*batch)
    training.rng_state = [7, 3]
    training(*batch)
    assert training.rng_state[:3] == [7, 11, 8]


def test_a_process_measures_a_program_once(monkeypatch, tmp_path):
    measured = choosing(monkeypatch, 1)
    for _ in range(3):
        _, training = start(cache=tmp_path)
        training(*data(1)[0])
    assert measured == [1]


@pytest.mark.parametrize("cache", ["none", "cannot be written"])
def test_without_a_cache_every_process_chooses_the_same(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    folder = None if cache == "none" else tmp_path / "file"
    found = []
    for size in (1, 8):  # what measuring would say in one process and in the next
        monkeypatch.setattr(forms, "_remembered", {})
        choosing(monkeypatch, size)
        model, training = start(cache=folder)
        training(*data(1)[0])
        found.append((training._executable.chunks.size, weights(model, training)))
    assert [size for size, _ in found] == [8, 8]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


@pytest.mark.parametrize(("own", "other"), [(8, 1), (1, 8)])
def test_of_two_processes_that_measure_at_once_one_decides(own, other, monkeypatch, tmp_path):
    def choose(*args):
        (key, folder), *_ = asked
        assert forms.share(key, Form(other, "quicker", key), folder) is not None
        return Form(own, "so measured")

    asked = []
    monkeypatch.setattr(chunks, "recall", lambda *args: asked.append(args))
    monkeypatch.setattr(chunks, "choose", choose)
    _, training = start(cache=tmp_path)
    training(*data(1)[0])
    assert training._executable.chunks.size == other
    assert not list(tmp_path.rglob("*.form.*"))


def test_a_form_is_plain_data():
    form = Form(8, "quicker")
    assert Form(**json.loads(json.dumps(dataclasses.asdict(form)))) == form


class Counter(TorchDispatchMode):
    """Counts the calls of operations."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class WithExtras(nn.Module):
    """Returns something that only it needs `cos` for, and perhaps random numbers before those of the loss."""

    def __init__(self, random):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.random = random

    def forward(self, x, y):
        scores = self.layer(x)
        extra = torch.cos(scores)
        if self.random:
            extra = functional.dropout(extra, 0.5)
        return extra, functional.cross_entropy(functional.dropout(scores, 0.2), y)


@pytest.mark.parametrize(("random", "cosines"), [(False, 1), (True, 4)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_outputs_that_nobody_reads_are_not_computed(random, cosines, accumulation):
    def trained(mode):
        torch.manual_seed(0)
        model = WithExtras(random)
        options = emulator.Options().randomSeed(5).deviceIterations(4).outputMode(mode)
        options.Training.gradientAccumulation(accumulation)
        training = emulator.trainingModel(model, options, emulator.optim.SGD(model.parameters(), lr=0.1))
        x, y = torch.randn(32, 6), torch.randint(0, 5, (32,))
        training(x, y)
        counter = Counter()
        with counter:
            outputs = training(x, y)
        return outputs, weights(model, training), counter.counts["cos"]

    every, expected, _ = trained(emulator.OutputMode.All)
    last, got, count = trained(emulator.OutputMode.Final)
    assert count == (1 if accumulation == 2 and random else cosines)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    rows = len(last[0])
    assert torch.equal(last[0], every[0][-rows:])
    assert float(last[1]) == float(every[1][-1])
