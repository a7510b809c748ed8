"""PoplarExecutor, the functions that create one (trainingModel, inferenceModel, load), and compile hooks."""

from __future__ import annotations

import copy
import datetime
import json
import os
import time
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

import torch
from torch.utils.hooks import RemovableHandle

from ipurun.emulator._capture.graph import Placement
from ipurun.emulator._capture.recompute import stashed_values
from ipurun.emulator._executor import files, wrapping
from ipurun.emulator._executor.device import Device, raise_requested_fault
from ipurun.emulator._executor.inputs import ArgumentParser, Arguments, matching_tensors
from ipurun.emulator._executor.model_guard import named_tensors
from ipurun.emulator._executor.op_times import OperationRecorder
from ipurun.emulator._executor.weights import ParameterProxy, ReplicaGroups
from ipurun.emulator._impl import __version__, createPoptorchError
from ipurun.emulator._logging import logger, native_logger
from ipurun.emulator._logs.lowering import lowered_ops
from ipurun.emulator._optimizer.executor import ExecutorOptimizer
from ipurun.emulator._printing import module_repr
from ipurun.emulator._run.checks import refuse_accumulation
from ipurun.emulator._run.compile import compile_model
from ipurun.emulator._run.executable import Executable, default_seed
from ipurun.emulator._run.executable_cache import ExportSlot, cache_lock
from ipurun.emulator.enums import ConnectionType, OutputMode
from ipurun.emulator.options import Options
from ipurun.emulator.processes import Processes, connected
from ipurun.emulator.profiling import Channel

# A nominal clock rate, to convert measured seconds to cycles.
_CYCLES_PER_SECOND = 1.85e9
_before: OrderedDict[int, Callable[[], None]] = OrderedDict()
_after: OrderedDict[int, Callable[[], None]] = OrderedDict()


def _register(table: Any, hook: Callable[[], None]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compile hook must be callable, got {hook!r}")
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], None]) -> RemovableHandle:
    """Register a function to call before every compile.

    Returns:
        A handle whose `remove()` unregisters the hook.

    Raises:
        RuntimeError: If the hook is not callable.
    """
    return _register(_before, hook)


def registerPostCompileHook(hook: Callable[[], None]) -> RemovableHandle:
    """Register a function to call after every compile, even a failed one.

    Returns:
        A handle whose `remove()` unregisters the hook.

    Raises:
        RuntimeError: If the hook is not callable.
    """
    return _register(_after, hook)


class _OverwriteContextManager:
    """Replaces functions of other libraries while a model is captured; poptorch_geometric registers such managers."""

    _subsitution_manager_types: List[Callable[[], Any]] = []

    def __init__(self) -> None:
        self.substitution_managers = [manager() for manager in self._subsitution_manager_types]

    def __enter__(self) -> _OverwriteContextManager:
        for manager in self.substitution_managers:
            manager.replace()
        return self

    def __exit__(self, *exception: Any) -> None:
        for manager in reversed(self.substitution_managers):
            manager.restore()

    @classmethod
    def registerSubsitutionManager(cls, type: Callable[[], Any]) -> None:
        """Call `replace` of a new instance of the class before each capture and its `restore` afterwards."""
        if type not in cls._subsitution_manager_types:
            cls._subsitution_manager_types.append(type)


