"""``Options``: how a model is compiled and run."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from typing import Any, Dict, List, Optional, Type

import torch

from ipurun.emulator import enums
from ipurun.emulator._logging import logger
from ipurun.emulator._ops.annotations import Attribute
from ipurun.emulator._options.groups import (
    TensorLocationSettings,
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)
from ipurun.emulator._options.strategies import (
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    _DefaultStageManager,
    _IExecutionStrategy,
    _IPhasedExecution,
)
from ipurun.emulator._options_impl import OptionsDict, merge

__all__ = [
    "Attribute",
    "BlockId",
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "_DefaultStageManager",
    "_DistributedOptions",
    "_IExecutionStrategy",
    "_IPhasedExecution",
    "_JitOptions",
    "_OptionsDict",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
    "apply_file",
    "apply_json",
]
_UNLIMITED_LOGS = 2**64 - 1
_PROFILING_KEYS = ("debug.allowOutOfMemory", "autoReport.directory", "autoReport.all")


class ConfigFileError(Exception):
    """A line of an options file is not valid Python."""


def _statements(filepath: str) -> List[str]:
    with open(filepath, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [f"options.{line}" for line in lines if line and not line.startswith("#")]


def apply_file(options: Options, filepath: str) -> None:
    """Apply a file of statements such as ``deviceIterations(4)`` to the options.

    Raises:
        ConfigFileError: A line is not valid Python; no line was applied.
    """
    statements = _statements(filepath)
    try:
        code = compile("\n".join(statements), filepath, "exec")
    except SyntaxError as error:
        # Older Pythons report an unclosed bracket one line after the last.
        number = min(error.lineno or 1, len(statements))
        raise ConfigFileError(
            f"{type(error).__name__} at line {number} of {os.path.basename(filepath)}: {_wording(error)}\n"
            f"> {statements[number - 1]}"
        ) from error
    exec(code, {"options": options, "poptorch": sys.modules[__package__]})


def _wording(error: SyntaxError) -> str:
    # Since 3.10, Python names the open bracket; programs expect the message of 3.8, which PopTorch 3.4 runs on.
    return "unexpected EOF while parsing" if error.msg.endswith("was never closed") else error.msg


def _converted(value: Any) -> Any:
    """Convert "Enum.Member" to that member; return anything else unchanged."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    enum_name, member_name = value.split(".")
    members = getattr(getattr(enums, enum_name, None), "__members__", {})
    return members.get(member_name, value)


def apply_json(options: Options, string: str) -> None:
    """Call the setters named by a JSON object: ``{"Training.gradientAccumulation": 4}``."""
    for accessor, value in json.loads(string).items():
        setter = functools.reduce(getattr, accessor.split("."), options)
        if isinstance(value, list):
            setter(*value)
        else:
            setter(_converted(value))


# The name that older programs use.
_OptionsDict = OptionsDict


def _checked(value: Any, kind: Type[Any], setter: str) -> Any:
    assert isinstance(value, kind), f"{setter} takes a {kind.__name__}, got {value!r}"
    return value


