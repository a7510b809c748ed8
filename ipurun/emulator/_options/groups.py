"""The option groups of ``Options``: Popart, Jit, Precision, Training, Distributed, TensorLocations."""

from __future__ import annotations

import copy
import os
from typing import Any, Dict, List, Optional, Set, Union

import torch

from ipurun.emulator import enums
from ipurun.emulator._logging import logger
from ipurun.emulator._options_impl import OptionsDict


def _checked(value: Any, kind: type) -> Any:
    assert isinstance(value, kind), f"Expected {kind.__name__}, got {value!r}"
    return value


class TensorLocationSettings(OptionsDict):
    """Location of one kind of tensor: on or off chip, sharded over replicas, on IO tiles."""

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep tensors with fewer elements on chip."""
        self.createOrSet(minElementsForOffChip=_checked(min_elements, int))
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard tensors with fewer elements."""
        self.createOrSet(minElementsForReplicatedTensorSharding=_checked(min_elements, int))
        return self

    def useOnChipStorage(self, use: Optional[bool] = True) -> TensorLocationSettings:
        """Store the tensors on or off chip; None lets the backend decide."""
        if use is None:
            self.deleteIfExists("onChip")
        else:
            self.createOrSet(onChip=int(_checked(use, bool)))
        return self

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Store a part of the tensors on each replica."""
        self.createOrSet(useReplicatedTensorSharding=int(_checked(use, bool)))
        return self

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load the tensors through the IO tiles."""
        self.createOrSet(useIOTilesToLoad=int(_checked(use, bool)))
        return self

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store the tensors through the IO tiles."""
        self.createOrSet(useIOTilesToStore=int(_checked(use, bool)))
        return self


class _TensorLocationOptions(OptionsDict):
    """The locations of activations, weights, optimizer state and accumulators."""

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Reserve tiles for transfers, as required for overlapped IO."""
        assert isinstance(num_tiles, int) and 32 <= num_tiles <= 192 and num_tiles % 2 == 0, (
            f"numIOTiles must be an even number between 32 and 192. Got {num_tiles!r}"
        )
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of activations."""
        self.createOrSet(location_activation=_checked(location, TensorLocationSettings).toDict())
        return self

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of weights."""
        self.createOrSet(location_weight=_checked(location, TensorLocationSettings).toDict())
        return self

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of the optimizer's state."""
        self.createOrSet(location_optimizer=_checked(location, TensorLocationSettings).toDict())
        return self

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the location of accumulated gradients."""
        self.createOrSet(location_accumulator=_checked(location, TensorLocationSettings).toDict())
        return self


class _PopartOptions:
    """Options of the PopART backend under its own names, checked when a model is compiled."""

    def __init__(self) -> None:
        self.options: Dict[str, Any] = {}
        self._is_frozen = False
        self.set("instrumentWithHardwareCycleCounter", False)
        self.set("rearrangeAnchorsOnHost", False)

    def _freeze(self) -> None:
        self._is_frozen = True

    def _unfreeze(self) -> None:
        self._is_frozen = False

    def __deepcopy__(self, memory: Dict[int, Any]) -> _PopartOptions:
        copied = type(self).__new__(type(self))
        memory[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memory))
        copied._unfreeze()
        return copied

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        """Raise AttributeError if the options were frozen by their first use."""
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options" + (f": tried to set {option}" if option else ""))

    def set(self, key: str, value: Union[int, float, str, List[str], Set[str]]) -> _PopartOptions:
        """Set a backend option; the key and type are checked when a model is compiled."""
        self.checkIsFrozen(key)
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _PopartOptions:
        """Set all options of the Poplar engine."""
        return self.set("engineOptions", engine_options)  # type: ignore[arg-type]  # set() stores anything

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> _PopartOptions:
        """Set the backend's graph patterns: a base level from 0 to 2, and patterns to switch on or off."""
        self.checkIsFrozen("patterns")
        assert isinstance(level, int), f"The pattern level must be an int, got {level!r}"
        assert isinstance(patterns, dict), f"The patterns must be a dict, got {patterns!r}"
        self.options["patterns_level"] = level
        self.options["patterns"] = patterns
        return self

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{type(self).__name__}({inside})"


class _JitOptions(OptionsDict):
    """Options of the removed torch.jit tracer."""

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Warn and ignore False: the tracer was removed.

        Raises:
            ValueError: The value is True.
        """
        if trace_model:
            raise ValueError("Jit.traceModel(True): tracing with torch.jit is no longer supported, remove the call")
        logger.warning("Jit.traceModel is deprecated and has no effect: remove the call")
        return self


class _PrecisionOptions(OptionsDict):
    """Number formats in storage and computation.

    Args:
        popart_options: The backend's options.
    """

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        self._autocast_enabled = True
        self._autocast_policy: Any = None
        super().__init__()

    def halfFloatCasting(self, half_float_casting: enums.HalfFloatCastingBehavior) -> _PrecisionOptions:
        """Warn and do nothing: mixed inputs always follow torch's type promotion."""
        logger.warning("Precision.halfFloatCasting is deprecated and has no effect: remove the call")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Warn and do nothing: running statistics keep the type of the module.

        Raises:
            ValueError: The value is not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(f"Precision.runningStatisticsAlwaysFloat takes a bool, got {value!r}")
        logger.warning("Precision.runningStatisticsAlwaysFloat is deprecated and has no effect: remove the call")
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Raise an error for invalid operations and overflows at run time."""
        assert isinstance(enabled, bool), f"Precision.enableFloatingPointExceptions takes a bool, got {enabled!r}"
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round half precision results at random, with probabilities by distance."""
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the type of partial sums in matrix products and convolutions.

        Raises:
            ValueError: The type is neither torch.float32 nor torch.float16.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if not isinstance(dtype, torch.dtype) or dtype not in names:
            raise ValueError(f"Precision.setPartialsType takes torch.float32 or torch.float16, got {dtype!r}")
        name = names[dtype]
        self._popart_options.set("partialsTypeMatMuls", name)
        self._popart_options.set("convolutionOptions", {"partialsType": name})  # type: ignore[arg-type]  # stores anything
        return self

    def autocastEnabled(self, autocast_enabled: bool) -> _PrecisionOptions:
        """Switch automatic casting on or off, as PopTorch did up to 3.0 (an extra, with a warning).

        Raises:
            ValueError: The value is not a bool.
        """
        from ipurun.emulator import autocasting

        if not isinstance(autocast_enabled, bool):
            raise ValueError(f"Precision.autocastEnabled takes a bool, got {autocast_enabled!r}")
        autocasting.warn_removed("Precision.autocastEnabled")
        self._autocast_enabled = autocast_enabled
        return self

    def autocastPolicy(self, autocast_policy: Any) -> _PrecisionOptions:
        """Choose which operations are cast, as PopTorch did up to 3.0 (an extra, with a warning).

        Raises:
            ValueError: The value is not an ``autocasting.Policy``.
        """
        from ipurun.emulator import autocasting

        if not isinstance(autocast_policy, autocasting.Policy):
            raise ValueError(f"Precision.autocastPolicy takes an autocasting.Policy, got {autocast_policy!r}")
        autocasting.warn_removed("Precision.autocastPolicy")
        self._autocast_policy = autocast_policy
        return self


class _TrainingOptions(OptionsDict):
    """Options for training.

    Args:
        popart_options: The backend's options.
    """

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches accumulated for one weight update."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: enums.ReductionType) -> _TrainingOptions:
        """Set whether gradients of micro-batches and replicas are summed or averaged.

        Raises:
            ValueError: The value is not ReductionType.Sum or ReductionType.Mean.
        """
        if not isinstance(reduction_type, enums.ReductionType) or reduction_type == enums.ReductionType.NoReduction:
            raise ValueError(
                "Training.accumulationAndReplicationReductionType takes ReductionType.Sum or "
                f"ReductionType.Mean, got {reduction_type!r}"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Set when a mean reduction divides."""
        assert isinstance(mean_reduction_strategy, enums.MeanReductionStrategy), (
            f"Expected a poptorch.MeanReductionStrategy, got {mean_reduction_strategy!r}"
        )
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Adjust the loss scale to the range of the half precision gradients."""
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread convolutions over the tiles, replacing all other convolution options."""
        self._popart_options.set("convolutionOptions", {"enableConvDithering": enabled})  # type: ignore[arg-type]  # stores anything
        return self


class _DistributedOptions(OptionsDict):
    """The number and index of processes, read from Open MPI's variables unless configured."""

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        """Ignore other processes: run as a single process."""
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read the number of processes and the index of this one from environment variables.

        Raises:
            ValueError: A variable is not an integer.
        """
        return self.configureProcessId(
            int(os.environ.get(var_process_id, "0")), int(os.environ.get(var_num_processes, "1"))
        )

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the index of this process and the number of processes."""
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """The index of this process, from 0."""
        return int(self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """The number of processes."""
        return int(self._values["num_distributed_processes"])
