"""The enumerations that the runner names."""

from enum import IntEnum

OutputMode = IntEnum("OutputMode", ["Final", "EveryN", "All", "Sum", "Default"], start=0)
DataLoaderMode = IntEnum("DataLoaderMode", ["Sync", "Async", "AsyncRebatched"], start=0)
ConnectionType = IntEnum("ConnectionType", ["Always", "OnDemand", "Never"], start=0)
SyncPattern = IntEnum("SyncPattern", ["Full", "SinglePipeline", "ReplicaAndLadder"], start=0)
ReductionType = IntEnum("ReductionType", ["Sum", "Mean", "NoReduction"], start=0)
MeanReductionStrategy = IntEnum("MeanReductionStrategy", ["Running", "Post"], start=0)
CommGroupType = IntEnum("CommGroupType", ["All", "Consecutive", "Orthogonal", "NoGrouping"], start=0)
AutoStage = IntEnum("AutoStage", ["SameAsIpu", "AutoIncrement"], start=0)
OverlapMode = IntEnum("OverlapMode", ["NoOverlap", "OverlapAccumulationLoop", "OverlapDeviceIterationLoop"], start=0)
MatMulSerializationMode = IntEnum(
    "MatMulSerializationMode", ["InputChannels", "ReducingDim", "OutputChannels", "Disabled"], start=0
)
