"""Run and sweep folders written by hand, so that tests of pages need no training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, List

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'`&\u202e\x1b[31m"


def write_run(folder: Path, name: str = "digits", status: str = "done", steps: int = 120, **config: Any) -> Path:
    """Write the files of a run; `status` "" leaves out the summary, as a run that was killed."""
    folder.mkdir(parents=True)
    keys: Dict[str, Any] = {"name": name, "devices": 8, "monitor": "accuracy", "optimizer": {"lr": 0.002}, **config}
    (folder / "config.yaml").write_text(json.dumps(keys), encoding="utf-8")
    (folder / "overrides.yaml").write_text(json.dumps(["+recipe=mnist", "devices=8"]), encoding="utf-8")
    (folder / "origins.yaml").write_text(json.dumps({"devices": "command line: devices=8"}), encoding="utf-8")
    (folder / "plan.txt").write_text(f"plan of {name}\n", encoding="utf-8")
    env = {
        "schema": 2,
        "started": 1.7e9 + steps,
        "engine": {"kind": "cpu", "version": "emulator"},
        "versions": {"ipurun": "0.1.0", "torch": "2.0.1"},
        "git": {"commit": "abc", "branch": name, "dirty": True, "changed_files": [name]},
    }
    (folder / "env.json").write_text(json.dumps(env), encoding="utf-8")
    records: List[Dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss: Any = 2.3 * math.exp(-step / 40)
        records.append(
            {"split": "train", "step": step, "loss": loss, "lr": 0.002, "samples_per_second": 1000.0 + step % 7}
        )
        if step % 40 == 0:
            records.append({"split": "test", "step": step, "loss": loss, "accuracy": 1 - loss / 3, "is_best": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / "log.txt").write_text("the first line\nresuming after step 60, from x.pt\n", encoding="utf-8")
    if status:
        summary: Dict[str, Any] = {"status": status, "reason": f"it broke: {name}"}
        if status != "failed":
            seconds = {"total": 20.0, "compile": 2.0, "train": 15.0, "eval": 2.0, "data_wait": 0.5, "checkpoint": 0.1}
            summary = {
                **{"name": name, "status": status, "step": steps, "loss": 0.1, "metrics": {"accuracy": 0.95}},
                **{"monitor": "accuracy", "best": 0.95, "best_step": steps, "samples_per_second": 1003.0},
                "seconds": seconds,
            }
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_sweep(folder: Path, points: int = 6, name: str = "digits", with_runs: bool = False) -> Path:
    """Write the files of a sweep over two keys whose last point failed."""
    folder.mkdir(parents=True)
    records = []
    for index in range(points):
        swept = {"optimizer.lr": str(0.001 * (1 + index // 2)), "mode": f"{name}{index % 2}"}
        is_last = index == points - 1
        results = {
            **{"monitor": "accuracy", "best": 0.9 + 0.001 * index, "higher_is_better": True, "loss": 0.1},
            **{"metrics": {"accuracy": 0.9, "loss": 0.2}, "samples_per_second": 900.0, "seconds": {"total": 5.0}},
        }
        records.append(
            {
                **{"id": str(index), "index": index, "name": name, "swept": swept, "overrides": ["+recipe=mnist"]},
                **{"status": "failed" if is_last else "finished", "reason": f"why {name}" if is_last else ""},
                **{"folder": f"elsewhere/{index:03d}", "results": {} if is_last else results},
            }
        )
        if with_runs and not is_last:
            write_run(folder / f"{index:03d}", name)
    manifest = {"argv": ["-m", "+recipe=mnist"], "started": 1.7e9, "points": records}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder
