"""The backend's log of the programs it compiles."""

import pytest
import torch

import ipurun.emulator as poptorch


@pytest.fixture
def log_of(capfd):
    def compiled(level, model):
        poptorch._logging.setPopartLogLevel(level)
        try:
            poptorch.inferenceModel(model).compile(torch.ones(3, 8))
        finally:
            poptorch._logging.setPopartLogLevel("WARN")
        return [line for line in capfd.readouterr().err.split("\n") if line]

    return compiled


class Norms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.GroupNorm(4, 8)
        self.second = torch.nn.GroupNorm(2, 8)

    def forward(self, x):
        with poptorch.Attribute(__outline={"layer": "embedding"}):
            x = self.first(x)
        return self.second(x)


@pytest.mark.parametrize(
    ("level", "letters"), [("WARN", set()), ("INFO", {"I"}), ("DEBUG", {"I", "D"}), ("TRACE", {"I", "D", "T"})]
)
def test_the_level_determines_what_is_written(log_of, level, letters):
    lines = [line.split() for line in log_of(level, Norms()) if line.startswith("popart:")]
    assert {words[2].rstrip(":") for words in lines} == letters


def test_ops_are_logged_with_their_attributes(log_of):
    lines = log_of("DEBUG", Norms())
    starts = [index for index, line in enumerate(lines) if " D: Op " in line]
    ops = {
        lines[start].split('"')[1].split("/")[0]: lines[start:end] for start, end in zip(starts, [*starts[1:], None])
    }
    assert "ai.graphcore.GroupNormalization:1" in ops["first"][0]
    assert "  layer: layer:embedding" in ops["first"]
    assert "  layer: layer:embedding" not in ops["second"]
