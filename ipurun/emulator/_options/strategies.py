"""Execution strategies: how the blocks of a model are assigned to stages and phases."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

from ipurun.emulator import enums
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._logging import logger
from ipurun.emulator._options_impl import IStageManager, Placement

BlockId = str


class Stage:
    """One or more blocks that run on one IPU.

    Args:
        block_ids: The ids of the blocks.
    """

    def __init__(self, *block_ids: BlockId) -> None:
        assert all(isinstance(block, str) for block in block_ids), f"Block IDs must be strings, got {block_ids!r}"
        self._blocks = block_ids
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: Any = None

    @property
    def blocks(self) -> Sequence[BlockId]:
        """The ids of the stage's blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """Set the IPU that the stage runs on."""
        assert isinstance(ipu, int), f"The IPU of a stage must be an int, got {ipu!r}"
        self._ipu = ipu
        return self

    def _setStage(self, stage: int) -> Stage:
        if stage is not None:
            self._stage_id = stage
        return self

    def __repr__(self) -> str:
        on_ipu = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){on_ipu}"


class _DefaultStageManager(IStageManager):
    """Creates a stage for every new block id."""

    def __init__(self, auto_stage: enums.AutoStage) -> None:
        super().__init__()
        self._auto_stage = auto_stage
        self._next_id = 1
        self._block_map: Dict[BlockId, Stage] = {}

    def getStage(self, block_id: BlockId) -> Stage:
        if block_id not in self._block_map:
            if self._auto_stage == enums.AutoStage.SameAsIpu:
                assert self._current_ipu is not None, (
                    f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block {block_id}"
                )
                stage_id = self._current_ipu
            else:
                stage_id = self._next_id
                self._next_id += 1
            self._block_map[block_id] = Stage(block_id)._setStage(stage_id)
        return self._block_map[block_id]


class _ListedStageManager(IStageManager):
    """Assigns stages to the blocks listed in the strategy, and refuses others."""

    def __init__(self, block_map: Dict[BlockId, Stage]) -> None:
        super().__init__()
        self._block_map = block_map

    def getStage(self, block_id: BlockId) -> Stage:
        assert block_id in self._block_map, (
            f"Unknown Block '{block_id}', list of expected Blocks: {list(self._block_map)}"
        )
        return self._block_map[block_id]


class _AlternatingStageManager(_ListedStageManager):
    """Refuses a block whose IPU is not in the group of its phase."""

    def beginStage(self, user_id: Optional[BlockId], ipu_id_from_block: Optional[int]) -> Placement:
        placement = super().beginStage(user_id, ipu_id_from_block)
        if placement.phase_id % 2 != placement.ipu_id % 2:
            raise createNativeError(
                f"Invalid IPU {placement.ipu_id} for phase {placement.phase_id} (block {placement.user_id}): with "
                "ParallelPhasedExecution even phases run on even IPUs, odd phases on odd IPUs"
            )
        return placement


def _map_blocks(stage: Stage, block_map: Dict[BlockId, Stage]) -> None:
    for block in stage.blocks:
        assert block not in block_map, f"{block} associated with more than one stage"
        logger.debug("block %s belongs to stage %d, phase %d", block, stage._stage_id, stage._phase_id)
        block_map[block] = stage


class _IExecutionStrategy:
    """Base class of the four strategies.

    Args:
        stages_manager: Assigns stages during capture.
        block_map: The stage of each block named by the user.
    """

    def __init__(self, stages_manager: IStageManager, block_map: Dict[BlockId, Stage]) -> None:
        self._stages_manager = stages_manager
        self._block_map = block_map

    def stage_manager(self) -> IStageManager:
        """Return the stage manager for captures."""
        return self._stages_manager

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage that a block belongs to.

        Raises:
            AssertionError: The strategy does not list that block.
        """
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def onStartTracing(self) -> None:
        """Prepare for a capture."""
        self._stages_manager.clearDebug()

    def onEndTracing(self) -> None:
        """Log the placement at the end of a capture."""
        self._stages_manager.printDebug()

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the backend settings of the strategy."""
        return {}

    def _described_arguments(self) -> str:
        return ", ".join(map(repr, dict.fromkeys(self._block_map.values())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described_arguments()})"


