"""Marks on a model as the engine sees them: blocks, split matmuls, memory shares, overlapped I/O."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import pytest
import torch
from run_harness import built, config, inspected
from torch import nn
from torch.nn import functional

from ipurun import emulator
from ipurun.build.annotate import Annotations
from ipurun.errors import ConfigError
from ipurun.estimate.plan_estimate import PlannedConfig, Promises, estimate_plan, solve
from ipurun.inspect.batch_items import as_call
from ipurun.log.plan_text import calls_text
from ipurun.planning import make_plan
from ipurun.planning.plan import Serialized

PLACED: Dict[str, Any] = {"gradient_accumulation": 3, "micro_batch_size": 2, "metrics": {}}


def ipus_of(run: Any, operation: str) -> List[int]:
    run.train_loader.start()
    run.enter_training()
    run.training_model(*as_call(next(run.train_loader.epoch()))[0])
    return [placement.ipu_id for name, placement, _ in run.training_model.placements() if name == operation]


def test_operations_run_where_the_plan_says() -> None:
    assert ipus_of(built(**PLACED, pipeline__split=["second"]), "addmm") == [0, 1]
    blocks = {"first": 1, "second": 0}
    assert ipus_of(built(**PLACED, pipeline__blocks=blocks, pipeline__strategy="sharded"), "addmm") == [1, 0]


def refuse(words: Sequence[str]) -> PlannedConfig:
    raise ConfigError("these tests plan no suggestion")


PROMISES = Promises(refuse)


def planned(settings: Any) -> PlannedConfig:
    made = inspected(settings)
    return PlannedConfig(settings, make_plan(settings, made.facts), made)


def own(model: str, **changes: Any) -> Dict[str, Any]:
    return {**PLACED, "model": {"_target_": f"user_blocks.{model}"}, **changes}


@pytest.mark.parametrize("model", ["InForward", "AtModules"])
def test_blocks_of_the_models_code_are_used(model: str) -> None:
    run = built(**own(model))
    assert (run.plan.stages, run.plan.devices.per_replica) == (2, 2)
    assert any("in the model's own code" in line for line in calls_text(run.plan))
    assert ipus_of(run, "addmm")[-1] == 1


def test_blocks_of_the_models_code_and_of_the_config_combine() -> None:
    settings = config(**own("AtModules", pipeline__blocks={"middle": 2}, gradient_accumulation=5))
    settings.pipeline.auto_round = True
    plan = make_plan(settings, inspected(settings).facts)
    assert plan.stages == 3
    run = built(settings)
    assert ipus_of(run, "addmm") == [0, 2, 1]


@pytest.mark.parametrize(
    ("model", "changes", "ipus"),
    [
        ("AtModules", {}, [0, 0, 1]),
        ("AtModules", {"pipeline__blocks": {"middle": 2}}, [0, 2, 1]),
        ("Returning", {}, [0, 1, 0]),
        # AutoIncrement counts blocks from 1: stage 0 is what runs before any of them.
        ("Unplaced", {}, [1, 2, 3]),
        ("Unplaced", {"pipeline__stages": ["a", {"blocks": ["b", "c"], "ipu": 1}]}, [0, 1, 1]),
    ],
)
def test_the_estimate_places_user_blocks_where_they_run(model: str, changes: Dict[str, Any], ipus: List[int]) -> None:
    settings = config(**own(model, **{**changes, "gradient_accumulation": 7}))
    settings.pipeline.auto_round = True
    training = estimate_plan(planned(settings), PROMISES).training
    products = [op.index for op in training.traced.ops if op.name == "addmm"]
    assert [training.layout.ipu_of_op(index) for index in products] == ipus
    assert ipus_of(built(settings), "addmm") == ipus


@pytest.mark.parametrize(
    ("model", "changes", "ipus"),
    [
        ("Enclosed", {}, [0, 1]),
        ("EnclosedUnplaced", {}, [1, 2]),
        ("EnclosedLayers", {}, [0, 1]),
        ("EnclosedLayers", {"recompute__checkpoints": ["first"]}, [0, 1]),
        ("EnclosedLayers", {"precision_rules": {"first": "16"}}, [0, 1]),
    ],
)
def test_operations_after_an_ended_block_stay_in_it(model: str, changes: Dict[str, Any], ipus: List[int]) -> None:
    settings = config(**own(model, **{**changes, "gradient_accumulation": 5}))
    settings.pipeline.auto_round = True
    training = estimate_plan(planned(settings), PROMISES).training
    assert [training.layout.ipu_of_op(op.index) for op in training.traced.ops if op.name == "addmm"] == ipus
    assert training.layout.ipu_of_op(len(training.traced.ops) - 1) == ipus[-1]  # the loss

    run = built(settings)
    before = {name: value.clone() for name, value in run.user_model.state_dict().items()}
    run.train_loader.start()
    run.enter_training()
    features, classes = as_call(next(run.train_loader.epoch()))[0]
    losses = run.training_model(features, classes)
    placed = run.training_model.placements()
    assert [place.ipu_id for name, place, _ in placed if name == "addmm"] == ipus
    assert {place.ipu_id for name, place, _ in placed if name == "nll_loss_forward"} == {ipus[-1]}
    assert len({place.block_id for _, place, _ in placed}) <= 3  # the loss is in no separate block
    plain = type(run.user_model)()
    plain.load_state_dict(before)
    expected = [functional.cross_entropy(plain(x), y) for x, y in zip(features.split(2), classes.split(2))]
    torch.testing.assert_close(losses, torch.stack(expected).sum(), rtol=1e-3, atol=1e-3)

    run.enter_inference()
    run.inference_model(*as_call(next(iter(run.eval_loaders["eval"]))[0])[0])


@pytest.mark.parametrize(
    ("keys", "phases", "ipus"),
    [
        ({"pipeline__split": ["second"]}, (0, 1), (0, 0)),
        ({"pipeline__phases": ["first", {"blocks": ["second"], "ipu": 1}]}, (0, 1), (0, 1)),
    ],
)
def test_the_estimate_has_the_phases(keys: Dict[str, Any], phases: Tuple[int, ...], ipus: Tuple[int, ...]) -> None:
    settings = config(**PLACED, pipeline__strategy="serial_phased", **keys)
    training = estimate_plan(planned(settings), PROMISES).training
    assert (training.layout.phase_of_stage, training.layout.ipu_of_stage) == (phases, ipus)


def test_no_other_split_is_suggested_for_a_model_that_splits_itself() -> None:
    settings = config(**own("Returning", gradient_accumulation=7))
    subject = planned(settings)
    plan_estimate = estimate_plan(subject, PROMISES)
    assert not any("pipeline.split" in word for remedy in plan_estimate.remedies for word in remedy.overrides)
    with pytest.raises(ConfigError, match="the model's code already has one"):
        solve(subject, plan_estimate, PROMISES)


def test_a_module_that_already_begins_a_block_cannot_begin_another() -> None:
    settings = config(**own("AtModules", pipeline__split=["second"]))
    with pytest.raises(ConfigError, match="already begins a block in the model's code"):
        make_plan(settings, inspected(settings).facts)


def test_serialised_products_with_a_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: List[Tuple[Any, ...]] = []
    product = emulator.serializedMatMul

    def serialized(lhs: torch.Tensor, rhs: torch.Tensor, *how: Any) -> torch.Tensor:
        seen.append((tuple(lhs.shape), tuple(rhs.shape), *how))
        return product(lhs, rhs, *how)

    def share(tensor: torch.Tensor, proportion: float) -> torch.Tensor:
        seen.append((tuple(tensor.shape), proportion))
        return tensor

    monkeypatch.setattr(emulator, "serializedMatMul", serialized)
    monkeypatch.setattr(emulator, "set_available_memory", share)
    net = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3))
    x = torch.randn(5, 4)
    expected = net(x)
    layers = (Serialized("0", 3, "output_channels", keep_precision=True),)
    annotations = Annotations(net, emulator, "32.32", {}, (), layers, {"0": 0.1, "2": 0.2})
    annotations.install(())
    torch.testing.assert_close(net(x), expected)
    mode = emulator.MatMulSerializationMode.OutputChannels
    assert seen == [((5, 4), (4, 6), mode, 3, True), ((5, 6), 0.1), ((5, 2, 4), 0.2)]
    annotations.remove()
    net(x)
    assert len(seen) == 3


@pytest.mark.parametrize("rows", [8, 9, 3])
@pytest.mark.parametrize("padding", [None, 0, 2])
def test_a_serialised_table_gives_the_same_rows_and_gradients(rows: int, padding: Any) -> None:
    table = nn.Embedding(rows, 4, padding_idx=padding)
    indices = torch.randint(0, rows, (3, 5))
    expected = functional.embedding(indices, table.weight, padding)
    (gradient,) = torch.autograd.grad(expected.sin().sum(), table.weight)
    Annotations(nn.ModuleDict({"t": table}), emulator, "32.32", {}, (), (Serialized("t", 3, "rows"),)).install(())
    found = table(indices)
    assert torch.equal(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), table.weight)[0], gradient)


def test_a_table_that_renormalises_cannot_be_serialised() -> None:
    net = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(ConfigError, match="max_norm"):
        Annotations(net, emulator, "32.32", {}, (), (Serialized("0", 2, "rows"),)).install(())


class TestOverlappedIo:
    keys: Dict[str, Any] = {**PLACED, "memory__overlap_io": "accumulation_loop", "memory__io_tiles": 32}

    def test_inputs_and_outputs_are_marked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        marked = []

        def record(name: str) -> Any:
            mark = getattr(emulator, name)

            def call(structure: Any, mode: Any) -> Any:
                marked.append((name, mode))
                return mark(structure, mode)

            return call

        for name in ("set_overlap_for_input", "set_overlap_for_output"):
            monkeypatch.setattr(emulator, name, record(name))
        run = built(**self.keys)
        ipus_of(run, "addmm")
        mode = emulator.OverlapMode.OverlapAccumulationLoop
        assert set(marked) == {("set_overlap_for_input", mode), ("set_overlap_for_output", mode)}
        run.enter_inference()
        run.inference_model(*as_call(next(iter(run.eval_loaders["eval"]))[0])[0])

    def test_one_ipu_runs_sharded_by_itself(self) -> None:
        plan = built(**self.keys).plan
        assert any("ShardedExecution" in line for line in calls_text(plan))
        assert any("sharded" in note for note in plan.notes)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"pipeline__split": ["second"]}, "does not work with pipelined"),
            ({"memory__io_tiles": None}, "needs I/O tiles"),
            ({"output__mode": "final"}, "needs `output.mode` all or sum"),
        ],
    )
    def test_what_poptorch_would_refuse(self, changes: Dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            built(**{**self.keys, **changes})
