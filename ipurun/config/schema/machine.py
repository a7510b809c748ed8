"""Config keys of the `machine` group: constants of one kind of IPU and its machine.

They affect only estimates, never runs. conf/machine/*.yaml gives the sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipurun.config.schema.option import option

__all__ = ["MachineConfig"]


@dataclass
class MachineConfig:
    """Constants for the estimates of `plan`."""

    name: str = option("GC200", "Name of the chip, for display.")
    tiles: int = option(1472, "Tiles per IPU.", minimum=1)
    tile_bytes: int = option(638976, "Memory per tile, in bytes.", minimum=1)
    clock_hz: float = option(1.325e9, "Clock, in cycles per second.", positive=True)
    half_macs_per_cycle: float = option(64.0, "Half-precision multiply-adds per tile and cycle.", positive=True)
    mixed_macs_per_cycle: float = option(32.0, "The same with single-precision partial sums.", positive=True)
    single_macs_per_cycle: float = option(16.0, "Single-precision multiply-adds per tile and cycle.", positive=True)
    exchange_bytes_per_cycle: float = option(
        4.0, "Bytes that a tile receives from other tiles per cycle.", positive=True
    )
    exchange_pair: int = option(2, "Neighbouring tiles that receive shared data this many times as fast.", minimum=1)
    ipus_per_machine: int = option(4, "IPUs per machine.", minimum=1)
    streaming_bytes_per_machine: float = option(256e9, "Streaming memory per machine, in bytes.", positive=True)
    product_efficiency: float = option(
        0.76, "Share of its peak rate that the matrix unit reaches while multiplying.", positive=True
    )
    block_load_cycles: float = option(48.0, "Cycles to load one block of weights into the matrix unit.", minimum=0)
    exchange_efficiency: float = option(0.50, "Share of its peak rate that the exchange reaches.", positive=True)
    vector_bytes_per_cycle: float = option(
        7.6, "Bytes that a tile reads and writes per cycle, outside the matrix unit.", positive=True
    )
    op_cycles: float = option(3480.0, "Cycles to start and end an operation.", minimum=0)
    link_bytes_per_second: float = option(
        64e9, "Bandwidth between two IPUs of a replica, in bytes per second.", positive=True
    )
    all_reduce_bytes_per_second: float = option(
        40e9, "Bandwidth of gradient all-reduce, in bytes per second and IPU.", positive=True
    )
    all_reduce_step_seconds: float = option(
        16e-6, "Latency of each of the 2 (R - 1) steps of a sum over R replicas, in seconds.", minimum=0
    )
    streaming_bytes_per_second: float = option(
        17.5e9, "Bandwidth of streaming memory per machine, in bytes per second.", positive=True
    )
    transfer_seconds: float = option(51e-6, "Latency of one transfer from outside the IPU, in seconds.", minimum=0)
    host_bytes_per_second: float = option(
        8e9, "Bandwidth from the host to a machine, in bytes per second.", positive=True
    )
    host_link_bytes_per_second: float = option(
        16e9, "Bandwidth from a host to all its machines together, in bytes per second.", positive=True
    )
    host_call_seconds: float = option(3e-3, "Overhead of one host call, in seconds.", minimum=0)
    host_samples_per_second: float = option(
        0.0,
        "Samples per second that one process loads; 0: as `ipurun bench` measured them here, or any number.",
        minimum=0,
    )
    host_core_seconds: float = option(
        4.8e-3,
        "Seconds that a CPU of a Pod's host takes for what `ipurun bench` times of a CPU, to convert the speed of "
        "loading that was measured on another machine; 0: do not.",
        minimum=0,
    )
    host_cpus: int = option(128, "CPUs of a Pod's host.", minimum=1)
    ipus_per_domain: int = option(64, "IPUs that IPU-Links connect; gateways connect such domains.", minimum=1)
    gateway_bytes_per_second: float = option(
        25e9, "Bandwidth of a machine to another domain, in bytes per second.", positive=True
    )
    machine_loss: float = option(
        0.0, "Share by which each machine beyond the first lengthens a pipeline cycle, if measured.", minimum=0
    )
    code_bytes_per_tile: float = option(16600.0, "Code on every tile that all programs have, in bytes.", minimum=0)
    code_bytes_per_op: float = option(
        150.0, "Code and vertex state per distinct operation on a tile, in bytes.", minimum=0
    )
    code_bytes_per_call: float = option(42.0, "Control code per call of an operation on a tile, in bytes.", minimum=0)
    code_imbalance: float = option(
        0.7, "Code of the fullest tile beyond the average, as a share of the average.", minimum=0
    )
    tile_imbalance_bytes: float = option(
        0.0, "Further memory of the fullest tile above the average, in bytes, if measured.", minimum=0
    )
    default_proportion: float = option(0.6, "Default share of a tile for matmul temporaries.", positive=True, maximum=1)
    tight_margin: float = option(
        0.07, "Training this share below the memory limit or closer is a tight fit.", minimum=0, maximum=1
    )
    inference_margin: float = option(
        0.22,
        "The same for inference, unless it fits even if matmuls and convolutions use all of their share of a tile.",
        minimum=0,
        maximum=1,
    )
    over_margin: float = option(0.03, "A model this share above the memory limit or further does not fit.", minimum=0)
