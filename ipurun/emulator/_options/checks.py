"""Check and log the options of a model as the backend does."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet

from ipurun.emulator._impl import createNativeError
from ipurun.emulator._logging import native_logger


def _names(text: str) -> FrozenSet[str]:
    return frozenset(text.split())


_BOOL_KEYS = _names("""
    aliasZeroCopy auto_round_num_ipus automaticLossScalingSettings.enabled
    batchSerializationSettings.concatOnExecutionPhaseChange
    batchSerializationSettings.concatOnPipelineStageChange
    batchSerializationSettings.concatOnVirtualGraphChange broadcast_buffers compileEngine constantWeights
    decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams
    disableOptimizerStateTensorStreams dotOpNames enableDistributedReplicatedGraphs enableEngineCaching
    enableExplicitIR enableExplicitMainLoops enableFloatingPointChecks enableFullyConnectedPass
    enableGradientAccumulation enableInplaceAmbiguityChecking enableLoadAndOffloadRNGState
    enableMergeExchange enableNonStableSoftmax enableOutlining enableOutliningCopyCostPruning
    enablePipelining enablePrefetchDatastreams enableReplicatedGraphs enableSerializedMatmuls
    enableStableNorm enableStochasticRounding enableSupportedDataTypeCasting ensureFp32LossScaleTensor
    explicitRecomputation exportPoplarComputationGraph exportPoplarVertexGraph groupHostSync
    groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter opxAliasChecking opxModifyChecking
    rearrangeAnchorsOnHost rearrangeStreamsOnHost
    replicatedCollectivesSettings.mergeAllReduceCollectives
    replicatedCollectivesSettings.prepareScheduleForMergingCollectives
    scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs separate_backward_phase
    serial_phases_execution strictOpVersions useHostCopyOps use_model
""")
_INT_KEYS = _names("""
    accumulateOuterFragmentSettings.schedule accumulationFactor accumulation_and_replication_reduction_type
    automaticLossScalingSettings.updatePeriod batchSerializationSettings.factor compilationProgressTotal
    connection_type defaultBufferingDepth defaultPrefetchBufferingDepth device_iterations
    distributed_process_id executionPhaseSettings.phases executionPhaseSettings.stages execution_mode
    finalDotOp firstDotOp globalReplicaOffset globalReplicationFactor gradient_accumulation input_cgt
    input_group_size ipu_id ipu_version looseThresholdAtPeak max_repeat_logs mergeVarUpdateMemThreshold
    numIOTiles num_distributed_processes output_mode output_return_period random_seed replication_factor
    swapLimitScheduler sync_pattern tensors_liveness transitiveClosureOptimizationThreshold
""")
_FLOAT_KEYS = _names("""
    automaticLossScalingSettings.binEdgeLocation automaticLossScalingSettings.thresholdUpperCountProportion
    outlineSequenceBreakCost outlineThreshold timeLimitScheduler
""")
_STRING_KEYS = _names("""
    cachePath customCodeletCompileFlags kahnTieBreaker logDir log_dir model_name partialsTypeMatMuls
    saveInitializersToFile serializedPoprithmsShiftGraphsDir
""")
_LIST_KEYS = _names("""
    accumulateOuterFragmentSettings.excludedVirtualGraphs customCodelets dotChecks hardwareInstrumentations
    updatableNamedBuffers
""")
_DICT_KEYS = _names("convolutionOptions engineOptions gclOptions lstmOptions matmulOptions reportOptions")

# Number of members of the backend's enumeration for each key.
_ENUM_SIZES: Dict[str, int] = {
    "accumulationAndReplicationReductionType": 3,
    "autoRecomputation": 5,
    "autodiffSettings.stitchStrategy": 4,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": 3,
    "batchSerializationSettings.batchSchedule": 4,
    "batchSerializationSettings.method": 3,
    "batchSerializationSettings.transformContext": 2,
    "meanAccumulationAndReplicationReductionStrategy": 2,
    "mergeVarUpdate": 4,
    "subgraphCopyingStrategy": 2,
    "syntheticDataMode": 4,
    "virtualGraphMode": 4,
}
# Structured values, which are read separately.
_STRUCTURED_KEYS = _names("""
    anchored_tensors available_memory_proportion ipuof_configs location_accumulator location_activation
    location_optimizer location_weight patterns patterns_level
""")


def check_backend_options(options: Dict[str, Any]) -> None:
    """Check and log ``Options.toDict()``.

    Raises:
        Error: The backend has no option with that name and type of value, or an enumeration value is out of
            range.
    """
    for key, value in options.items():
        if key not in _STRUCTURED_KEYS:
            _check_option(key, value)


def _check_option(key: str, value: Any) -> None:
    if isinstance(value, bool):
        _check_scalar(key, str(value).lower(), "bool", _BOOL_KEYS)
    elif isinstance(value, float):
        _check_scalar(key, str(value), "float", _FLOAT_KEYS)
    elif isinstance(value, int):
        _check_enum_range(key, int(value))
        _check_scalar(key, str(int(value)), "int", _INT_KEYS.union(_ENUM_SIZES))
    elif isinstance(value, str):
        _check_scalar(key, value, "string", _STRING_KEYS)
        if key == "logDir":
            native_logger.warning("Ignoring the PopART option logDir: use poptorch.Options.logDir instead")
    elif isinstance(value, (list, set, tuple)):
        for element in value:
            _check_known(key, "container", _LIST_KEYS)
            native_logger.debug("poptorch.Options added %s to %s", element, key)
    elif isinstance(value, dict):
        for name, element in value.items():
            _check_known(key, "map", _DICT_KEYS)
            native_logger.debug("poptorch.Options set %s[%s] to %s", key, name, element)
    else:
        raise createNativeError(f"Unknown value type {type(value)} for option {key}")


def _check_scalar(key: str, shown: str, kind: str, known: FrozenSet[str]) -> None:
    _check_known(key, kind, known)
    native_logger.debug("poptorch.Options set %s to value %s", key, shown)


def _check_known(key: str, kind: str, known: FrozenSet[str]) -> None:
    if key not in known:
        raise createNativeError(f"Unknown {kind} option {key}")


def _check_enum_range(key: str, value: int) -> None:
    size = _ENUM_SIZES.get(key)
    if size is not None and not 0 <= value < size:
        raise createNativeError(f"Value for {key} out of range: got {value}, expected 0 to {size - 1}")
