"""Replacement for Graphcore's popart, used if that is not installed.

It has what PopTorch programs take from PopART: the values of enumerations, the names and defaults of session options,
prefixes of tensor names, the version and the log level. Everything that builds or runs a graph needs the Poplar SDK.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Type

from ipurun.emulator import _logging
from ipurun.emulator._impl import __version__


class popart_exception(Exception):  # noqa: N801  # the names of PopART's exceptions are part of its API
    """An error of PopART."""


class popart_internal_exception(popart_exception):  # noqa: N801
    """An error inside PopART."""


class popart_runtime_error(popart_exception):  # noqa: N801
    """An error of PopART while a program runs."""


class poplibs_exception(Exception):  # noqa: N801
    """An error of PopLibs."""


class poplar_exception(Exception):  # noqa: N801
    """An error of Poplar."""


class poplar_runtime_error(poplar_exception):  # noqa: N801
    """An error of Poplar while a program runs."""


class poplar_application_runtime_error(poplar_runtime_error):  # noqa: N801
    """An error of the program that Poplar runs."""


class poplar_system_runtime_error(poplar_runtime_error):  # noqa: N801
    """An error of the device or its driver."""


class poplar_recoverable_runtime_error(poplar_system_runtime_error):  # noqa: N801
    """A device fault that a reset can repair."""


class poplar_unrecoverable_runtime_error(poplar_system_runtime_error):  # noqa: N801
    """A device fault that no reset can repair."""


class poplar_unknown_runtime_error(poplar_system_runtime_error):  # noqa: N801
    """A device fault of unknown kind."""


class OutOfMemoryException(popart_exception):
    """A model that does not fit on the device."""


class _Enumeration(enum.Enum):
    """Base class of PopART's enumerations: members convert to int with int(), and are not equal to integers."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


def _enumeration(name: str, members: str) -> Any:
    """Return an enumeration whose members have the values 0, 1, 2, ... in this order."""
    numbered = [(member, value) for value, member in enumerate(members.split())]
    make_subclass: Any = _Enumeration
    return make_subclass(name, numbered, module=__name__)


AccumulateOuterFragmentSchedule = _enumeration(
    "AccumulateOuterFragmentSchedule", "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized"
)
AdamMode = _enumeration("AdamMode", "Adam AdamNoBias AdaMax Lamb LambNoBias")
AdaptiveMode = _enumeration("AdaptiveMode", "AdaGrad RMSProp CenteredRMSProp AdaDelta")
AnchorReturnTypeId = _enumeration("AnchorReturnTypeId", "Final EveryN All Sum")
AutodiffStitchStrategy = _enumeration(
    "AutodiffStitchStrategy", "RecomputeMinimal RecomputeAllNonInputs AddFwdOutputs SafeAddFwdOutputs"
)
BatchSerializationBatchSchedule = _enumeration(
    "BatchSerializationBatchSchedule", "Scheduler Isomorphic OverlapOnIo OverlapOnCompute"
)
BatchSerializationMethod = _enumeration("BatchSerializationMethod", "UnrollDynamic UnrollStatic Loop")
BatchSerializationTransformContext = _enumeration("BatchSerializationTransformContext", "Fwd Bwd")
CommGroupType = _enumeration("CommGroupType", "All Consecutive Orthogonal Ungrouped")
DeviceConnectionType = _enumeration("DeviceConnectionType", "Always OnDemand Never")
DeviceSelectionCriterion = _enumeration("DeviceSelectionCriterion", "First Random")
DeviceType = _enumeration("DeviceType", "IpuModel Cpu Ipu OfflineIpu Sim")
ExchangeStrategy = _enumeration("ExchangeStrategy", "JustInTime OverlapInnerLoop OverlapLoops OverlapStep")
ExecutionPhaseIOSchedule = _enumeration("ExecutionPhaseIOSchedule", "Preload OnDemand")
ExecutionPhaseSchedule = _enumeration("ExecutionPhaseSchedule", "Interleaving Batch BatchClusteredIO")
GradientTensorTrackingMethod = _enumeration(
    "GradientTensorTrackingMethod",
    "AllNonViewChangingGradientTensors ConvAndMatmulGradients GradientsOfUserSpecifiedTensors",
)
Instrumentation = _enumeration("Instrumentation", "Outer Inner")
IrSerializationFormat = _enumeration("IrSerializationFormat", "JSON")
MeanReductionStrategy = _enumeration("MeanReductionStrategy", "Running Post")
MergeVarUpdateType = _enumeration("MergeVarUpdateType", "Off All AutoLoose AutoTight")
PatternsLevel = _enumeration("PatternsLevel", "NoPatterns Minimal Default All")
RecomputationType = _enumeration("RecomputationType", "NoRecompute Standard NormOnly Pipeline RecomputeAll")
RecomputeType = _enumeration("RecomputeType", "Undefined Checkpoint Recompute Recomputed")
ReductionType = _enumeration("ReductionType", "Sum Mean NoReduction")
ReplicatedTensorSharding = _enumeration("ReplicatedTensorSharding", "Off On")
SGDAccumulatorAndMomentum = _enumeration("SGDAccumulatorAndMomentum", "Combined Separate")
SubgraphCopyingStrategy = _enumeration("SubgraphCopyingStrategy", "OnEnterAndExit JustInTime")
SyncPattern = _enumeration("SyncPattern", "Full SinglePipeline ReplicaAndLadder")
SyntheticDataMode = _enumeration("SyntheticDataMode", "Off Zeros RandomNormal RandomUniform")
TensorStorage = _enumeration("TensorStorage", "OnChip OffChip")
TileSet = _enumeration("TileSet", "Compute IO")
VariableRetrievalMode = _enumeration("VariableRetrievalMode", "OnePerGroup AllReduceReplicas AllReplicas")
VirtualGraphMode = _enumeration("VirtualGraphMode", "Off Manual Auto ExecutionPhases")
WeightDecayMode = _enumeration("WeightDecayMode", "Decay L2Regularization")


