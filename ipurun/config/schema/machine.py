"""Config keys of the `machine` group: constants of one kind of IPU and the machine around it, for the planner.

They change no run, only estimates. Sources are in conf/machine/*.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipurun.config.schema.option import option

__all__ = ["MachineConfig"]


@dataclass
class MachineConfig:
    """Constants that `plan` estimates with."""

    name: str = option("GC200", "Name of the chip, for display.")
    tiles: int = option(1472, "Tiles of an IPU.", minimum=1)
    tile_bytes: int = option(638976, "Memory of a tile, in bytes.", minimum=1)
    clock_hz: float = option(1.325e9, "Clock, in cycles per second.", positive=True)
    half_macs_per_cycle: float = option(
        64.0, "Multiply-adds of half values that a tile does in a cycle.", positive=True
    )
    mixed_macs_per_cycle: float = option(32.0, "The same with single partial sums.", positive=True)
    single_macs_per_cycle: float = option(
        16.0, "Multiply-adds of single values that a tile does in a cycle.", positive=True
    )
    exchange_bytes_per_cycle: float = option(
        4.0, "Bytes that a tile receives from other tiles in a cycle.", positive=True
    )
    exchange_pair: int = option(2, "Neighbouring tiles that receive what all of them want this much faster.", minimum=1)
    ipus_per_machine: int = option(4, "IPUs of one machine.", minimum=1)
    streaming_bytes_per_machine: float = option(256e9, "Streaming memory of one machine, in bytes.", positive=True)
    product_efficiency: float = option(
        0.76, "Share of its rate that the matrix unit reaches while it multiplies.", positive=True
    )
    block_load_cycles: float = option(48.0, "Cycles to load one block of weights into the matrix unit.", minimum=0)
    exchange_efficiency: float = option(0.52, "Share of its rate that the exchange reaches.", positive=True)
    vector_bytes_per_cycle: float = option(
        7.8, "Bytes that a tile reads and writes in a cycle, outside the matrix unit.", positive=True
    )
    op_cycles: float = option(4000.0, "Cycles to begin and end an operation.", minimum=0)
    link_bytes_per_second: float = option(
        64e9, "From one IPU of a replica to another, bytes per second.", positive=True
    )
    all_reduce_bytes_per_second: float = option(
        40e9, "Gradients over replicas, bytes per second and IPU.", positive=True
    )
    streaming_bytes_per_second: float = option(
        17.6e9, "Streaming memory of one machine, bytes per second.", positive=True
    )
    transfer_seconds: float = option(69e-6, "Delay of one transfer from outside the IPU, in seconds.", minimum=0)
    host_bytes_per_second: float = option(8e9, "From the host to one machine, bytes per second.", positive=True)
    host_call_seconds: float = option(3.7e-3, "What one host call adds, in seconds.", minimum=0)
    machine_loss: float = option(0.008, "Share by which each machine beyond the first makes a cycle longer.", minimum=0)
    code_bytes_per_tile: float = option(
        16600.0, "Code on every tile: vertices that all programs have, in bytes.", minimum=0
    )
    code_bytes_per_op: float = option(
        150.0, "Code and vertex state of one different operation on a tile, in bytes.", minimum=0
    )
    code_bytes_per_call: float = option(
        42.0, "Control code of one call of an operation on a tile, in bytes.", minimum=0
    )
    tile_imbalance_bytes: float = option(36000.0, "What the fullest tile holds above the average, in bytes.", minimum=0)
    default_proportion: float = option(0.6, "Share of a tile for matmul temporaries where none is set.", positive=True)
    tight_margin: float = option(0.18, "From this share below the limit on the verdict is tight.", minimum=0)
    over_margin: float = option(
        0.08, "From this share above the limit on the verdict is that it does not fit.", minimum=0
    )
