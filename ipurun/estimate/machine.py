"""Constants of one kind of device, from conf/machine/*.yaml."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, Mapping

__all__ = ["Machine", "machine_from"]


@dataclass(frozen=True)
class Machine:
    """One kind of IPU and the machine around it. Meanings, units and sources are in conf/machine/*.yaml."""

    name: str = "GC200"
    tiles: int = 1472
    tile_bytes: int = 638_976
    clock_hz: float = 1.325e9
    half_macs_per_cycle: float = 64.0
    mixed_macs_per_cycle: float = 32.0
    single_macs_per_cycle: float = 16.0
    exchange_bytes_per_cycle: float = 4.0
    exchange_pair: int = 2
    ipus_per_machine: int = 4
    streaming_bytes_per_machine: float = 256e9
    product_efficiency: float = 0.76
    block_load_cycles: float = 48.0
    exchange_efficiency: float = 0.50
    vector_bytes_per_cycle: float = 7.6
    op_cycles: float = 3480.0
    link_bytes_per_second: float = 64e9
    all_reduce_bytes_per_second: float = 40e9
    all_reduce_step_seconds: float = 16e-6
    streaming_bytes_per_second: float = 17.5e9
    transfer_seconds: float = 51e-6
    host_bytes_per_second: float = 8e9
    host_link_bytes_per_second: float = 16e9
    host_call_seconds: float = 3e-3
    host_samples_per_second: float = 0.0
    host_core_seconds: float = 4.8e-3
    host_cpus: int = 128
    ipus_per_domain: int = 64
    gateway_bytes_per_second: float = 25e9
    machine_loss: float = 0.0
    code_bytes_per_tile: float = 16_600.0
    code_bytes_per_op: float = 150.0
    code_bytes_per_call: float = 42.0
    code_imbalance: float = 0.7
    tile_imbalance_bytes: float = 0.0
    default_proportion: float = 0.6
    tight_margin: float = 0.07
    inference_margin: float = 0.22
    over_margin: float = 0.03

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the whole chip."""
        return self.tiles * self.tile_bytes

    def macs_per_cycle(self, element_bytes: int, partials_bytes: int) -> float:
        """Return the multiply-adds of a tile's matrix unit for operands and partial sums of these sizes."""
        if element_bytes != 2:
            return self.single_macs_per_cycle
        return self.half_macs_per_cycle if partials_bytes == 2 else self.mixed_macs_per_cycle

    def domains(self, ipus: int) -> int:
        """Return the number of IPU-Link domains that hold this many IPUs; gateways connect them."""
        return math.ceil(ipus / self.ipus_per_domain)

    def machines(self, ipus: int) -> int:
        """Return the number of machines that hold this many IPUs."""
        return math.ceil(ipus / self.ipus_per_machine)

    def peak_flops(self, element_bytes: int) -> float:
        """Return the peak floating-point operations per second of one IPU, for values of this size."""
        return 2 * self.macs_per_cycle(element_bytes, partials_bytes=element_bytes) * self.tiles * self.clock_hz


def machine_from(values: Mapping[str, Any]) -> Machine:
    """Make a machine from a mapping of constants: numbers, or mappings with a `value`.

    Raises:
        KeyError: A constant does not exist.
    """
    known = {field.name: field.type for field in dataclasses.fields(Machine)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise KeyError(f"unknown device constants: {', '.join(unknown)}; known: {', '.join(known)}")
    plain: Dict[str, Any] = {
        key: given["value"] if isinstance(given, Mapping) else given for key, given in values.items()
    }
    whole = ("tiles", "tile_bytes", "ipus_per_machine", "ipus_per_domain", "exchange_pair", "host_cpus")
    plain.update({key: int(given) for key, given in plain.items() if key in whole})
    return Machine(**plain)