class PoplarExecutor:
    """Runs a model as a device does: compiled at the first call, with a separate copy of the weights.

    Created by `poptorch.trainingModel` and `poptorch.inferenceModel`.

    Args:
        model: The model to run, a shallow copy of the user's so that attributes set on either do not affect the other.
        options: The options, which are frozen; None for the defaults.
        training: Whether the model is trained.
        poptorch_version: Version written to exported files.
        optimizer: Optimizer of a training model.
        user_model: The user's model, `model` itself by default.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Optional[Options],
        training: bool,
        poptorch_version: str,
        optimizer: Optional[torch.optim.Optimizer] = None,
        user_model: Optional[torch.nn.Module] = None,
    ) -> None:
        if options is None:
            options = Options()
        if not isinstance(options, Options):
            raise createPoptorchError(f"options must be a poptorch.Options, got {type(options)}")
        options._freeze()
        if training:
            self._user_model = user_model if user_model is not None else model
            self._model = model if model is not self._user_model else copy.copy(model)
        else:
            # As in PopTorch, changes to attributes of an inference model (eval()) affect only the copy.
            self._model = self._user_model = copy.copy(model)
        self._training = training
        self._poptorch_version = poptorch_version
        self._options = options.clone()
        if self._options.defaultOutputMode():
            self._options.outputMode(OutputMode.Final if training else OutputMode.All)
        self._optimizer = ExecutorOptimizer(self._options, optimizer, self._user_model) if training else None
        if not training:
            refuse_accumulation(self._options)
        self._options._freeze()
        self.per_replica_params: Dict[str, ReplicaGroups] = {}
        self._parser = ArgumentParser(self._model)
        self._executable: Optional[Executable] = None
        self._compiled_arguments: Optional[Arguments] = None
        self._device = Device(self._options)
        self._is_attached = False
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._seen_weights_version = 0
        self._num_calls = 0
        self._rng_state: Optional[List[int]] = None
        self._export: Optional[ExportSlot] = None
        self._compilation_time: Optional[datetime.timedelta] = None
        self.operation_recorder: Optional[OperationRecorder] = None
        self._profiling = Channel("poptorch.trainingModel" if self._model.training else "poptorch.inferenceModel")
        if training:
            wrapping.wrap(self._user_model, self)

    @property
    def model(self) -> torch.nn.Module:
        """Return the user's model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """Return the executor's frozen copy of the options."""
        return self._options

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __getattr__(self, attr: str) -> Any:
        user_model = self.__dict__.get("_user_model")
        if user_model is None:
            raise AttributeError(attr)
        found = getattr(user_model, attr)
        if isinstance(found, torch.nn.Parameter):
            return ParameterProxy(self, attr, found)
        return found

    def __getstate__(self) -> Dict[str, Any]:
        """Leave out the compiled state: a copy compiles at its first call. Use `save` to write files."""
        kept = dict(self.__dict__)
        kept.update(
            _executable=None, _compiled_arguments=None, _is_attached=False, _dirty_host_weights=False, _export=None
        )
        return kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; compile it and attach first if needed.

        Returns:
            What forward returns, with one row for each micro-batch returned (see `poptorch.OutputMode`).

        Raises:
            AssertionError: If the options forbid connecting to a device.
            Error: If the arguments differ from those that the model was compiled for.
        """
        self._device.require_connection()
        if self._executable is None:
            self._compile(args, kwargs)
        if not self._is_attached:
            self.attachToDevice()
        if not self._training:
            self._follow_training_weights()
        given = self._parser.bind(args, kwargs)
        assert self._executable is not None
        assert self._compiled_arguments is not None
        host_tensors = matching_tensors(self._compiled_arguments, given)
        tensors = [self._parser.device_tensor(tensor) for tensor in host_tensors]
        if self._optimizer is not None:
            if self._optimizer.has_state_to_upload():
                self.copyWeightsToHostIfNeeded()
            self._optimizer.before_run()
        self._num_calls += 1
        raise_requested_fault(self._num_calls)
        try:
            with self._profiling.tracepoint("modelExecution"):
                result = self._run(tensors)
        finally:
            if self._training:
                self._dirty_host_weights = True
        self._executable.write_back(host_tensors, tensors)
        self._log_cycles()
        if self._optimizer is not None:
            self._optimizer.after_run()
        return result

    def _run(self, tensors: List[torch.Tensor]) -> Any:
        assert self._executable is not None
        if self.operation_recorder is not None:
            return self.operation_recorder.run(self._executable, self._options, tensors)
        return self._executable.run(tensors)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for these arguments without running it."""
        if self._executable is not None:
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(args, kwargs)
        if self._device.connects:
            self.attachToDevice()

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._executable is not None

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled and attached."""
        return self._executable is not None and self._is_attached

    def attachToDevice(self) -> None:
        """Attach, and upload weights, optimizer and random state.

        Raises:
            Error: If the model is not compiled, or is attached already.
            Error: If another executor is attached to the IPU that the options choose.
            AssertionError: If the options forbid connecting to a device.
        """
        executable = self._compiled("attachToDevice")
        self._device.require_connection()
        if self._is_attached:
            raise createPoptorchError("Failed to attach to device: already attached.")
        self._device.acquire()
        self._is_attached = True
        native_logger.debug("Writing weights from host to IPU memory.")
        executable.weights.upload(self._host_tensors())
        self._dirty_host_weights = False
        if self._rng_state is not None:
            executable.state = self._rng_state
        if self._optimizer is not None:
            self._optimizer.attach()
        if wrapping.is_wrapped(self._user_model):
            self._seen_weights_version = self._user_model._host_weights_version

    def detachFromDevice(self) -> None:
        """Copy everything that is newer on the device to the host, and detach.

        Raises:
            Error: If the model is not compiled or not attached.
        """
        executable = self._compiled("detachFromDevice")
        if not self._is_attached:
            raise createPoptorchError("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        self._rng_state = executable.state
        if self._optimizer is not None:
            self._optimizer.detach()
        self._is_attached = False
        self._device.release()

    def destroy(self) -> None:
        """Drop the compiled model: copy weights and optimizer state to the host and unwrap the model."""
        if self._executable is None:
            return
        self.copyWeightsToHostIfNeeded()
        if self._optimizer is not None:
            self._optimizer.destroy()
        self._executable = None
        self._compiled_arguments = None
        self._is_attached = False
        self._device.release()
        self._rng_state = None
        if self._training:
            wrapping.unwrap(self._user_model)

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of an optimizer to the device; call it after every change.

        Raises:
            AttributeError: On an inference model.
            Error: If a value changed that the compiled model holds as a constant.
        """
        if self._optimizer is None:
            raise AttributeError("An inference model has no optimizer")
        self._optimizer.set(optimizer)

    def copyWeightsToHost(self) -> None:
        """Copy the device's parameters and buffers to the user's model.

        Raises:
            Error: If the model is not compiled.
        """
        executable = self._compiled("copyWeightsToHost")
        self._dirty_host_weights = False
        native_logger.debug("Writing weights from IPU to host.")
        executable.weights.download(self._host_tensors())
        self._host_weights_version += 1

    def copyWeightsToDevice(self) -> None:
        """Copy the user's parameters and buffers to the device, overwriting weights not yet copied to the host.

        Raises:
            Error: If the model is not compiled.
        """
        executable = self._compiled("copyWeightsToDevice")
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.read_back()
        native_logger.debug("Writing weights from host to IPU memory.")
        executable.weights.upload(self._host_tensors())

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if they are newer on the device.

        Returns:
            Whether they were copied.
        """
        if not self._dirty_host_weights:
            return False
        self._dirty_host_weights = False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers listed by `Options.updatableNamedBuffers`.

        Raises:
            Error: If the model is not compiled or the option is not set.
        """
        executable = self._compiled("copyNamedBuffersToDevice")
        names = self._options._Popart.options.get("updatableNamedBuffers")
        if not names:
            raise createPoptorchError("copyNamedBuffersToDevice needs Options.updatableNamedBuffers([...]).")
        host = self._host_tensors()
        executable.weights.upload({name: host[name] for name in names})

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Load parameters and buffers into the user's model, and upload them if attached."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    @property
    def rng_state(self) -> Optional[List[int]]:
        """Return the state of the random streams: the seed and their position.

        A third number says how many micro-batches are computed at once, which decides how sums are rounded.

        Raises:
            Error: If the model is not compiled.
        """
        executable = self._compiled("rng_state")
        if executable.streams.position:
            return executable.state
        if self._rng_state is not None:
            return list(self._rng_state)
        return [executable.streams.seed] if self._options.exists("random_seed") else None

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        executable = self._compiled("rng_state")
        self._rng_state = list(state)
        executable.state = self._rng_state

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model to a file.

        Args:
            filename: The file; in a folder, the file is named `model.poptorch`.
            export_model: Whether to include the model, its weights and the optimizer.
            save_rng_state: Whether to include the state of the random streams.

        Raises:
            Error: If the model is not compiled.
        """
        self._compiled("save")
        files.save(self, filename, export_model, save_rng_state)

    def compileAndExport(
        self, filename: str, *args: torch.Tensor, export_model: bool = True, **kwargs: torch.Tensor
    ) -> None:
        """Compile the model for these arguments and write it to a file (see `save`)."""
        if self._executable is None:
            self._export = ExportSlot(self._options, self._training)
            self._compile(args, kwargs)
            if self._device.connects:
                self.attachToDevice()
        self.save(filename, export_model)

    def loadExecutable(self, filename: str) -> None:
        """Load the program that is stored in a file, instead of compiling it at the first call.

        A program that has not the forward pass of this model, or that could not be stored, is compiled for the stored
        arguments.

        Raises:
            Error: If the file was written by another version.
        """
        data = files.read(filename)
        if data["version"] != self._poptorch_version:
            raise createPoptorchError(files.other_version(filename, data["version"]))
        positional, named = data["arguments"]
        self._use_program(data)
        self._compile(tuple(positional), named)
        if self._device.connects:
            self.attachToDevice()

    def _use_program(self, data: Mapping[str, Any]) -> None:
        """Load the program of an exported file when compiling; files of older versions hold none."""
        if data.get("program") is not None:
            self._export = ExportSlot(self._options, self._training, data["program"])

    def compilationTime(self) -> datetime.timedelta:
        """Return how long the last compile took.

        Raises:
            Error: If the model is not compiled, or if the progress bar, which measures the time, is off.
        """
        if self._executable is None:
            raise createPoptorchError("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar or self._compilation_time is None:
            raise createPoptorchError(
                "compilationTime needs the compilation progress bar: use Options.showCompilationProgressBar(True)."
            )
        return self._compilation_time

    def cycleCount(self) -> int:
        """Return the duration of the last call as a nominal number of cycles.

        Raises:
            Error: If cycles are not counted, or if nothing has run yet.
        """
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        seconds = 0.0 if self._executable is None else self._executable.timestamps.duration
        if seconds == 0.0:
            raise createPoptorchError("Please run the model at least once before obtaining cycle count.")
        return int(seconds * _CYCLES_PER_SECOND)

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Return when each tensor of the last call was read, fully read, computed and returned, in seconds."""
        events = ("input", "input_complete", "output", "output_complete")
        if self._options._Popart.options.get("syntheticDataMode", 0):
            return {event: [] for event in events}  # nothing is exchanged with the host
        if self._executable is None:
            return {event: [[]] for event in events}
        graph = self._executable.graph
        return self._executable.timestamps.counters(len(graph.inputs_of("input")), len(graph.outputs))

    def getHostIpuLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean seconds to read the inputs."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean seconds between the inputs and the outputs of a run."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean seconds to return the outputs."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean seconds from reading inputs to returning outputs."""
        return self._latency("input", "output_complete")

    def getTensorNames(self) -> List[str]:
        """Return the names of the tensors that can be anchored.

        Raises:
            AssertionError: If the model is not compiled.
        """
        assert self._executable is not None, "Model is not compiled: call it or compile() before getTensorNames()"
        return self._executable.anchors.names(self._executable.optimizer_state())

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the value of an anchored tensor in the last call.

        Args:
            short_name: The name given to `Options.anchorTensor`.

        Raises:
            AssertionError: If there is no such anchor or nothing has run yet.
        """
        assert self._executable is not None, "Model is not compiled: run it before getAnchoredTensor()"
        assert short_name in self._executable.anchors.values, f"No anchored tensor named {short_name}"
        return self._executable.anchors.values[short_name]

    def placements(self) -> List[Tuple[str, Placement, str]]:
        """Return operation, placement and source line of every forward operation.

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
        stashed = stashed_values(graph, self._options)
        stashes = [_dumped(kind, f"{kind}:{value}", place) for kind in ("Stash", "Restore") for value, place in stashed]
        optimizer = executable.optimizer
        updates = [] if optimizer is None else [_dumped(name, name, Placement()) for name in optimizer.operations()]
        return json.dumps({"maingraph": forward + stashes + backward + updates}, separators=(",", ":"))

    def _compiled(self, what: str) -> Executable:
        if self._executable is None:
            raise createPoptorchError(
                f"Model has not been compiled or has been destroyed: call it or compile() before {what}."
            )
        return self._executable

    def _compile(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        start = time.perf_counter()
        self.copyWeightsToHostIfNeeded()
        if self._training and not wrapping.is_wrapped(self._user_model):
            wrapping.wrap(self._user_model, self)
        given = self._parser.bind(args, kwargs)
        has_seed = self._options.exists("random_seed")
        processes = self._connected()
        for hook in list(_before.values()):
            hook()
        try:
            with self._device.acquired(), self._profiling.tracepoint("modelCompilation"), cache_lock(
                self._model, self._options
            ), _OverwriteContextManager():
                executable = compile_model(
                    self._model,
                    self._parser.on_device(given),
                    options=self._options,
                    training=self._training,
                    seed=self._options.random_seed if has_seed else default_seed(),
                    groups=self.per_replica_params,
                    optimizer="" if self._optimizer is None else self._optimizer.constants(),
                    export=self._export,
                    processes=processes,
                )
                if self._optimizer is not None:
                    self._optimizer.compile(executable, named_tensors(self._model)[0])
        finally:
            for hook in list(_after.values()):
                hook()
        self._executable = executable
        self._compiled_arguments = given
        files.write_compile_files(self._debugGetPopartIR, self._options, os.environ)
        self._compilation_time = datetime.timedelta(seconds=time.perf_counter() - start)

    def _connected(self) -> Optional[Processes]:
        """Return the processes that train together, before one of them locks the cache; None: this one alone."""
        count = self._options.Distributed.numProcesses
        processes = connected(count) if self._training and count > 1 else None
        if processes is not None and self.per_replica_params:
            names = ", ".join(self.per_replica_params)
            raise createPoptorchError(f"The emulator cannot group replicas of several processes, as asked for: {names}")
        return processes

    def _host_tensors(self) -> Dict[str, torch.Tensor]:
        parameters, buffers = named_tensors(self._model)
        return {**parameters, **buffers}

    def _follow_training_weights(self) -> None:
        """Copy new weights from the training executor of the user's model."""
        if not wrapping.is_wrapped(self._user_model) or wrapping.executor_of(self._user_model) is None:
            return
        self._user_model.copyWeightsToHostIfNeeded()
        version = self._user_model._host_weights_version
        if version != self._seen_weights_version:
            logger.debug("Implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
            self._seen_weights_version = version

    def _latency(self, start: str, end: str) -> Tuple[float, float, float]:
        if self._executable is None:
            return (0.0, 0.0, 0.0)
        return self._executable.timestamps.latency(start, end)

    def _log_cycles(self) -> None:
        if self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            native_logger.info("Total number of IPU cycles: %d", self.cycleCount())


def _dumped(op_type: str, name: str, placement: Placement, **attributes: str) -> Dict[str, Any]:
    return {"type": op_type, "name": name, "attributes": {**placement._asdict(), **attributes}}


def _partials(op_type: str, backend: Dict[str, Any]) -> Dict[str, str]:
    """Return the type of partial results set in the options (Precision.setPartialsType)."""
    if op_type == "MatMul":
        return {"partialsType": f"MatMulPartialsType::{backend.get('partialsTypeMatMuls', 'float').upper()}"}
    if op_type in ("Conv", "MultiConv"):
        return {"partialsType[0]": backend.get("convolutionOptions", {}).get("partialsType", "float")}
    return {}


def _user_model(model: Union[torch.nn.Module, PoplarExecutor]) -> torch.nn.Module:
    return model._user_model if isinstance(model, PoplarExecutor) else model


def trainingModel(
    model: Union[torch.nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a model that returns a loss so that each call runs forward, backward and the weight update.

    Args:
        model: The model, or an executor of it. Its class is changed in place, so that reading its weights
            fetches them from the device.
        options: How to run it; they are frozen.
        optimizer: One of ``poptorch.optim`` or ``torch.optim``; SGD with lr 0.01 if None.

    Returns:
        The executor, to be called instead of the model.

    Raises:
        RuntimeError: The model is wrapped for training already.
    """
    user_model = _user_model(model)
    return PoplarExecutor(
        model=copy.copy(user_model),
        options=options,
        training=True,
        poptorch_version=__version__,
        optimizer=optimizer,
        user_model=user_model,
    )


def inferenceModel(model: Union[torch.nn.Module, PoplarExecutor], options: Optional[Options] = None) -> PoplarExecutor:
    """Wrap a model so that each call runs its forward pass on the device.

    Args:
        model: The model, or an executor that shares its weights.
        options: How to run it; they are frozen.

    Returns:
        The executor, to be called instead of the model.
    """
    user_model = _user_model(model)
    return PoplarExecutor(
        model=copy.copy(user_model),
        options=options,
        training=False,
        poptorch_version=__version__,
        user_model=user_model,
    )


def load(filename: str, edit_opts_fn: Optional[Callable[[Options], None]] = None) -> PoplarExecutor:
    """Create an executor from a file written by ``PoplarExecutor.save`` or ``compileAndExport``.

    Args:
        filename: The file.
        edit_opts_fn: Function that may edit the stored options before they are used.

    Returns:
        The executor, compiled and with the stored weights.

    Raises:
        AssertionError: The file was written by another version, or without the model.
    """
    data = files.read(filename)
    assert data["version"] == __version__, files.other_version(filename, data["version"])
    assert data["model"] is not None, (
        f"{filename} does not contain the model: re-create it and call loadExecutable({filename!r})"
    )
    options = data["options"].clone()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never.value:
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    optimizer = data.get("optimizer")
    if optimizer is not None and data.get("optimizer_state", {}).get("ipu_state") is not None:
        optimizer.load_state_dict(data["optimizer_state"])
    executor = PoplarExecutor(data["model"], options, data["training"], __version__, optimizer)
    executor._use_program(data)
    positional, named = data["arguments"]
    executor.compile(*positional, **named)
    if data["rng_state"]:
        executor.rng_state = data["rng_state"]
    return executor
