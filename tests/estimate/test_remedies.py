"""Remedies: each was tried, with what it saves, and the best come first."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytest
from estimate_toys import chain

from ipurun.estimate import advice
from ipurun.estimate.advice import Remedy, remedies_for
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.search import Search
from ipurun.estimate.stages import layout_of_cuts, single_ipu
from ipurun.estimate.types import EstimatedModel, Settings, StageLayout, Trial, Verdict
from ipurun.inspect.traced_model import TracedModel

MACHINE = Machine()
ADAM: Dict[str, Any] = {"state_bytes": 8.0, "state_tensors": 2, "compute_bytes": 2, "accumulator_bytes": 4.0}


def _estimated(
    traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine = MACHINE
) -> EstimatedModel:
    return EstimatedModel(traced, layout, settings, machine, estimate(traced, layout, settings, machine))


def _remedies(model: EstimatedModel) -> List[Remedy]:
    """Return the remedies if the plan of each is what the search expects."""
    proposed: Dict[Tuple[str, ...], Trial] = {}

    def planned(overrides: Sequence[str]) -> Optional[Trial]:
        return proposed.get(tuple(overrides))

    search = Search(model.traced, model.machine)
    for change in advice._changes(model, search, False):
        proposed[change.overrides] = Trial(
            _estimated(model.traced, change.layout, change.settings, model.machine), None
        )
    return remedies_for(Trial(model, None), search, planned)


def _by_override(model: EstimatedModel) -> Dict[str, Remedy]:
    return {" ".join(remedy.overrides): remedy for remedy in _remedies(model)}


def test_optimizer_state_off_chip_saves_its_size() -> None:
    traced = chain(2, values=50_000_000)
    model = _estimated(traced, single_ipu(traced), Settings(gradient_accumulation=8, replicas=4, **ADAM))
    assert model.estimate.verdict is Verdict.DOES_NOT_FIT
    found = _by_override(model)
    state = 2 * 50_000_000 * 8
    off_chip = found["memory.optimizer_state.on_chip=false"]
    # The update brings the largest parameter's state on chip for a while.
    assert state / 2 - 1 <= off_chip.saved_bytes <= state
    sharded = found["replication.tensor_sharding=true"]
    assert sharded.saved_bytes == pytest.approx(state * 3 / 4, rel=1e-3)
    accumulators = found["optimizer.accum_type=float16"]
    assert accumulators.saved_bytes == pytest.approx(2 * 50_000_000 * 2, rel=1e-3)


def test_a_table_whose_update_is_too_large_is_updated_in_parts() -> None:
    """As mT5's: the optimizer state of one table is larger than an IPU, and its published config serialises table and
    head."""
    plain = chain(3, values=1_000_000)
    tables = [dataclasses.replace(item, elements=120_000_000) for item in plain.parameters]
    table = dataclasses.replace(plain.ops[0], kind="gather", dims=())
    traced = dataclasses.replace(
        plain, ops=(table, *plain.ops[1:]), parameters=(tables[0], plain.parameters[1], tables[2])
    )
    layout = layout_of_cuts(traced, [1, 2])
    settings = Settings(gradient_accumulation=32, **{**ADAM, "accumulator_bytes": 2.0})
    model = _estimated(traced, layout, settings)
    assert model.estimate.verdicts == (Verdict.DOES_NOT_FIT, Verdict.FITS, Verdict.DOES_NOT_FIT)
    remedy = _remedies(model)[0]
    in_parts = "memory.serialize={layer.0: 4, layer.2: 4}"
    assert remedy.overrides == ("memory.optimizer_state.on_chip=false", in_parts)
    assert remedy.title == "optimizer state off chip, that of layer.0, layer.2 in parts"
    assert remedy.verdict is Verdict.FITS
    off_chip = _estimated(traced, layout, dataclasses.replace(settings, state_on_chip=False))
    assert off_chip.estimate.verdict is Verdict.DOES_NOT_FIT
    assert _remedies(off_chip)[0].overrides == (in_parts,)


def test_remedies_that_make_it_fit_come_first() -> None:
    traced = chain(4, values=30_000_000)
    model = _estimated(traced, single_ipu(traced), Settings(gradient_accumulation=32, replicas=4, **ADAM))
    assert model.estimate.verdict is Verdict.DOES_NOT_FIT
    order = [remedy.verdict for remedy in _remedies(model)]
    ranks = [[Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT].index(verdict) for verdict in order]
    assert ranks == sorted(ranks)
    assert order[0] is Verdict.FITS


def test_smaller_micro_batches_keep_the_global_batch() -> None:
    traced = chain(2, kept=30_000_000, micro_batch_size=16)
    model = _estimated(traced, single_ipu(traced), Settings(micro_batch_size=16, gradient_accumulation=4, **ADAM))
    model = dataclasses.replace(
        model,
        estimate=estimate(traced, model.layout, model.settings, dataclasses.replace(MACHINE, tile_bytes=80_000)),
    )
    found = _by_override(dataclasses.replace(model, machine=dataclasses.replace(MACHINE, tile_bytes=80_000)))
    assert "micro_batch_size=8 gradient_accumulation=8" in found
    assert found["micro_batch_size=8 gradient_accumulation=8"].saved_bytes > 25_000_000


def test_recomputation_is_offered_where_activations_are_the_problem() -> None:
    traced = chain(12, kept=40_000_000)
    layout = layout_of_cuts(traced, [3, 6, 9])
    model = _estimated(traced, layout, Settings(gradient_accumulation=32, **ADAM))
    assert model.estimate.verdict is not Verdict.FITS
    remedy = _by_override(model)["recompute.mode=pipeline"]
    # The first stage keeps 7 micro-batches: 3 results each before, none after, as it has no input of another stage.
    assert remedy.saved_bytes > 7 * 40_000_000
    assert remedy.speed < 1


def test_a_model_that_fits_only_gets_remedies_that_make_it_faster() -> None:
    traced = chain(8)
    layout = layout_of_cuts(traced, [2, 4, 6])
    model = _estimated(traced, layout, Settings(gradient_accumulation=8, replicas=2, **ADAM))
    assert model.estimate.verdict is Verdict.FITS
    found = _remedies(model)
    assert found and all(remedy.verdict is Verdict.FITS and remedy.speed > 1 for remedy in found)
    assert [remedy.speed for remedy in found] == sorted((remedy.speed for remedy in found), reverse=True)
    assert any("more replicas" in remedy.title for remedy in found)
