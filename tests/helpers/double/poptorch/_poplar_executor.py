"""The executor: traces a model with its tensors on the device, then runs it there."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import poptorch_core
from .enums import ConnectionType, OutputMode
from .optim import Optimizer
from .options import Options

_DEVICE = "meta"  # torch's inference of shapes and types, which PopTorch uses, works with tensors on this device


class PoplarExecutor:
    def __init__(self, model: torch.nn.Module, options: Optional[Options], optimizer: Any, training: bool) -> None:
        options = options or Options()
        options.freeze()
        self.options = options.clone().freeze()
        if not training and self.options.counts[1] != 1:
            raise poptorch_core.Error("gradientAccumulation must be 1 for an inferenceModel")
        default = OutputMode.Final if training else OutputMode.All
        self._mode = self.options.value("outputMode", default)
        self._model, self._training, self._optimizer = model, training, optimizer
        self._compiled = self._attached = self._dirty = False
        self._ipus = 1
        self._weights: Dict[str, torch.Tensor] = {}
        self._device_optimizer: Any = None
        self._compiled_rates: List[float] = []
        self._sent: Optional[List[float]] = None
        self._version = self._host_version = 0
        self.rng_state: List[int] = [self.options.value("randomSeed", 0)]
        if training:
            assert optimizer is not None
            if isinstance(optimizer, Optimizer):
                parent = weakref.ref(self)
                optimizer.read_device = lambda: parent() is not None and parent()._read_optimizer()
            self._wrap(model)

    def _wrap(self, model: torch.nn.Module) -> None:
        """Change the class of the user's model and weights: reading them copies them from the device if need be."""
        parent = weakref.ref(self)

        class Wrapped(type(model)):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                owner = parent()
                if name in ("_parameters", "_buffers", "forward") and owner is not None:
                    owner.copyWeightsToHostIfNeeded()
                return super().__getattribute__(name)

        class PoptorchParameter(torch.nn.Parameter):
            pass

        for parameter in model.parameters():
            parameter.__class__ = PoptorchParameter
        Wrapped.__name__ = f"Poptorch{type(model).__name__}"
        model.__class__ = Wrapped
        model.__dict__["_poptorch_executor"] = parent

    # Lifecycle

    def isCompiled(self) -> bool:
        return self._compiled

    def isAttachedToDevice(self) -> bool:
        return self._attached

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self.options.check()
        iterations, accumulation, replicas = self.options.counts
        calls = iterations * accumulation * replicas
        micro_batch = tree_map(lambda t: _rows(t, 0, calls), (args, kwargs))
        self._trace(*micro_batch)
        poptorch_core.compile_or_load(self.options.value("enableExecutableCaching", None), self._cache_key(micro_batch))
        self._host = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._compiled = True
        if self._training:
            self._compiled_rates = self._rates()
            poptorch_core.sent.append(("compiled lr", self._compiled_rates))
        if self.options.value("connectionType", ConnectionType.Always) != ConnectionType.Never:
            self._attach()

    def _cache_key(self, micro_batch: Any) -> str:
        """Return a short form of what PopART hashes: the options that shape the program, and its inputs."""
        run_time = ("connectionType", "enableExecutableCaching", "logDir", "randomSeed")
        calls = [call for group in self.options.groups() for call in group.calls if call[0] not in run_time]
        shapes = [tuple(item.shape) for item in tree_flatten(micro_batch)[0] if isinstance(item, torch.Tensor)]
        return repr((calls, shapes, self._training))

    def attachToDevice(self) -> None:
        if not self._compiled:
            raise poptorch_core.Error("Model has not been compiled or has been destroyed.")
        assert self.options.value("connectionType", ConnectionType.Always) != ConnectionType.Never, (
            "Trying to attach to an offline device (ConnectionType.Never)"
        )
        if self._attached:
            raise poptorch_core.Error("Device is already attached")
        self._attach()

    def detachFromDevice(self) -> None:
        if not self._attached:
            raise poptorch_core.Error("Device is not attached")
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer()
        poptorch_core.detach(self)
        self._attached = False

    def _attach(self) -> None:
        poptorch_core.attach(self, self._ipus)
        self._attached = True
        self.copyWeightsToDevice()
        if self._training:
            # Loading the engine resets the optimizer's values to those of the compilation until they are sent again.
            self._make_device_optimizer()
            self._sent = None

    def destroy(self) -> None:
        if self._attached:
            self.detachFromDevice()
        self._compiled = False

    # Weights

    def copyWeightsToHostIfNeeded(self) -> bool:
        if not self._dirty:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToHost(self) -> None:
        self._dirty = False
        self._host_version += 1
        with torch.no_grad():
            for name, tensor in self._host.items():
                if tensor.is_floating_point():  # integers are constants of the graph
                    tensor.copy_(self._weights[name])

    def copyWeightsToDevice(self) -> None:
        self._dirty = False
        host = {name: tensor.detach().as_subclass(torch.Tensor).clone() for name, tensor in self._host.items()}
        for name, tensor in host.items():
            if name in self._weights:
                with torch.no_grad():
                    self._weights[name].copy_(tensor)
            else:
                trained = self._training and self._host[name].requires_grad
                self._weights[name] = tensor.requires_grad_(trained)

    # Optimizer

    def setOptimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        if self._attached:
            self._send_rates()

    def _rates(self) -> List[float]:
        return [group["lr"] for group in self._optimizer.param_groups]

    def _send_rates(self) -> None:
        rates = self._rates()
        if rates != self._sent:
            poptorch_core.sent.append(("lr", rates))
            self._sent = rates
            for group, rate in zip(self._device_optimizer.param_groups, rates):
                group["lr"] = rate

    def _make_device_optimizer(self) -> None:
        names = {id(tensor): name for name, tensor in self._host.items()}
        groups = []
        for group, rate in zip(self._optimizer.param_groups, self._compiled_rates):
            weights = [self._weights[names[id(parameter)]] for parameter in group["params"]]
            groups.append({**group, "params": weights, "lr": rate})
        kind = next(base for base in type(self._optimizer).__mro__ if base.__module__.startswith("torch.optim"))
        state = self._device_optimizer.state if self._device_optimizer is not None else {}
        self._device_optimizer = kind(groups, lr=self._compiled_rates[0])
        self._device_optimizer.state.update(state)
        loaded = getattr(self._optimizer, "device_state", None)
        for key, value in (loaded or {}).items():
            kind_of_state, name = key.split("___")
            self._device_optimizer.state.setdefault(self._weights[name], {})[kind_of_state] = value.clone()

    def _read_optimizer(self) -> None:
        if not isinstance(self._optimizer, Optimizer) or self._device_optimizer is None:
            return
        names = {id(weight): name for name, weight in self._weights.items()}
        self._optimizer.device_state = {
            f"{key}___{names[id(weight)]}": torch.as_tensor(value).clone()
            for weight, entries in self._device_optimizer.state.items()
            for key, value in entries.items()
            if value is not None
        }

    # Tracing

    def _trace(self, args: Any, kwargs: Any) -> None:
        strategy, training = self.options.strategy, self._training
        strategy.onStartTracing()
        poptorch_core.trace = poptorch_core.Trace()
        try:
            with self._tensors_on_device(), torch.device(_DEVICE), _Operations(poptorch_core.trace):
                self._model(*tree_map(_on_device, args), **tree_map(_on_device, kwargs))
        finally:
            self.trace, poptorch_core.trace = poptorch_core.trace, None
            strategy.onEndTracing()
        iterations, accumulation, replicas = self.options.counts
        stages = strategy.num_stages if strategy.is_pipelined else 1
        if stages > 1 and training and accumulation < 2 * stages - 1:
            raise poptorch_core.Error(f"pipelining {stages} stages needs gradientAccumulation >= {2 * stages - 1}")
        if stages > 1 and not training and iterations < stages:
            raise poptorch_core.Error(f"pipelining {stages} stages needs deviceIterations >= {stages}")
        self._ipus = (1 + max([0, *strategy.manager.seen])) * replicas

    @contextlib.contextmanager
    def _tensors_on_device(self) -> Iterator[None]:
        """Put tensors on the device in place of all parameters and buffers."""
        replaced: List[Tuple[Dict[str, Any], str, torch.Tensor]] = []
        moved: Dict[int, torch.Tensor] = {}
        for module in self._model.modules():
            for owner in (module._parameters, module._buffers):
                for name, tensor in list(owner.items()):
                    if tensor is None:
                        continue
                    replaced.append((owner, name, tensor))
                    if id(tensor) not in moved:
                        there = tensor.detach().as_subclass(torch.Tensor).to(_DEVICE)
                        is_parameter = owner is module._parameters
                        moved[id(tensor)] = torch.nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                    owner[name] = moved[id(tensor)]
        try:
            yield
        finally:
            for owner, name, tensor in replaced:
                owner[name] = tensor

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.options.value("connectionType", ConnectionType.Always) != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): "
            "use model.compile(inputs) instead of model(inputs)"
        )
        if not self._compiled:
            self.compile(*args, **kwargs)
        if not self._attached:
            self._attach()
        self._pull_trained_weights()
        iterations, accumulation, replicas = self.options.counts
        calls = iterations * accumulation * replicas
        results: List[List[Any]] = [[] for _ in range(replicas)]  # by replica and run
        template: Any = None
        for iteration in range(iterations):
            for step in range(accumulation):
                for replica in range(replicas):
                    index = (iteration * accumulation + step) * replicas + replica
                    micro_batch = tree_map(lambda t, index=index: _rows(t, index, calls), (args, kwargs))
                    outputs = self._run(*micro_batch, share=1.0 / (accumulation * replicas))
                    flat, template = tree_flatten(outputs)
                    results[replica].append([t.detach() for t in flat])
            if self._training:
                self._device_optimizer.step()
                self._device_optimizer.zero_grad()
        self._dirty = self._dirty or self._training
        combined = [self._combine([[run[i] for run in runs] for runs in results]) for i in range(len(flat))]
        return tree_unflatten(combined, template)

    def _pull_trained_weights(self) -> None:
        """Before inference, take the weights of a training executor that wraps the same modules."""
        for name, tensor in self._host.items():
            if not torch.equal(tensor.detach().as_subclass(torch.Tensor), self._weights[name]) and not self._training:
                self.copyWeightsToDevice()
                return

    def _run(self, args: Any, kwargs: Any, share: float) -> Any:
        with torch.enable_grad(), _HalfThroughFloat():
            outputs = torch.func.functional_call(self._model, self._weights, args, kwargs)
            if self._training:
                scalars = [t for t in tree_flatten(outputs)[0] if t.dim() == 0 and t.requires_grad]
                if len(scalars) != 1:
                    raise poptorch_core.Error("Couldn't find a loss in graph")
                scale = getattr(self._optimizer, "loss_scaling", 1.0)
                weights = [w for w in self._weights.values() if w.requires_grad]
                seed = torch.full_like(scalars[0], scale)
                gradients = torch.autograd.grad(scalars[0], weights, seed, allow_unused=True)
                for weight, gradient in zip(weights, gradients):
                    if gradient is not None:
                        mean = gradient * (share / scale)
                        weight.grad = mean if weight.grad is None else weight.grad + mean
        return outputs

    def _combine(self, runs: List[List[torch.Tensor]]) -> torch.Tensor:
        """Combine an output's values, by replica and run, as the output mode says."""
        if self._mode == OutputMode.Final:
            kept = [values[-1] for values in runs]
        elif self._mode == OutputMode.Sum:
            kept = [torch.stack(values).sum(0) for values in runs]
        else:
            assert self._mode == OutputMode.All, "the double has no other output mode"
            kept = [values[run] for run in range(len(runs[0])) for values in runs]
        if len(kept) == 1:
            return kept[0]
        return torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in kept])


