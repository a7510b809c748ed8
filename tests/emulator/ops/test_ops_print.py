"""ipu_print_tensor: when and what it prints, and the format."""

import pytest
import torch

import ipurun.emulator as poptorch

ROWS = torch.tensor([[1.25, 2.5], [3.75, 4.0]])


def printed(capfd, tensor, **settings):
    model = torch.nn.Module()
    model.forward = lambda x: poptorch.ipu_print_tensor(x, "title", **settings) + 1
    executor = poptorch.inferenceModel(model)
    executor.compile(tensor)
    capfd.readouterr()
    executor(tensor)
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"digits": 8, "separator": " ", "open_bracket": "{", "close_bracket": "}"},
            "title: {\n {1.2500000 2.5000000}\n {3.7500000 4.0000000}\n}\n",
        ),
        (
            {
                "digits": 8,
                "separator": ",",
                "open_bracket": "[",
                "close_bracket": "]",
                "float_format": "scientific",
                "max_line_width": 15,
            },
            "title: [\n [1.2500000e+00,\n   2.5000000e+00]\n [3.7500000e+00,\n   4.0000000e+00]\n]\n",
        ),
        (
            {"digits": 3, "separator": ";", "float_format": "fixed"},
            "title: (\n (1.25;2.50)\n (3.75;4.00)\n)\n",
        ),
    ],
)
def test_layout(capfd, settings, expected):
    assert printed(capfd, ROWS, **settings) == expected


def test_integers_vectors_and_deeper_tensors(capfd):
    assert printed(capfd, torch.tensor([1, 2, 3], dtype=torch.int32)) == "title: (1, 2, 3)\n"
    deep = torch.tensor([[[1, 2], [3, 4]]], dtype=torch.int32)
    assert printed(capfd, deep) == "title: (\n (\n  (1, 2)\n  (3, 4)\n )\n)\n"


def test_large_tensors_show_their_edges(capfd):
    values = torch.arange(100, dtype=torch.int32)
    text = printed(capfd, values, summarise_threshold=10, edge_items=2)
    assert text == "title: (0, 1, ..., 98, 99)\n"
    assert "..." not in printed(capfd, values)


def test_prints_in_every_run_but_not_during_compilation(capfd):
    model = torch.nn.Module()
    model.forward = lambda x: poptorch.ipu_print_tensor(x * 2, "twice") + 0
    options = poptorch.Options().deviceIterations(2)
    executor = poptorch.inferenceModel(model, options)
    executor.compile(torch.tensor([1.0, 2.0]))
    assert "twice" not in capfd.readouterr().err
    executor(torch.tensor([3.0, 4.0]))
    assert [line for line in capfd.readouterr().err.splitlines() if "twice" in line] == [
        "twice: (6.000)",
        "twice: (8.000)",
    ]


def test_an_unused_result_is_not_printed(capfd):
    def forward(x):
        poptorch.ipu_print_tensor(x, "unused")
        return x + 1

    model = torch.nn.Module()
    model.forward = forward
    poptorch.inferenceModel(model)(torch.ones(2))
    assert "unused" not in capfd.readouterr().err


class Model(torch.nn.Module):
    def __init__(self, print_gradient):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([2.0]))
        self.print_gradient = print_gradient

    def forward(self, x):
        shown = poptorch.ipu_print_tensor(self.w * x, "t", self.print_gradient)
        return poptorch.identity_loss(shown * 5, "sum")


@pytest.mark.parametrize("print_gradient", [True, False])
def test_training_also_prints_the_gradient(capfd, print_gradient):
    model = Model(print_gradient)
    executor = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=0.1))
    executor.compile(torch.tensor([3.0]))
    capfd.readouterr()
    executor(torch.tensor([3.0]))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("t")]
    assert lines == ["t: (6.000)", "t_gradient: (5.000)"][: 1 + print_gradient]
    assert model.w.item() == pytest.approx(2.0 - 0.1 * 15.0)


def test_without_a_title_the_name_of_the_tensor_is_shown(capfd):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            y = poptorch.ipu_print_tensor(self.layer(poptorch.ipu_print_tensor(x)))
            return poptorch.identity_loss(y, reduction="sum")

    executor = poptorch.trainingModel(Model())
    executor(torch.ones(1, 1))
    titles = [line.split(": ")[0] for line in capfd.readouterr().err.splitlines() if ": (" in line]
    result = next(name for name in executor.getTensorNames() if name.startswith("layer/add"))
    assert titles == ["input_0", result, f"Gradient___{result}"]