class Options(OptionsDict):
    """All options of a model; every setter returns the options, so that calls can be chained."""

    def __init__(self) -> None:
        self._jit = _JitOptions()
        self._popart = _PopartOptions()
        self._precision = _PrecisionOptions(self._popart)
        self._training = _TrainingOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._execution_strategy: _IExecutionStrategy = PipelinedExecution()
        self._show_compilation_progress_bar = True
        self._relax_optimizer_checks = False
        self._module_namescope_enabled = True
        self._source_location_excludes = ["install/poptorch", "site-packages/torch", "site-packages/poptorch"]
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=enums.CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default.value,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always.value,
            sync_pattern=enums.SyncPattern.Full.value,
            available_memory_proportion={},
        )
        cache_path = os.environ.get("POPTORCH_CACHE_DIR", "")
        if cache_path:
            self.enableExecutableCaching(cache_path)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS", "{}"))

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """The locations of tensors on the device."""
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        """The number and index of processes."""
        return self._distributed

    @property
    def Jit(self) -> _JitOptions:
        """Options of the removed torch.jit tracer."""
        return self._jit

    @property
    def Precision(self) -> _PrecisionOptions:
        """Number formats in storage and computation."""
        return self._precision

    @property
    def Training(self) -> _TrainingOptions:
        """Options for training."""
        return self._training

    @property
    def _Popart(self) -> _PopartOptions:
        return self._popart

    def _groups(self) -> List[Any]:
        return [
            self._training,
            self._distributed,
            self._tensor_locations,
            self._precision,
            self._jit,
            self._popart,
        ]

    def _freeze(self) -> None:
        super()._freeze()
        for group in self._groups():
            group._freeze()

    def _unfreeze(self) -> None:
        super()._unfreeze()
        for group in self._groups():
            group._unfreeze()

    def from_json(self, string: str) -> Options:
        """Call the setters named by a JSON object: ``{"Training.gradientAccumulation": 4}``."""
        apply_json(self, string)
        return self

    def loadFromFile(self, filepath: str) -> Options:
        """Apply a file of statements such as ``deviceIterations(4)``, one per line.

        Raises:
            ConfigFileError: A line is not valid Python; no line was applied.
        """
        apply_file(self, filepath)
        return self

    def sourceLocationExcludes(self, excludes: List[str]) -> Options:
        """Set the path fragments to skip when finding the source line of an op."""
        self._source_location_excludes = list(excludes)
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Add path fragments to skip when finding the source line of an op."""
        self._source_location_excludes = [*self._source_location_excludes, *excludes]
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Show a progress bar during compilation; ``compilationTime`` needs it."""
        self._show_compilation_progress_bar = show
        return self

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Log unknown optimizer attributes at debug level instead of warning."""
        self._relax_optimizer_checks = relax
        return self

    def disableModuleNamescope(self) -> Options:
        """Leave module names out of the names of ops."""
        self._module_namescope_enabled = False
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """Round the number of IPUs that a model uses up to the next power of two."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set the number of iterations that the device runs per call."""
        self.set(device_iterations=device_iterations)
        return self

    def setExecutionStrategy(self, strategy: Any) -> Options:
        """Set the execution strategy: pipelined, sharded or phased."""
        self._execution_strategy = _checked(strategy, _IExecutionStrategy, "setExecutionStrategy")
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: Dict[str, float]) -> Options:
        """Set the proportion of memory for temporary data: ``{"IPU0": 0.3}``.

        Raises:
            AssertionError: A key does not begin with "IPU".
            ValueError: No number follows "IPU".
        """
        by_number = {}
        for key, proportion in available_memory_proportion.items():
            assert key.startswith("IPU"), f"Keys must look like 'IPU0', got {key!r}"
            by_number[int(key[len("IPU") :])] = proportion
        self.createOrSet(available_memory_proportion=by_number)
        return self

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas of the model in this process."""
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: enums.CommGroupType) -> Options:
        """Let groups of replicas receive the same data.

        Raises:
            ValueError: The size does not divide the replication factor, or the type is All.
        """
        if input_group_type == enums.CommGroupType.All:
            raise ValueError("inputReplicaGrouping does not support CommGroupType.All")
        if input_group_type == enums.CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, enums.CommGroupType.Consecutive
        replicas = self.replication_factor
        if input_group_size > replicas or replicas % input_group_size != 0:
            raise ValueError(
                f"The input group size ({input_group_size}) must divide the replication factor ({replicas})"
            )
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Set whether replicas share one copy of the buffers or have separate ones."""
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def logDir(self, log_dir: str) -> Options:
        """Set the folder of log files."""
        self.set(log_dir=log_dir)
        return self

    def maxRepeatLogs(self, max_lines: Optional[int]) -> Options:
        """Limit how often a line is logged; None removes the limit."""
        self.set(max_repeat_logs=_UNLIMITED_LOGS if max_lines is None else max_lines)
        return self

    def modelName(self, name: str) -> Options:
        """Name the model in reports."""
        self.createOrSet(model_name=name)
        return self

    def enableExecutableCaching(self, path: Optional[str]) -> Options:
        """Cache compiled models in a folder; None turns the cache off."""
        if path is None:
            self._popart.set("enableEngineCaching", False)
        else:
            self._popart.set("cachePath", path)
            self._popart.set("enableEngineCaching", True)
        return self

    def useIpuModel(self, use_model: bool) -> Options:
        """Use the simulator instead of hardware."""
        self.createOrSet(use_model=use_model)
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        """Set when a device is attached."""
        checked = _checked(connection_type, enums.ConnectionType, "connectionType")
        self.set(connection_type=checked.value)
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        """Set which IPUs synchronise with each other."""
        self.set(sync_pattern=_checked(sync_pattern, enums.SyncPattern, "syncPattern").value)
        return self

    def useIpuId(self, ipu_id: int) -> Options:
        """Use the device with this id."""
        self.createOrSet(ipu_id=_checked(ipu_id, int, "useIpuId"))
        return self

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        """Compile for a version of the IPU without attaching to one."""
        self.connectionType(enums.ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: Optional[enums.OutputMode] = None,
        output_return_period: Optional[int] = 1,
    ) -> None:
        """Make a tensor of the graph readable by a short name after each call."""
        follows_model = output_mode is None
        mode = self.output_mode if follows_model else output_mode
        period = output_return_period if mode == enums.OutputMode.EveryN else 1
        self._values["anchored_tensors"][short_name] = [long_name, follows_model, mode, period]

    def outputMode(self, output_mode: enums.OutputMode, output_return_period: Optional[int] = None) -> Options:
        """Set which micro-batches of a call produce the outputs.

        Args:
            output_mode: All, Final, Sum or EveryN; Default means Final in training, All in inference.
            output_return_period: For EveryN, return one of this many batches.
        """
        _checked(output_mode, enums.OutputMode, "outputMode")
        if output_mode == enums.OutputMode.EveryN:
            assert output_return_period and output_return_period > 0, (
                f"EveryN needs an output_return_period greater than 0, got {output_return_period!r}"
            )
        elif output_return_period is not None:
            logger.info("output_return_period=%s is ignored by %s", output_return_period, output_mode)
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def randomSeed(self, random_seed: int) -> Options:
        """Seed the random numbers of the device, and immediately torch's on the host."""
        self.createOrSet(random_seed=_checked(random_seed, int, "randomSeed"))
        torch.manual_seed(random_seed)
        return self

    def enableStableNorm(self, enabled: bool) -> Options:
        """Compute norms in a slower, more stable way on the device."""
        self._popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Options:
        """Use random data generated on the device instead of the host's."""
        self._popart.set("syntheticDataMode", 2 if enabled else 0)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """Count the device's cycles; hardware only."""
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self, profile_dir: Optional[str] = None) -> Options:
        """Write a profile of each compiled model to a folder."""
        from_environment = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        for key in _PROFILING_KEYS:
            if key in from_environment:
                logger.warning("POPLAR_ENGINE_OPTIONS sets %s, which enableProfiling() also sets", key)
        values = ("true", "." if profile_dir is None else profile_dir, "true")
        engine_options = dict(self._popart.options.get("engineOptions", {}))
        engine_options.update(zip(_PROFILING_KEYS, values))
        self._popart.setEngineOptions(engine_options)
        return self

    def updatableNamedBuffers(self, buffers: List[str]) -> Options:
        """Set the buffers that ``copyNamedBuffersToDevice`` uploads."""
        self._popart.set("updatableNamedBuffers", buffers)
        return self

    def toDict(self) -> Dict[str, Any]:
        """Return all settings for the backend; the output mode must be set."""
        assert not self.defaultOutputMode(), "The output mode must be chosen before the options are used"
        merged = merge(dict(self._execution_strategy.backendOptions()), self._popart.options)
        merged = self.update(merged)
        for group in (self._training, self._distributed, self._tensor_locations):
            merged = group.update(merged)
        return merged

    def clone(self) -> Options:
        """Return a copy that can be changed."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        stored = [f"{name}={value!r}" for name, value in self._values.items()]
        stored += [f"_execution_strategy={self._execution_strategy!r}"]
        groups = ("Training", "Distributed", "TensorLocations", "Precision", "Jit", "_Popart")
        stored += [f"{name}={getattr(self, name)!r}" for name in groups]
        return f"Options({', '.join(stored)})"