class Phase:
    """Stages that run in parallel.

    Args:
        arg: Stages, or ids of blocks that make up a single stage.
    """

    def __init__(self, *arg: Union[BlockId, Stage]) -> None:
        self.stages: Sequence[Stage]
        if all(isinstance(element, Stage) for element in arg):
            self.stages = arg  # type: ignore[assignment]  # all() has just checked the elements
        else:
            kinds = [type(element).__name__ for element in arg]
            assert all(isinstance(element, str) for element in arg), (
                f"All arguments must either be block IDs (strings) or Stages, got {kinds}"
            )
            self.stages = [Stage(*arg)]  # type: ignore[arg-type]  # as above

    def stage(self, idx: int) -> Stage:
        """Return a stage by its position in the phase."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Set the IPU of each stage in the phase."""
        assert len(ipus) == len(self.stages), (
            f"The phase has {len(self.stages)} stages, but {len(ipus)} IPUs were given"
        )
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self.stages))})"


class PipelinedExecution(_IExecutionStrategy):
    """Stages process successive micro-batches in parallel.

    Args:
        args: Empty, one ``AutoStage``, or the stages in order: each a ``Stage``, a block id or a list of
            block ids.
    """

    def __init__(self, *args: Any) -> None:
        self._auto_stage = enums.AutoStage.SameAsIpu
        block_map: Dict[BlockId, Stage] = {}
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            self._auto_stage = args[0]
        else:
            for stage_id, arg in enumerate(args):
                _map_blocks(self._as_stage(arg)._setStage(stage_id), block_map)
        manager: IStageManager
        if block_map:
            manager = _ListedStageManager(block_map)
        else:
            manager = _DefaultStageManager(self._auto_stage)
        super().__init__(manager, block_map)

    @staticmethod
    def _as_stage(arg: Any) -> Stage:
        if isinstance(arg, Stage):
            return arg
        if isinstance(arg, str):
            return Stage(arg)
        assert isinstance(arg, (list, tuple)), f"Expected a Stage, a block ID or a list of them, got {arg!r}"
        return Stage(*arg)

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        return {"execution_mode": 0}

    def _described_arguments(self) -> str:
        return super()._described_arguments() or f"AutoStage.{self._auto_stage.name}"


class ShardedExecution(PipelinedExecution):
    """Stages run one after another, on one micro-batch at a time."""

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        return {"execution_mode": 1}


class _IPhasedExecution(_IExecutionStrategy):
    """Phases run one after another, with unused tensors kept off chip.

    Args:
        phases: Each a ``Phase``, a list of stages, a list of block ids, a stage or a block id.
    """

    def __init__(self, *phases: Union[Phase, List[Stage], List[BlockId]]) -> None:
        assert phases, "Phased execution has no AutoStage: specify the phases explicitly"
        self._tensors_liveness = enums.Liveness.AlwaysLive
        self._separate_backward_phase = False
        self._phases: List[Phase] = []
        block_map: Dict[BlockId, Stage] = {}
        for phase_id, arg in enumerate(phases):
            phase = self._as_phase(arg)
            self._phases.append(phase)
            for stage in phase.stages:
                stage._phase_id = phase_id
                _map_blocks(stage, block_map)
        super().__init__(self._manager(block_map), block_map)

    @staticmethod
    def _manager(block_map: Dict[BlockId, Stage]) -> IStageManager:
        return _ListedStageManager(block_map)

    @staticmethod
    def _as_phase(arg: Any) -> Phase:
        if isinstance(arg, Phase):
            return arg
        return Phase(*arg) if isinstance(arg, list) else Phase(arg)

    def phase(self, phase: int) -> Phase:
        """Return a phase by its index.

        Raises:
            AssertionError: The index is negative or not an int.
        """
        assert isinstance(phase, int) and phase >= 0, f"Phases are identified by positive ints, got {phase!r}"
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> _IPhasedExecution:
        """Start the backward pass in a separate phase."""
        assert isinstance(use, bool), f"Expected a bool, got {use!r}"
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        return {
            "execution_mode": 2,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
        }

    def _described_arguments(self) -> str:
        return ", ".join(map(repr, self._phases))


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternate between two groups of IPUs."""

    @staticmethod
    def _manager(block_map: Dict[BlockId, Stage]) -> IStageManager:
        return _AlternatingStageManager(block_map)

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        return {**super().backendOptions(), "serial_phases_execution": False}

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Set whether tensors are moved off chip between forward and backward."""
        assert isinstance(off_chip, bool), f"Expected a bool, got {off_chip!r}"
        self._tensors_liveness = enums.Liveness.OffChipAfterFwd if off_chip else enums.Liveness.AlwaysLive
        return self


class SerialPhasedExecution(_IPhasedExecution):
    """Phases run on the same IPUs."""

    def setTensorsLiveness(self, liveness: enums.Liveness) -> SerialPhasedExecution:
        """Set how long tensors stay on chip."""
        assert isinstance(liveness, enums.Liveness), f"Expected a poptorch.Liveness, got {liveness!r}"
        self._tensors_liveness = liveness
        return self

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        return {**super().backendOptions(), "serial_phases_execution": True}