class _Operations(TorchDispatchMode):
    """Records every operation of a trace, and refuses those outside all blocks."""

    def __init__(self, trace: poptorch_core.Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self._trace.ipu is None and "detach" not in name:
            raise poptorch_core.Error(f"No active Block: {name}. All the operations must be in a Block.")
        result = func(*args, **(kwargs or {}))
        types_found = [t.dtype for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        self._trace.operations.append((name.split("::")[-1], self._trace.ipu, types_found))
        return result


class _HalfThroughFloat(TorchDispatchMode):
    """Computes half operations in float32 and rounds the results: a CPU lacks many half kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]
        halves = [t for t in tensors if t.dtype == torch.float16]
        writes = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        is_view = not writes and any(result.alias_info is not None for result in func._schema.returns)
        if not halves or is_view or func._schema.name == "aten::_to_copy":
            return func(*args, **kwargs)
        result = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        if writes:
            return args[0].copy_(result)
        return tree_map(_narrowed, result) if len(halves) == len(tensors) else result


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
        return value.float()
    return torch.float32 if value is torch.float16 else value


def _narrowed(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _on_device(value: Any) -> Any:
    return value.to(_DEVICE) if isinstance(value, torch.Tensor) else value


def _rows(value: Any, index: int, count: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    assert value.shape[0] % count == 0, f"Invalid batch dimension: {value.shape[0]} rows for {count} micro-batches"
    size = value.shape[0] // count
    return value.narrow(0, index * size, size)
