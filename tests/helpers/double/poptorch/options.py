"""Options: setters record what they were given, and raise once the options are in use."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from . import enums, ops, poptorch_core


class _Group:
    def __init__(self) -> None:
        self.__dict__.update(calls=[], frozen=False)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def setter(*args: Any, **kwargs: Any) -> Any:
            self._record(name, args, kwargs)
            return self

        return setter

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_frozen()
        self.__dict__[name] = value

    def _check_frozen(self) -> None:
        if self.__dict__["frozen"]:
            raise AttributeError("Can't modify frozen Options")

    def _record(self, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        self._check_frozen()
        self.calls.append((name, args, kwargs))

    def value(self, name: str, default: Any) -> Any:
        return next((args[0] for given, args, _ in reversed(self.calls) if given == name), default)


class _Popart(_Group):
    def set(self, key: str, value: Any) -> _Popart:
        self._check_frozen()
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _Popart:
        return self.set("engineOptions", dict(engine_options))

    def __init__(self) -> None:
        super().__init__()
        self.options: Dict[str, Any] = {}


class _Training(_Group):
    def __init__(self, popart: _Popart) -> None:
        super().__init__()
        self.popart = popart

    def setConvolutionDithering(self, enabled: bool) -> _Training:
        self.popart.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class _Distributed(_Group):
    numProcesses, processId = 1, 0


class Options(_Group):
    def __init__(self) -> None:
        super().__init__()
        popart = _Popart()
        groups: Dict[str, Any] = {"_Popart": popart, "Training": _Training(popart), "Precision": _Group()}
        self.__dict__.update(groups, Distributed=_Distributed(), TensorLocations=_Group())
        self.__dict__["strategy"] = PipelinedExecution()

    def randomSeed(self, seed: int) -> Options:
        self._record("randomSeed", (seed,), {})
        torch.manual_seed(seed)
        return self

    def setExecutionStrategy(self, strategy: PipelinedExecution) -> Options:
        self.strategy = strategy
        return self

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        return self.connectionType(enums.ConnectionType.Never)

    def groups(self) -> List[_Group]:
        return [self, *(value for value in self.__dict__.values() if isinstance(value, _Group))]

    def freeze(self) -> Options:
        for group in self.groups():
            group.__dict__["frozen"] = True
        return self

    def clone(self) -> Options:
        cloned = copy.deepcopy(self)
        for group in cloned.groups():
            group.__dict__["frozen"] = False
        return cloned

    @property
    def counts(self) -> Tuple[int, int, int]:
        """Device iterations, accumulation and replicas."""
        accumulation = self.Training.value("gradientAccumulation", 1)
        return self.value("deviceIterations", 1), accumulation, self.value("replicationFactor", 1)

    def check(self) -> None:
        for name, value in self._Popart.options.items():
            if isinstance(value, dict):
                poptorch_core.check_dictionary(name, value)
        poptorch_core.sent.append(("options", dict(self._Popart.options)))


class Stage:
    def __init__(self, *block_ids: str) -> None:
        self.blocks = block_ids
        self.on_ipu: Optional[int] = None

    def ipu(self, ipu: int) -> Stage:
        self.on_ipu = ipu
        return self


class _StageManager:
    def __init__(self, stages: Tuple[Any, ...]) -> None:
        self._stages = [stage if isinstance(stage, Stage) else Stage(*_listed(stage)) for stage in stages]
        self._next_id = 0
        self.seen: List[int] = []

    def nextAutoId(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)

    def resetAutoId(self) -> None:
        self._next_id = 0

    def beginStage(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        user_id = self.nextAutoId() if user_id is None else user_id
        listed = [(number, stage) for number, stage in enumerate(self._stages) if user_id in stage.blocks]
        assert listed or not self._stages, f"Unknown Block {user_id}"
        if listed:
            number, stage = listed[0]
            ipu_id = stage.on_ipu if stage.on_ipu is not None else number if ipu_id is None else ipu_id
        assert ipu_id is not None, f"no IPU was specified for block {user_id}"
        self.seen.append(ipu_id)
        poptorch_core.begin_ipu_block(ipu_id)


def _listed(stage: Any) -> Tuple[str, ...]:
    return (stage,) if isinstance(stage, str) else tuple(stage)


class PipelinedExecution:
    is_pipelined = True

    def __init__(self, *stages: Any) -> None:
        self._stages = () if stages and isinstance(stages[0], enums.AutoStage) else stages
        self.manager = _StageManager(self._stages)

    def onStartTracing(self) -> None:
        self.manager = _StageManager(self._stages)
        ops.Block._stages_manager = self.manager

    def onEndTracing(self) -> None:
        ops.Block._stages_manager = None

    @property
    def num_stages(self) -> int:
        changes = zip([0, *self.manager.seen], self.manager.seen)
        return 1 + sum(before != after for before, after in changes)


class ShardedExecution(PipelinedExecution):
    is_pipelined = False


class TensorLocationSettings(_Group):
    pass
