"""How many IPUs a run uses, and how replicas share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from ipurun.errors import Findings
from ipurun.inspect.facts import Purpose
from ipurun.planning.plan import Devices

__all__ = ["MAX_IPUS", "DeviceRequest", "is_power_of_two", "next_power_of_two", "share_devices"]

MAX_IPUS = 64  # the most that PopTorch attaches in one process


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
        _note_several_processes(devices, found)
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
        _note_several_processes(needed, found)
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


def _note_several_processes(ipus: int, found: Findings) -> None:
    found.note(f"{ipus} IPUs can be planned but not run: PopTorch attaches {MAX_IPUS} in one process, more need PopRun")
