"""Published runs that no constant was fitted to: the rows of published.json, planned as `ipurun plan` does."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipurun.config.compose import one
from ipurun.config.schema import LoaderConfig
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.settings import layout_of_plan, loading_of, machine_of, settings_of
from ipurun.estimate.stages import single_ipu
from ipurun.estimate.types import Estimate, Settings, StageLayout, Verdict
from ipurun.inspect.facts import LoadingRate, Purpose
from ipurun.inspect.trace import trace_model
from ipurun.inspect.traced_model import TracedModel
from ipurun.runs.prepare import PreparedRun, prepare

PUBLISHED = Path(__file__).with_name("published.json")
_RECOMPUTED = {"bert": "encoder.layer.*", "gpt": "h.*", "vit": "blocks.*"}
_HEADS = {"bert": "predictions.decoder", "gpt": "lm_head", "minidalle": "lm_head"}
_BITS_OF_HALF = 16
# A C600 is a GC200 on a PCIe card, whose clock follows from its 280 TFLOPS in half precision (Graphcore's data sheet).
_C600_FLOPS = 280e12
# Models of the tests use the data, loss and metrics of a recipe.
_RECIPES = {"efficientnet": "resnet", "resnext": "resnet"}
Row = Dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """The estimate of a row.

    Args:
        row: The facts.
        estimate: Its estimate on the chip that was measured, or on a GC200.
        ratio: Estimated over published throughput; NaN if none is published.
    """

    row: Row
    estimate: Estimate
    ratio: float

    @property
    def published(self) -> float:
        """Published samples per second; NaN if there are none."""
        return float(self.row.get("measured", {}).get("samples_per_second", math.nan))

    @property
    def is_compared(self) -> bool:
        """Whether a throughput is published that the device, not the host, limited."""
        return not math.isnan(self.ratio) and self.row["measured"].get("device_bound", True)

    @property
    def is_right_about_fit(self) -> bool:
        """Whether the verdict is "does not fit" exactly if the config did not compile."""
        return (self.estimate.verdict is not Verdict.DOES_NOT_FIT) == self.row["fits"]


@functools.lru_cache(maxsize=None)
def rows() -> List[Row]:
    """Return all rows that the recipes can express."""
    return [row for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"] if "cannot" not in row]


def plan(row: Row, chip: Optional[str] = None) -> Planned:
    """Plan a row, by default on the chip that was measured, or else on a GC200."""
    measured = row.get("measured", {})
    traced, layout, settings = placed(row["id"])
    found = estimate(traced, layout, settings, machine(chip or measured.get("chip", "GC200")))
    published = measured.get("samples_per_second", math.nan)
    return Planned(row, found, found.time.samples_per_second / published)


@functools.lru_cache(maxsize=None)
def inference_rows() -> List[Row]:
    """Return the inference that Graphcore measured with PopRT, an engine that merges more operations than PopTorch."""
    rows: List[Row] = json.loads(PUBLISHED.read_text(encoding="utf-8"))["inference"]
    return rows


def plan_inference(row: Row) -> Planned:
    """Plan the inference of a row on one C600."""
    traced, layout, settings = placed_inference(row["id"])
    gc200 = machine("GC200")
    clock_hz = gc200.clock_hz * _C600_FLOPS / gc200.peak_flops(2)
    found = estimate(traced, layout, settings, dataclasses.replace(gc200, clock_hz=clock_hz))
    return Planned(row, found, found.time.samples_per_second / row["measured"]["samples_per_second"])


@functools.lru_cache(maxsize=None)
def placed_inference(name: str) -> Tuple[TracedModel, StageLayout, Settings]:
    """Return the traced model of a row of inference, on one IPU, and how it runs."""
    row = next(row for row in inference_rows() if row["id"] == name)
    run = row["run"]
    words = [*row["words"], f"micro_batch_size={run['micro_batch']}", "precision='16.16'"]
    traced = trace_model(one(words).config, training=False)
    traced = dataclasses.replace(traced, input_bytes=traced.input_bytes * run["input_bits"] // _BITS_OF_HALF)
    settings = Settings(
        micro_batch_size=run["micro_batch"],
        device_iterations=run["device_iterations"],
        training=False,
        compute_bytes=2,
        partials_bytes=2,
        available_proportion=(run["proportion"],),
        io_tiles=run["io_tiles"],
    )
    return traced, single_ipu(traced), settings


@functools.lru_cache(maxsize=None)
def machine(chip: str) -> Machine:
    """Return the shipped constants of a chip."""
    return machine_of(one(["+recipe=mnist", f"machine={chip.lower()}"]).config)


@functools.lru_cache(maxsize=None)
def placed(name: str) -> Tuple[TracedModel, StageLayout, Settings]:
    """Return the traced model of a row, its stages, and how it runs."""
    row = next(row for row in rows() if row["id"] == name)
    prepared = prepare(one(overrides_of(row["model"], row["run"])), Purpose.PLAN)
    traced = _trace(prepared, row["run"])
    settings = settings_of(prepared.plan)
    layout = layout_of_plan(traced, prepared.plan)
    # A Pod64 has four hosts, and larger ones as many for every 64 IPUs: the systems of Graphcore's MLPerf submissions.
    hosts = math.ceil(layout.num_ipus * settings.replicas / 16)
    settings = dataclasses.replace(settings, hosts=hosts)
    loading = row.get("measured", {}).get("loading")
    if loading is not None:
        config = dataclasses.replace(prepared.point.config, loader=LoaderConfig(workers=loading["workers"]))
        rate = LoadingRate(1 / loading["seconds_per_sample"], 2, "", loading["core_seconds"], has_ipus=False)
        own = machine(row["measured"]["chip"])
        settings = dataclasses.replace(settings, **loading_of(config, own, rate, 1, is_synthetic=False))
    return traced, layout, settings


def overrides_of(model: Row, run: Row) -> List[str]:
    """Return the overrides that describe a row to `ipurun plan`."""
    kind = model["kind"]
    ipus = len(run.get("layers_per_ipu") or [0, *run.get("split", [])])
    samples = run["micro_batch"] * run["accumulation"] * run["replicas"] * run["device_iterations"]
    words = [
        *([] if kind == "minidalle" else [f"+recipe={_RECIPES.get(kind, kind)}"]),
        *model_words(model),
        *_optimizer_words(run),
        f"micro_batch_size={run['micro_batch']}",
        f"gradient_accumulation={run['accumulation']}",
        f"device_iterations={run['device_iterations']}",
        f"devices={ipus * run['replicas']}",
        f"replication.factor={run['replicas']}",
        f"replication.tensor_sharding={str(run['state_sharded']).lower()}",
        f"precision='{run['precision']}'",
        f"partials={run['partials']}",
        f"memory.available_proportion={run['proportion']}",
        f"memory.optimizer_state.on_chip={str(run['state_on_chip']).lower()}",
        "loss_scaling=1024",
        "data=synthetic",
        f"data.train_samples={samples}",
        f"inference.device_iterations={ipus + 1}",
    ]
    kept = [_RECOMPUTED[kind]] if run["recompute"] == "layers" else run["recompute"]
    words.append(f"recompute.checkpoints=[{','.join(kept)}]")
    if ipus == 1:
        words.append("recompute.mode=recompute_all")
    elif "split" in run:
        words.append(f"pipeline.split=[{','.join(run['split'])}]")
    else:
        words += [f"pipeline.{key}={run[key]}" for key in ("layers_per_ipu", "embedding_ipu", "head_ipu")]
    if run["head_parts"] > 1:
        words.append(f"memory.serialize={{{_HEADS[kind]}: {run['head_parts']}}}")
    return words


def model_words(model: Row) -> List[str]:
    """Return the overrides that describe the model of a row."""
    kind = model["kind"]
    if kind == "resnet":
        return [f"model=resnet{model['depth']}", f"model.norm={model['norm']}", f"model.image_size={model['image']}"]
    if kind == "resnext":
        own = {"depth": model["depth"], "image_size": model["image"], "num_classes": model["classes"]}
        target = ["model._target_=held_out_models.ResNeXt", "~model.norm", "~model.width"]
        return ["model=resnet50", *target, *(f"++model.{key}={own[key]}" for key in own)]
    if kind == "minidalle":
        words = ["model._target_=held_out_dalle.MiniDalle", f"+model.vocab_size={model['vocab']}"]
        return [*words, f"sample=[{{shape: [80], dtype: int64, high: {model['vocab']}}}, {{shape: [3, 256, 256]}}]"]
    if kind == "efficientnet":
        own = {**model, "image_size": model["image"], "num_classes": model["classes"]}
        keys = ("image_size", "num_classes", "width", "depth", "expansion", "group", "norm_groups")
        return [
            "model._target_=held_out_models.EfficientNet",
            "~model.norm",
            *(f"++model.{key}={own[key]}" for key in keys),
        ]
    base = {"bert": "bert_base", "gpt": "gpt2_small", "vit": "vit_base"}[kind]
    keys = {"hidden": "hidden_size", "layers": "num_layers", "heads": "num_heads", "vocab": "vocab_size"}
    keys.update({"classes": "num_classes", "image": "image_size", "patch": "patch_size", "masked": "mask_tokens"})
    keys["sequence"] = "sequence_length" if kind == "bert" else "max_positions"
    return [f"model={base}", *(f"model.{key}={model[fact]}" for fact, key in keys.items() if fact in model)]


def _optimizer_words(run: Row) -> List[str]:
    name, accumulator = run["optimizer"], run.get("accumulator", "float16")
    if name == "sgd_combined":
        return ["optimizer=sgd", "optimizer.use_combined_accum=true", "optimizer.velocity_accum_type=float16"]
    if name == "sgd":
        velocity = f"optimizer.velocity_accum_type={run['first_momentum']}"
        return ["optimizer=sgd", velocity, f"optimizer.accum_type={accumulator}", "optimizer.use_combined_accum=false"]
    momentum = f"optimizer.first_order_momentum_accum_type={run['first_momentum']}"
    return [f"optimizer={name}", momentum, f"optimizer.accum_type={accumulator}"]


_traced: Dict[Tuple[str, int, str], TracedModel] = {}


def _trace(prepared: PreparedRun, run: Row) -> TracedModel:
    config = prepared.point.config
    key = (str(config.model), config.micro_batch_size, config.precision)
    if key not in _traced:
        _traced[key] = trace_model(config, module_precision=prepared.plan.module_precision)
    found = _traced[key]
    if "input_bits" in run:  # pictures sent as bytes and converted on the device
        found = dataclasses.replace(found, input_bytes=round(found.input_bytes * run["input_bits"] / _BITS_OF_HALF))
    return found


@functools.lru_cache(maxsize=None)
def all_planned() -> Tuple[Planned, ...]:
    """Plan every row."""
    return tuple(plan(row) for row in rows())


def pairs_of_pods(found: Sequence[Planned]) -> Dict[str, Tuple[float, float]]:
    """Return for each run on a Pod64 or Pod256 how much faster it is than on a quarter, published and estimated."""
    by_id = {item.row["id"]: item for item in found}
    pairs = {}
    for name, large in by_id.items():
        quarter = name.replace("_pod256", "_pod64") if name.endswith("_pod256") else name.replace("_pod64", "")
        small = by_id.get(quarter) if quarter != name else None
        if small is not None and small.is_compared and large.is_compared:
            speeds = [item.estimate.time.samples_per_second for item in (large, small)]
            pairs[name] = (large.published / small.published, speeds[0] / speeds[1])
    return pairs


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    size = len(first)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks)) / (size * (size * size - 1))
