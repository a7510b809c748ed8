"""Memory-mapped token files."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import ipurun
from ipurun.datasets.folder import numbered_files
from ipurun.datasets.tokens import TokenWindows, splits, write_tokens
from ipurun.errors import ConfigError
from ipurun.inspect.sampling import EpochOrder, ResumableSampler
from ipurun.recipes.gpt.dataset import CharacterWindows, encode
from ipurun.recipes.gpt.tokenise import main as tokenise


def test_windows_are_those_of_the_text_in_memory(tmp_path, capsys):
    text = "The White Rabbit \u2014 \xe9t\xe9\r\n" * 30
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert tokenise([str(tmp_path / "a.txt"), "--out", str(tmp_path / "a.bin")]) == 0
    assert "characters" in capsys.readouterr().err
    expected = CharacterWindows(encode((tmp_path / "a.txt").read_text(encoding="utf-8")), 16, 5)
    found = TokenWindows([tmp_path / "a.bin"], 16, 5)
    assert len(found) == len(expected) > 20
    for index in range(len(found)):
        assert all(torch.equal(one, other) for one, other in zip(found[index], expected[index]))


def test_windows_do_not_cross_files(tmp_path):
    for number, length in enumerate((25, 3, 40)):
        np.save(tmp_path / f"t-{number:02d}.npy", np.arange(length, dtype=np.uint32) + 100 * number)
    found = TokenWindows(numbered_files(str(tmp_path / "t-*.npy"), "data.file"), 8)
    assert len(found) == 3 + 0 + 4
    starts = [int(found[index][0][0]) for index in range(len(found))]
    assert starts == [0, 8, 16, 200, 208, 216, 224]
    assert all(torch.equal(tokens + 1, labels) for tokens, labels in (found[index] for index in range(len(found))))


@pytest.mark.parametrize(
    ("content", "message"),
    [(np.zeros((3, 4), np.int64), "shape (3, 4)"), (np.zeros(9), "float64"), (np.array([{}]), "object")],
)
def test_files_of_another_kind_are_refused(tmp_path, content, message):
    np.save(tmp_path / "t.npy", content, allow_pickle=True)
    with pytest.raises(ConfigError) as caught:
        splits(str(tmp_path / "t.npy"), 2)
    assert message.lower() in str(caught.value).lower()


def test_a_token_that_the_model_does_not_know_names_its_file(tmp_path):
    write_tokens(tmp_path / "t.bin", [np.array([1, 2, 99, 3, 4, 5])])
    with pytest.raises(ValueError, match=r"t\.bin has the token 99; the model knows 96 tokens"):
        TokenWindows([tmp_path / "t.bin"], 4, vocab_size=96)[0]
    with pytest.raises(ValueError, match="do not fit uint8"):
        write_tokens(tmp_path / "u.bin", [np.array([256])], "uint8")
    assert not (tmp_path / "u.bin").exists()


def test_a_missing_number_is_found(tmp_path):
    for number in (0, 1, 3):
        (tmp_path / f"t-{number:03d}.bin").write_bytes(b"\0" * 100)
    for pattern in ("t-*.bin", "t-{000..003}.bin"):
        with pytest.raises(ConfigError, match=r"t-002\.bin"):
            numbered_files(str(tmp_path / pattern), "data.file")
    assert [file.name for file in numbered_files(str(tmp_path / "t-{000..001}.bin"), "k")] == ["t-000.bin", "t-001.bin"]


def test_a_large_order_is_a_permutation_that_resumes_anywhere(monkeypatch):
    monkeypatch.setattr("ipurun.inspect.sampling._LARGEST_IN_MEMORY", 50)
    monkeypatch.setattr("ipurun.inspect.sampling._INDICES_AT_ONCE", 64)
    for length in (51, 64, 1000, 4097):
        orders = []
        for epoch in (0, 1):
            order = EpochOrder(length, 7, shuffle=True)
            order.set_epoch(epoch)
            orders.append(list(order))
            assert sorted(orders[-1]) == list(range(length))
            assert list(order.starting_at(length // 3)) == orders[-1][length // 3 :]
        assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
        sampler = ResumableSampler(EpochOrder(length, 7, shuffle=True), 7, epoch=1, skip=13)
        assert list(sampler) == orders[1][13:]
    # Spread evenly: the first quarter of the order comes from everywhere.
    first = np.array(orders[0][:1024])
    assert abs(first.mean() / 4097 - 0.5) < 0.05 and len(set((first // 64).tolist())) > 50


def test_a_run_resumed_in_the_middle_of_a_file_equals_a_whole_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        write_tokens(tmp_path / f"t-{number}.bin", [np.random.default_rng(number).integers(0, 96, 3000)])
    model = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "max_positions": 8}
    keys = {"data": {"file": "t-{0..1}.bin"}, "model": model, "micro_batch_size": 2, "devices": 2, "quiet": True}
    keys.update(device_iterations=2, eval={"max_samples": 4}, threads=1)
    words = ["data=tokens", "schedule=constant"]
    ipurun.train("gpt", overrides=[*words, "hydra.run.dir=whole"], max_steps=12, **keys)
    ipurun.train("gpt", overrides=[*words, "hydra.run.dir=half"], max_steps=6, **keys)
    ipurun.train(resume="half", max_steps=12, quiet=True)
    expected, found = (ipurun.load(run).model.state_dict() for run in ("whole", "half"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


PROGRAM = """
import json, resource, sys
import numpy, torch
import ipurun
with open("/proc/self/status") as stream:
    now = next(int(line.split()[1]) * 1024 for line in stream if line.startswith("VmData"))
limit = now + (512 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    numpy.fromfile("corpus.bin", numpy.uint16)
    refused = False
except MemoryError:
    refused = True
model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
result = ipurun.train("gpt", overrides=["data=tokens", "hydra.run.dir=run"], data={"file": "corpus.bin"}, model=model,
                      max_steps=3, threads=1, micro_batch_size=4, eval={"max_samples": 8}, quiet=True)
print(json.dumps([refused, result.status, result.step]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_gpt_trains_on_a_corpus_larger_than_its_memory(tmp_path):
    # 64 GB that take no place on the disk: a file with a hole. The process may have 512 MB besides its libraries.
    with (tmp_path / "corpus.bin").open("wb") as stream:
        stream.truncate(64 << 30)
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [True, "done", 3]
