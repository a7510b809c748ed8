"""PopTorch's ops under their names in torch, as inserted by programs that rewrite torch.fx graphs."""

import subprocess
import sys

PROGRAM = """
from ipurun import emulator
emulator.install()
import poptorch
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x))

module = torch.fx.symbolic_trace(Model())
first = next(node for node in module.graph.nodes if node.target == "first")
with module.graph.inserting_before(first):
    module.graph.call_function(torch.ops.poptorch.set_attribute, ("__outline", "layer", "one"))
with module.graph.inserting_after(first):
    module.graph.call_function(torch.ops.poptorch.clear_attribute, ("__outline", "layer"))
module.recompile()
x = torch.ones(1, 2)
expected = module(x).detach()
poptorch._logging.setPopartLogLevel("TRACE")
found = poptorch.inferenceModel(module)(x)
torch.testing.assert_close(found, expected)
assert poptorch.Attribute._attributes == {}
"""


def test_attributes_are_set_and_cleared_in_a_rewritten_graph(child_environment):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=child_environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stderr.split("second/", 1)
    assert first.count("layer: layer:one") == first.count("output: first/") > 0
    assert "layer: layer:one" not in second


SCOPES_AND_CASTS = """
from ipurun import emulator
emulator.install()
import poptorch
import torch

model = torch.nn.Sequential(torch.nn.Linear(2, 2))
model[0].register_forward_pre_hook(lambda module, inputs: torch.ops.poptorch.push_name_scope("mine"))
model[0].register_forward_hook(lambda module, inputs, output: torch.ops.poptorch.pop_name_scope())
expected = model(torch.ones(1, 2))
poptorch.setLogLevel("DEBUG")
torch.testing.assert_close(poptorch.inferenceModel(model)(torch.ones(1, 2)), expected)
poptorch.setLogLevel("WARN")

class Cast(torch.nn.Module):
    def forward(self, x):
        return torch.ops.poptorch.internal_cast(torch.ops.poptorch.internal_cast(x, "FLOAT16") * 2, "FLOAT")

found = poptorch.inferenceModel(Cast())(torch.tensor([1 + 2**-12]))
print(found.dtype, found.item())
try:
    torch.ops.poptorch.internal_cast(found, "INT8")
except poptorch.Error as error:
    print(error)
"""


def test_name_scopes_and_casts_of_the_native_layer_are_captured(child_environment):
    ran = subprocess.run(
        [sys.executable, "-c", SCOPES_AND_CASTS], env=child_environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "/mine/Add:0" in ran.stderr
    result, error = ran.stdout.splitlines()
    assert result == "torch.float32 2.0"  # rounded to half precision on the way
    assert "Valid types: FLOAT, FLOAT16" in error
