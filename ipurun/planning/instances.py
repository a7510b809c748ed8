"""Several processes for one run: their number, their share of the replicas, and the command that starts them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import List, Mapping, Sequence

from ipurun.config.schema import RunConfig
from ipurun.distributed.environment import launched
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts, Purpose
from ipurun.planning.plan import BatchSizes, Instances, Plan

__all__ = ["check_share", "plan_instances", "start_command"]

_ADDRESS = re.compile(r"(\S+):(\d{1,5})")
# poprun passes these on by itself.
_ALWAYS_PASSED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
# What an instance needs from ipurun, and what Graphcore's libraries read.
_PASSED = ("MASTER_ADDR", "MASTER_PORT", "IPURUN_LAUNCH_FOLDER", "IPURUN_ATTEMPT", "POPLAR_ENGINE_OPTIONS")


def plan_instances(config: RunConfig, facts: Facts, environ: Mapping[str, str], found: Findings) -> Instances:
    """Return how many processes there are, and which one this is.

    Args:
        config: The config.
        facts: The engine, and what the plan is for.
        environ: Environment variables: a launcher says how many it has started.
        found: Takes problems.
    """
    keys, started = config.distributed, launched(environ)
    if started is not None:
        if keys.instances not in (None, started.count) and keys.kind != "none":
            found.problem(
                f"{started.by} started {started.count} processes, but `distributed.instances` is {keys.instances}",
                seen=f"process {started.rank} of {started.count}",
                fix=f"distributed.instances={started.count}, or leave it out",
                key="distributed.instances",
            )
        _check_config(config, found)
        kind = keys.kind if keys.kind != "none" else started.by
        return Instances(kind, started.count, started.rank, started.by == "poprun", tuple(keys.hosts))
    if keys.kind == "none":
        if keys.instances not in (None, 1):
            found.problem(
                "`distributed.instances` needs `distributed`",
                seen=f"distributed.instances={keys.instances}",
                fix=f"distributed={'torchrun' if facts.engine == 'cpu' else 'poprun'}",
                key="distributed.instances",
            )
        return Instances()
    count = keys.instances or 1
    _check_config(config, found)
    _check_launcher(config, facts, count, found)
    return Instances(keys.kind, count, 0, keys.kind == "poprun", tuple(keys.hosts))


def check_share(instances: Instances, training: BatchSizes, inference: BatchSizes, found: Findings) -> None:
    """Check that every process gets an equal share of the replicas of training and inference."""
    count = instances.count
    if count == 1:
        return
    if training.replicas % count:
        nearest = _nearest(count, [part for part in range(1, training.replicas + 1) if training.replicas % part == 0])
        more = -(-training.replicas // count) * count
        found.problem(
            f"{training.replicas} replicas cannot be divided among {count} instances",
            seen=f"distributed.instances={count}, {training.replicas} replicas from `devices`",
            fix=f"{' or '.join(f'distributed.instances={part}' for part in nearest)}, or replication.factor={more}",
            key="distributed.instances",
        )
        return
    local = training.replicas // count
    if local % training.input_group_size:
        found.problem(
            f"groups of {training.input_group_size} replicas that share their input span instances",
            seen=f"replication.input_group_size={training.input_group_size}, {local} replicas in an instance",
            fix=f"replication.input_group_size={max(p for p in range(1, local + 1) if local % p == 0)}",
            key="replication.input_group_size",
        )
    if inference.replicas != training.replicas:
        found.problem(
            "inference must have the replicas of training where there are several instances",
            seen=f"{inference.replicas} replicas for inference, {training.replicas} for training",
            fix="leave out inference.replicas",
            key="inference.replicas",
        )


def start_command(config: RunConfig, plan: Plan, words: Sequence[str]) -> List[str]:
    """Return the command that starts all processes of a run.

    Args:
        config: The config.
        plan: Its plan.
        words: The words of ``ipurun train``.
    """
    keys, count = config.distributed, plan.instances.count
    program = [sys.executable, "-m", "ipurun", "train", *words]
    if keys.kind != "poprun":
        hosts = max(len(keys.hosts), 1)
        return ["torchrun", f"--nproc-per-node={count // hosts}", f"--nnodes={hosts}", *program[1:]]
    command = ["poprun", f"--num-instances={count}", f"--num-replicas={plan.training.replicas}"]
    command.append(f"--ipus-per-replica={plan.devices.per_replica}")
    options = {
        "--host": ",".join(keys.hosts),
        "--num-ilds": keys.ilds,
        "--vipu-partition": keys.partition,
        "--vipu-allocation": keys.allocation,
    }
    if keys.server:
        options["--vipu-server-host"], _, options["--vipu-server-port"] = keys.server.partition(":")
    options["--mpi-global-args"] = " ".join(keys.mpi_args)
    names = [name for name in (*_PASSED, *plan.environment, *keys.environment) if name not in _ALWAYS_PASSED]
    options["--mpi-local-args"] = " ".join(f"-x {name}" for name in dict.fromkeys(names))
    command += [f"{option}={value}" for option, value in options.items() if value]
    return command + program


def _check_config(config: RunConfig, found: Findings) -> None:
    if config.loader.on_error == "skip":
        found.problem(
            "`loader.on_error=skip`: several instances cannot leave out samples that cannot be read",
            fix="loader.on_error=raise",
            key="loader.on_error",
        )


def _check_launcher(config: RunConfig, facts: Facts, count: int, found: Findings) -> None:
    keys = config.distributed
    for key, parts in (("hosts", len(keys.hosts)), ("ilds", keys.ilds or 0)):
        if parts and count % parts:
            found.problem(
                f"{count} instances cannot be divided among {parts} {'hosts' if key == 'hosts' else 'IPU-Link domains'}",
                seen=f"distributed.instances={count}, distributed.{key} has {parts}",
                fix=" or ".join(f"distributed.instances={part}" for part in _nearest(count, range(parts, 65536, parts))),
                key="distributed.instances",
            )
    if keys.rendezvous is not None and not _is_address(keys.rendezvous):
        found.problem(
            "`distributed.rendezvous` must be HOST:PORT",
            seen=f"distributed.rendezvous={keys.rendezvous}",
            fix=f"distributed.rendezvous={keys.hosts[0] if keys.hosts else 'localhost'}:29400",
            key="distributed.rendezvous",
        )
    if keys.kind == "torchrun":
        if facts.engine != "cpu":
            found.problem(
                "`distributed=torchrun` is for the CPU engine",
                seen=f"engine={facts.engine}",
                fix="distributed=poprun, or engine=cpu",
                key="distributed.kind",
            )
        if len(keys.hosts) > 1 and keys.rendezvous is None:
            found.problem(
                "`distributed.hosts`: the processes of several machines need an address where they find each other",
                seen=f"{len(keys.hosts)} hosts",
                fix=f"distributed.rendezvous={keys.hosts[0]}:29400, the same on every machine",
                key="distributed.rendezvous",
            )
        ignored = ("partition", "allocation", "ilds", "server")
        unused = [f"distributed.{name}" for name in ignored if getattr(keys, name) is not None]
        unused += [f"distributed.{name}" for name in ("mpi_args", "environment") if getattr(keys, name)]
        if unused:
            found.problem(
                f"{', '.join(f'`{name}`' for name in unused)}: only poprun has these",
                seen="distributed=torchrun",
                fix="leave them out, or distributed=poprun",
                key=unused[0],
            )
    elif facts.purpose is Purpose.RUN and shutil.which("poprun") is None:
        found.problem(
            "`distributed=poprun`: there is no `poprun` on the path",
            seen=f"PATH={os.environ.get('PATH', '')}",
            fix="enable Graphcore's SDK (source enable); without IPUs, distributed=torchrun runs the same on CPUs",
            key="distributed.kind",
        )


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found.group(2)) < 65536


def _nearest(wanted: int, possible: Sequence[int]) -> List[int]:
    """Return the next smaller and the next larger of the values that are possible."""
    below = [value for value in possible if value < wanted]
    above = [value for value in possible if value > wanted]
    return below[-1:] + above[:1]
