"""Number of IPUs, and their division among replicas and processes."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Union

from ipurun.config.schema import RunConfig
from ipurun.distributed.environment import launched
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts, Purpose
from ipurun.planning.plan import BatchSizes, Devices, Instances, Plan

__all__ = [
    "MAX_IPUS",
    "DeviceRequest",
    "check_share",
    "is_power_of_two",
    "next_power_of_two",
    "plan_instances",
    "share_devices",
    "start_command",
]

MAX_IPUS = 64  # the most that PopTorch attaches in one process
_ADDRESS = re.compile(r"(\S+):(\d{1,5})")
# poprun passes these on by itself.
_ALWAYS_PASSED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
# What an instance needs from ipurun.
_PASSED = ("MASTER_ADDR", "MASTER_PORT", "IPURUN_LAUNCH_FOLDER", "IPURUN_ATTEMPT")


@dataclass(frozen=True)
class DeviceRequest:
    """The devices that a config asks for.

    Args:
        devices: Total number of IPUs, or ``auto``.
        per_replica: IPUs that one replica of the model needs.
        factor: Replicas; None: as many as fit.
        auto_round: Whether PopTorch may round the number of IPUs up to a power of two.
        available: IPUs that can be attached; None where any number is emulated.
        purpose: What the plan is made for; `PLAN` only notes more IPUs than one process attaches.
        processes: Processes that share the IPUs.
    """

    devices: Union[int, str]
    per_replica: int
    factor: Optional[int] = None
    auto_round: bool = False
    available: Optional[int] = None
    purpose: Purpose = Purpose.RUN
    processes: int = 1

    @property
    def most(self) -> int:
        """The most IPUs that the processes attach."""
        return MAX_IPUS * self.processes


def is_power_of_two(number: int) -> bool:
    """Whether a number is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least a number."""
    return 1 << max(number - 1, 0).bit_length()


def share_devices(request: DeviceRequest, found: Findings) -> Devices:
    """Return the IPUs in total, per replica and idle; after a problem they only serve to find further ones."""
    per_replica = request.per_replica
    if not is_power_of_two(per_replica) and not request.auto_round:
        found.problem(
            f"the model is split over {per_replica} IPUs, which is not a power of two",
            seen=f"IPUs 0 to {per_replica - 1}, from the keys of `pipeline` or the model's own blocks",
            fix="split it over 2, 4, 8, ... IPUs, or pipeline.auto_round=true (the extra IPUs stay idle)",
        )
    total = _total(request, per_replica, found)
    if total % per_replica and not request.auto_round:
        found.problem(
            f"`devices` is not divisible by the {per_replica} IPUs of one replica",
            seen=f"devices={total}, {per_replica} IPUs per replica from the keys of `pipeline`",
            fix=f"devices={-(-total // per_replica) * per_replica}",
            key="devices",
        )
    replicas = request.factor or max(total // per_replica, 1)
    used = replicas * per_replica
    if used > total and total >= per_replica:
        found.problem(
            f"{replicas} replicas of {per_replica} IPUs need {used} IPUs, more than `devices` allows",
            seen=f"replication.factor={replicas}, devices={total}",
            fix=f"replication.factor={max(total // per_replica, 1)} or devices={next_power_of_two(used)}",
            key="devices",
        )
    elif not is_power_of_two(used) and is_power_of_two(per_replica) and not request.auto_round:
        lower = 1 << (max(total // per_replica, 1).bit_length() - 1)
        found.problem(
            f"{replicas} replicas of {per_replica} IPUs make {used} IPUs, which is not a power of two",
            seen=f"replication.factor={request.factor}" if request.factor else f"devices={total}",
            fix=f"replication.factor={lower} or pipeline.auto_round=true",
            key="replication.factor" if request.factor else "devices",
        )
    idle = max((request.available or total) - used, 0)
    if idle:
        there = f"{request.available} available" if request.available else f"{total} requested"
        found.note(f"{idle} of {there} IPUs stay idle: {replicas} replicas x {per_replica} IPUs use {used}")
    return Devices(total=total, per_replica=per_replica, replicas=replicas, idle=idle)


def _total(request: DeviceRequest, per_replica: int, found: Findings) -> int:
    devices = request.devices
    if isinstance(devices, str) and devices.strip().isdigit():
        devices = int(devices)
    if isinstance(devices, bool) or not isinstance(devices, (int, str)):
        devices = str(devices)
    if isinstance(devices, str):
        if devices.strip().lower() != "auto":
            found.problem(
                "`devices` takes a number of IPUs, or auto", seen=f"devices={devices}", fix="devices=1", key="devices"
            )
        return _automatic_total(request, per_replica, found)
    if devices > request.most and request.purpose is Purpose.PLAN:
        _note_several_processes(devices, request.processes, found)
    elif devices < 1 or devices > request.most:
        found.problem(
            f"`devices` must be a power of two from 1 to {request.most}"
            + (f", {MAX_IPUS} being the most that PopTorch attaches in one process" if devices > MAX_IPUS else ""),
            seen=f"devices={devices}",
            fix=f"devices={min(max(devices, 1), request.most)}"
            + (", or more instances with distributed=poprun" if devices > MAX_IPUS else ""),
            key="devices",
        )
        return min(max(devices, 1), request.most)
    if not is_power_of_two(devices):
        above = next_power_of_two(devices)
        found.problem(
            "`devices` must be a power of two",
            seen=f"devices={devices}",
            fix=f"devices={above // 2} or devices={above}",
            key="devices",
        )
        return above
    if request.available is not None and devices > request.available:
        most = 1 << (request.available.bit_length() - 1) if request.available else 0
        found.problem(
            f"{devices} IPUs were requested, but only {request.available} can be attached",
            seen=f"devices={devices}",
            fix=f"devices={most}" if most else "engine=cpu",
            key="devices",
        )
    return devices


def _automatic_total(request: DeviceRequest, per_replica: int, found: Findings) -> int:
    """Return all available IPUs, or what the model needs where any number is emulated."""
    needed = per_replica * (request.factor or request.processes)
    if request.auto_round:
        needed = next_power_of_two(needed)
    if needed > request.most and request.purpose is Purpose.PLAN:
        _note_several_processes(needed, request.processes, found)
    elif needed > request.most:
        found.problem(
            f"the run needs {needed} IPUs, but PopTorch attaches at most {MAX_IPUS} in one process",
            seen=f"{request.factor or 1} replicas x {per_replica} IPUs",
            fix=f"replication.factor={max(MAX_IPUS // per_replica, 1)}",
        )
    if request.available is None:
        return needed
    if request.available < needed:
        found.problem(
            f"the run needs {needed} IPUs, but only {request.available} can be attached",
            seen=f"{request.factor or 1} replicas x {per_replica} IPUs",
            fix="engine=cpu, a split over fewer IPUs, or a smaller replication.factor",
        )
        return needed
    if request.factor:
        return needed
    most = min(request.available, MAX_IPUS)
    return max(1 << (most.bit_length() - 1), needed)


def _note_several_processes(ipus: int, processes: int, found: Findings) -> None:
    with_more = f"distributed.instances={-(-ipus // MAX_IPUS)}" + ("" if processes > 1 else " distributed=poprun")
    started = f" by {processes} instances" if processes > 1 else ""
    found.note(
        f"{ipus} IPUs can be planned but not run{started}: PopTorch attaches {MAX_IPUS} in one process; {with_more}"
    )


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
    _check_launcher(config, facts, found)
    return Instances(keys.kind, count, 0, keys.kind == "poprun", tuple(keys.hosts))


def check_share(
    config: RunConfig, instances: Instances, training: BatchSizes, inference: BatchSizes, found: Findings
) -> None:
    """Check that every process gets an equal share of the replicas of training and inference."""
    count = instances.count
    if not _divides(config, count, training.replicas, found) or count == 1:
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


def _divides(config: RunConfig, count: int, replicas: int, found: Findings) -> bool:
    """Check that instances divide the replicas, and hosts and IPU-Link domains the instances."""
    keys = config.distributed
    groups = {"hosts": (len(keys.hosts) or 1, "hosts"), "ilds": (keys.ilds or 1, "IPU-Link domains")}
    shares = [number for number in range(1, replicas + 1) if replicas % number == 0]
    possible = [number for number in shares if all(number % parts == 0 for parts, _ in groups.values())]
    fix = " or ".join(f"distributed.instances={number}" for number in _nearest(count, possible))
    problems = []
    if replicas % count:
        seen = f"distributed.instances={count}, {replicas} replicas from `devices`"
        other = " or ".join(f"distributed.instances={number}" for number in _nearest(count, shares))
        other += ", and hosts and IPU-Link domains that divide them"
        problems.append((f"{replicas} replicas cannot be divided among {count} instances", seen, other))
    for key, (number, named) in groups.items():
        if count % number:
            seen = f"distributed.instances={count}, distributed.{key} has {number}"
            near = _nearest(number, [parts for parts in range(1, count + 1) if count % parts == 0])
            other = " or ".join(f"{parts} hosts" if key == "hosts" else f"distributed.ilds={parts}" for parts in near)
            problems.append((f"{count} instances cannot be divided among {number} {named}", seen, other))
    for what, seen, other in problems:
        found.problem(what, seen=seen, fix=fix or other, key="distributed.instances")
    return not problems


def start_command(config: RunConfig, plan: Plan, program: Sequence[str], passed: Sequence[str] = ()) -> List[str]:
    """Return the command that starts all processes of a run.

    Args:
        config: The config.
        plan: Its plan.
        program: What each process runs: Python and its arguments.
        passed: Further variables that they need.
    """
    keys, count = config.distributed, plan.instances.count
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
    names = [*_PASSED, *plan.environment, *keys.environment, *passed]
    names = [name for name in names if name not in _ALWAYS_PASSED]
    options["--mpi-local-args"] = " ".join(f"-x {name}" for name in dict.fromkeys(names))
    command += [f"{option}={value}" for option, value in options.items() if value]
    return [*command, *program]


def _check_launcher(config: RunConfig, facts: Facts, found: Findings) -> None:
    keys = config.distributed
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