@dataclasses.dataclass
class TensorLocation:
    """Where a tensor is stored."""

    storage: Any = TensorStorage.OnChip
    loadTileSet: Any = TileSet.Compute
    storageTileSet: Any = TileSet.Compute
    replicatedTensorSharding: Any = ReplicatedTensorSharding.Off


@dataclasses.dataclass
class TensorLocationSettings:
    """Where the tensors of one kind are stored, and from which size on."""

    location: Any = dataclasses.field(default_factory=TensorLocation)
    minElementsForOffChip: int = 2
    minElementsForReplicatedTensorSharding: int = 8192


@dataclasses.dataclass
class AccumulateOuterFragmentSettings:
    """How the operations after gradient accumulation are scheduled."""

    schedule: Any = AccumulateOuterFragmentSchedule.Serial
    excludedVirtualGraphs: List[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class AutodiffSettings:
    """How the backward graph gets the tensors of the forward graph."""

    stitchStrategy: Any = AutodiffStitchStrategy.RecomputeAllNonInputs


@dataclasses.dataclass
class AutomaticLossScalingSettings:
    """How the loss scale is adjusted."""

    enabled: bool = False
    toTrackTensors: Optional[List[str]] = None
    binEdgeLocation: float = 0.125
    thresholdUpperCountProportion: float = 1e-7
    updatePeriod: int = 1
    gradientTensorTrackingMethod: Any = GradientTensorTrackingMethod.AllNonViewChangingGradientTensors


@dataclasses.dataclass
class BatchSerializationSettings:
    """How operations are split along the batch."""

    factor: int = 0
    concatOnVirtualGraphChange: bool = True
    concatOnExecutionPhaseChange: bool = True
    concatOnPipelineStageChange: bool = True
    transformContext: Any = BatchSerializationTransformContext.Fwd
    method: Any = BatchSerializationMethod.UnrollDynamic
    batchSchedule: Any = BatchSerializationBatchSchedule.Isomorphic


@dataclasses.dataclass
class ExecutionPhaseSettings:
    """How the phases of a phased execution load and store tensors."""

    phases: int = 0
    stages: int = 2
    weightIOSchedule: Any = ExecutionPhaseIOSchedule.Preload
    activationIOSchedule: Any = ExecutionPhaseIOSchedule.Preload
    optimizerStateIOSchedule: Any = ExecutionPhaseIOSchedule.OnDemand
    accumulatorIOSchedule: Any = ExecutionPhaseIOSchedule.Preload
    schedule: Any = ExecutionPhaseSchedule.Interleaving


@dataclasses.dataclass
class ReplicatedCollectivesSettings:
    """How collective operations of replicas are merged."""

    prepareScheduleForMergingCollectives: bool = False
    mergeAllReduceCollectives: bool = False


_OFF_BY_DEFAULT = """
    aliasZeroCopy createImplicitPipeliningFwdOnlyProgram decomposeGradSum disableGradAccumulationTensorStreams
    disableOptimizerStateTensorStreams dotOpNames enableDistributedReplicatedGraphs enableEngineCaching
    enableExplicitMainLoops enableFloatingPointChecks enableGradientAccumulation enableInplaceAmbiguityChecking
    enableLoadAndOffloadRNGState enableNonStableSoftmax enablePipelining enableReplicatedGraphs enableStableNorm
    enableStochasticRounding ensureFp32LossScaleTensor explicitRecomputation exportPoplarComputationGraph
    exportPoplarVertexGraph groupHostSync groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter
    opxAliasChecking opxModifyChecking rearrangeStreamsOnHost scheduleNonWeightUpdateGradientConsumersEarly
    useHostCopyOps
"""
_ON_BY_DEFAULT = """
    compileEngine constantWeights delayVarUpdates enableFullyConnectedPass enableMergeExchange enableOutlining
    enableOutliningCopyCostPruning enablePrefetchDatastreams enableSerializedMatmuls enableSupportedDataTypeCasting
    rearrangeAnchorsOnHost separateCallOpPdfs strictOpVersions
"""


def _default_options() -> Dict[str, Any]:
    return {
        **dict.fromkeys(_OFF_BY_DEFAULT.split(), False),
        **dict.fromkeys(_ON_BY_DEFAULT.split(), True),
        "accumulateOuterFragmentSettings": AccumulateOuterFragmentSettings(),
        "accumulationAndReplicationReductionType": ReductionType.Sum,
        "accumulationFactor": 1,
        "accumulatorTensorLocationSettings": TensorLocationSettings(),
        "activationTensorLocationSettings": TensorLocationSettings(),
        "autoRecomputation": RecomputationType.NoRecompute,
        "autodiffSettings": AutodiffSettings(),
        "automaticLossScalingSettings": AutomaticLossScalingSettings(),
        "batchSerializationSettings": BatchSerializationSettings(),
        "bufferingDepthMap": {},
        "cachePath": "session_cache",
        "compilationProgressTotal": 100,
        "convolutionOptions": {},
        "customCodeletCompileFlags": "",
        "customCodelets": [],
        "defaultBufferingDepth": 1,
        "dotChecks": set(),
        "engineOptions": {},
        "executionPhaseSettings": ExecutionPhaseSettings(),
        "finalDotOp": 10000,
        "firstDotOp": 0,
        "gclOptions": {},
        "globalReplicaOffset": 0,
        "globalReplicationFactor": 1,
        "hardwareInstrumentations": {Instrumentation.Outer},
        "kahnTieBreaker": "greedy",
        "logDir": "",
        "looseThresholdAtPeak": 8000,
        "lstmOptions": {},
        "matmulOptions": {},
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
        "mergeVarUpdate": MergeVarUpdateType.Off,
        "mergeVarUpdateMemThreshold": 1000000,
        "numIOTiles": 0,
        "optimizerStateTensorLocationSettings": TensorLocationSettings(),
        "outlineSequenceBreakCost": 10000.0,
        "outlineThreshold": 1.0,
        "partialsTypeMatMuls": "",
        "replicatedCollectivesSettings": ReplicatedCollectivesSettings(),
        "replicatedGraphCount": 1,
        "reportOptions": {},
        "serializedPoprithmsShiftGraphsDir": "",
        "subgraphCopyingStrategy": SubgraphCopyingStrategy.OnEnterAndExit,
        "swapLimitScheduler": 10**9,
        "syntheticDataMode": SyntheticDataMode.Off,
        "tensorLocationSettingsOverride": {},
        "timeLimitScheduler": 1e9,
        "transitiveClosureOptimizationThreshold": 100000,
        "virtualGraphMode": VirtualGraphMode.Off,
        "weightTensorLocationSettings": TensorLocationSettings(),
    }


class SessionOptions:
    """The options of a PopART session, with their defaults. PopTorch programs set them with `Options._Popart.set`."""

    def __init__(self) -> None:
        self.__dict__.update(_default_options())

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(f"popart.SessionOptions has no option {name!r}")
        self.__dict__[name] = value

    def enableExplicitIR(self, enable: bool) -> None:
        """Turn the three options on or off that make the graph explicit."""
        self.useHostCopyOps = self.enableExplicitMainLoops = self.explicitRecomputation = enable


class Logger:
    """PopART's log.

    Args:
        name: The part of PopART that logs.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def setLevel(self, level: str) -> None:
        """Set the level of PopART's log; all parts share one level here.

        Raises:
            ValueError: The level is unknown.
        """
        _logging.setPopartLogLevel(level)


def getLogger(name: str = "all") -> Logger:
    """Return the log of a part of PopART."""
    return Logger(name)


def versionString() -> str:
    """Return the version of PopART."""
    return __version__


def versionNumber() -> Tuple[int, int, int]:
    """Return the version of PopART as three numbers."""
    major, minor, point = __version__.split("-")[0].split(".")
    return int(major), int(minor), int(point)


_PREFIXES = {
    "hostReduceGradCopyPrefix": "hostReduceGradCopy___",
    "hostReduceVarCopyPrefix": "hostReduceVarCopy___",
    "reservedAccl1Prefix": "Accl1___",
    "reservedAccl2Prefix": "Accl2___",
    "reservedAccl3Prefix": "Accl3___",
    "reservedAcclFinalOutPrefix": "AcclOutOfAcclUpdate___",
    "reservedAcclPrefix": "Accl___",
    "reservedAcclToReducePrefix": "AcclIntoReduce___",
    "reservedAcclToUpdatePrefix": "AcclIntoUpdate___",
    "reservedAccumPrefix": "Accum___",
    "reservedAdamUpdaterPrefix": "AdamUpdater___",
    "reservedDefaultAdamBeta1Prefix": "adamBeta1___default___",
    "reservedDefaultAdamBeta2Prefix": "adamBeta2___default___",
    "reservedDefaultAdamEpsPrefix": "adamEps___default___",
    "reservedDefaultLearningRatePrefix": "learningRate___default___",
    "reservedDefaultLossScalingPrefix": "lossScaling___default___",
    "reservedDefaultStepPrefix": "step___default___",
    "reservedDefaultWeightDecayPrefix": "weightDecay___default___",
    "reservedGradientPrefix": "Gradient___",
    "reservedLambR1SqPrefix": "LambR1Sq___",
    "reservedLambR2SqPrefix": "LambR2Sq___",
    "reservedLossScalingPrefix": "lossScaling_",
    "reservedRandomSeedPrefix": "randomSeed___",
    "reservedRestoredPrefix": "Restored___",
    "reservedSpecificAdamBeta1Prefix": "adamBeta1___specific___",
    "reservedSpecificAdamBeta2Prefix": "adamBeta2___specific___",
    "reservedSpecificAdamEpsPrefix": "adamEps___specific___",
    "reservedSpecificLearningRatePrefix": "learningRate___specific___",
    "reservedSpecificLossScalingPrefix": "lossScaling___specific___",
    "reservedSpecificStepPrefix": "step___specific___",
    "reservedSpecificWeightDecayPrefix": "weightDecay___specific___",
    "reservedStashedPrefix": "Stashed___",
    "reservedStepPrefix": "Step___",
    "reservedUpdatedVarPrefix": "UpdatedVar___",
}
_NEED_THE_SDK = """
    Adam Adaptive AnchorReturnType Builder ConstSGD DataFlow DeviceInfo DeviceManager GraphTransformer InferenceSession
    InputSettings InputShapeInfo Ir NumericsReport Patterns PyStepIO PyStepIOCallback PyWeightsIO SGD Session TensorInfo
    TrainingSession getSupportedOperations getSupportedOperationsDefinition getUnsupportedOperations
"""


def _stand_in(name: str) -> Type[Any]:
    """Return a class whose instances cannot be made, for programs that import a name without using it."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise popart_exception(
            f"popart.{name} needs the Poplar SDK: the CPU emulator runs PopTorch programs, not PopART programs. "
            "Its popart has only enumerations, session options, names and the version."
        )

    return type(name, (), {"__init__": refuse, "__module__": "popart", "__doc__": "Needs the Poplar SDK."})


def _prefix(text: str) -> Callable[[], str]:
    return lambda: text


def __getattr__(name: str) -> Any:
    if name in _PREFIXES:
        return _prefix(_PREFIXES[name])
    if name in _NEED_THE_SDK.split():
        return globals().setdefault(name, _stand_in(name))
    raise AttributeError(f"the CPU emulator's popart has no {name!r}; if PopART has it, it needs the Poplar SDK")
