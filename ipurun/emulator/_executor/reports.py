"""The questions that can be put to an executor after it compiled or ran."""

from __future__ import annotations

import datetime
import json
from typing import Any, Dict, List, Optional, Tuple

import torch

from ipurun.emulator._capture.graph import Placement
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logging import native_logger
from ipurun.emulator._logs.lowering import lowered_ops
from ipurun.emulator._run.executable import Executable

__all__ = ["ExecutorReports"]

# A nominal clock, to turn measured seconds into a number of cycles.
_CYCLES_PER_SECOND = 1.85e9


class ExecutorReports:
    """Reports of an executor; the executor's own state is set by its constructor."""

    _executable: Optional[Executable]
    _is_attached: bool
    _options: Any
    _compilation_time: Optional[datetime.timedelta]

    def _compiled(self, what: str) -> Executable:
        if self._executable is None:
            raise createPoptorchError(f"Model has not been compiled or has been destroyed: {what} needs it compiled.")
        return self._executable

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._executable is not None

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and attached."""
        return self._executable is not None and self._is_attached

    def compilationTime(self) -> datetime.timedelta:
        """Returns how long the last compile took.

        Raises:
            Error: If the model is not compiled, or if the progress bar, which measures, is off.
        """
        self._compiled("compilationTime")
        if not self._options._show_compilation_progress_bar or self._compilation_time is None:
            raise createPoptorchError(
                "compilationTime needs the compilation progress bar: use Options.showCompilationProgressBar(True)."
            )
        return self._compilation_time

    def cycleCount(self) -> int:
        """Returns a nominal number of cycles for the time that the last call took.

        Raises:
            Error: If cycles are not counted, or if nothing ran yet.
        """
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        seconds = 0.0 if self._executable is None else self._executable.timestamps.duration
        if seconds == 0.0:
            raise createPoptorchError("Please run the model at least once before obtaining cycle count.")
        return int(seconds * _CYCLES_PER_SECOND)

    def __getstate__(self) -> Dict[str, Any]:
        """What is compiled is not pickled: the copy compiles at its first call. See `save` for files."""
        kept = dict(self.__dict__)
        kept.update(_executable=None, _compiled_arguments=None, _is_attached=False, _dirty_host_weights=False)
        return kept

    def _log_cycles(self) -> None:
        if self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            native_logger.info("Total number of IPU cycles: %d", self.cycleCount())

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Returns when each tensor of the last call was read, read whole, computed and handed over, in seconds."""
        events = ("input", "input_complete", "output", "output_complete")
        if self._options._Popart.options.get("syntheticDataMode", 0):
            return {event: [] for event in events}  # nothing is exchanged with the host
        if self._executable is None:
            return {event: [[]] for event in events}
        graph = self._executable.graph
        return self._executable.timestamps.counters(len(graph.inputs_of("input")), len(graph.outputs))

    def getHostIpuLatency(self) -> Tuple[float, float, float]:
        """Returns minimum, maximum and mean seconds in which inputs were read."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Tuple[float, float, float]:
        """Returns minimum, maximum and mean seconds between the inputs and the outputs of a run."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Tuple[float, float, float]:
        """Returns minimum, maximum and mean seconds in which outputs were handed over."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> Tuple[float, float, float]:
        """Returns minimum, maximum and mean seconds between reading inputs and handing outputs over."""
        return self._latency("input", "output_complete")

    def _latency(self, start: str, end: str) -> Tuple[float, float, float]:
        if self._executable is None:
            return (0.0, 0.0, 0.0)
        return self._executable.timestamps.latency(start, end)

    def getTensorNames(self) -> List[str]:
        """Returns the names of the tensors that can be anchored.

        Raises:
            AssertionError: If the model is not compiled.
        """
        assert self._executable is not None, "Model is not compiled: getTensorNames needs it compiled"
        return self._executable.anchors.names(self._executable.optimizer_state())

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Returns the value that an anchored tensor had in the last call.

        Args:
            short_name: The name given to `Options.anchorTensor`.

        Raises:
            AssertionError: If there is no such anchor or nothing ran yet.
        """
        assert self._executable is not None, "Model is not compiled: there are no anchored tensors"
        assert short_name in self._executable.anchors.values, f"No anchored tensor named {short_name}"
        return self._executable.anchors.values[short_name]

    def placements(self) -> List[Tuple[str, Placement, str]]:
        """Returns operation, placement and source line of every forward operation.

        Raises:
            Error: If the model is not compiled.
        """
        return self._compiled("placements").graph.placements()

    def _debugGetPopartIR(self) -> str:
        executable = self._compiled("_debugGetPopartIR")
        graph = executable.graph
        backend = self._options._Popart.options
        forward = [
            _dumped(op.type, op.name, op.placement, **_partials(op.type, backend))
            for op in lowered_ops(graph, self._options._module_namescope_enabled)
        ]
        backward = [_dumped(node.name, node.name, node.placement) for node in graph.nodes if node.is_backward]
        optimizer = executable.optimizer
        updates = [] if optimizer is None else [_dumped(name, name, Placement()) for name in optimizer.operations()]
        return json.dumps({"maingraph": forward + backward + updates}, separators=(",", ":"))


def _dumped(op_type: str, name: str, placement: Placement, **attributes: str) -> Dict[str, Any]:
    return {"type": op_type, "name": name, "attributes": {**placement._asdict(), **attributes}}


def _partials(op_type: str, backend: Dict[str, Any]) -> Dict[str, str]:
    """Returns the type of partial results that the options ask for (Precision.setPartialsType)."""
    if op_type == "MatMul":
        return {"partialsType": f"MatMulPartialsType::{backend.get('partialsTypeMatMuls', 'float').upper()}"}
    if op_type in ("Conv", "MultiConv"):
        return {"partialsType[0]": backend.get("convolutionOptions", {}).get("partialsType", "float")}
    return {}
