import ast

from ipurun.api.calls import Call, Symbol, value_text
from ipurun.log.plan_text import calls_text


def test_values_as_source():
    assert value_text(("a", 1)) == "('a', 1)"
    assert value_text((1,)) == "(1,)"
    assert value_text({"IPU0": [0.5, True, None]}) == "{'IPU0': [0.5, True, None]}"
    assert value_text(Symbol("torch.float16")) == "torch.float16"
    nested = Call("poptorch.TensorLocationSettings", chain=(Call("useOnChipStorage", (False,)),))
    assert value_text(nested) == "poptorch.TensorLocationSettings().useOnChipStorage(False)"


def test_a_plan_reads_like_a_poptorch_program(plan_of):
    plan = plan_of(
        {
            "devices": 8,
            "gradient_accumulation": 8,
            "precision": "16.16",
            "pipeline.split": ["fc"],
            "memory.optimizer_state.on_chip": False,
            "optimizer": {"_target_": "poptorch.optim.AdamW", "lr": 0.1, "variable": ["weight_decay"]},
            "inference.split": [],
            "debug.log_level": "WARN",
        }
    )
    lines = calls_text(plan)
    ast.parse("\n".join(lines))
    for expected in (
        "os.environ['POPTORCH_LOG_LEVEL'] = 'WARN'  # debug.log_level",
        "opts.replicationFactor(4)  # devices",
        "opts.Training.gradientAccumulation(8)  # gradient_accumulation",
        "opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))  # pipeline",
        "opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))"
        "  # memory.optimizer_state",
        "model.half()  # precision=16.16",
        "poptorch.BeginBlock(model.get_submodule('fc'), 'fc', ipu_id=1)  # pipeline.split",
        "optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)  # optimizer",
        "optimizer.variable_attrs.markAsVariable('weight_decay')  # optimizer.variable",
        "training = poptorch.trainingModel(model, opts, optimizer)",
        "poptorch.removeBlocks(model)",
        "inference = poptorch.inferenceModel(model, inference_opts)",
    ):
        assert expected in lines


def test_the_shown_options_are_those_that_are_composed(plan_of, composed):
    """The text, run as Python on the emulator, gives the options that the builder composes."""
    import torch

    from ipurun import emulator

    keys = {
        "devices": 4,
        "partials": "half",
        "replication.tensor_sharding": True,
        "options": {
            "Training": {"setConvolutionDithering": True, "accumulationAndReplicationReductionType": "Sum"},
            "anchorTensor": {"g": "Gradient___fc.weight"},
            "_Popart": {"set": {"enableOutlining": False}},
        },
    }
    names = {"poptorch": emulator, "torch": torch}
    for line in calls_text(plan_of(keys)):
        if line.startswith("opts"):
            exec(line, names)
    assert repr(names["opts"]) == repr(composed(keys))
