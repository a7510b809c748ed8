"""Generate a flat Python function that replays a graph."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, values_in
from ipurun.emulator._capture.op_kinds import names_in

Replay = Callable[[Sequence[torch.Tensor]], Tuple[Any, ...]]

_METADATA_WRITERS = names_in("as_strided_ resize_ resize_as_ set_ swapaxes_ swapdims_")


def _bindings() -> Dict[Any, Callable[..., Any]]:
    """Return the functions of torch that take the same positional arguments as an overload of the same name."""
    found = {}
    for name in names_in("""
        _log_softmax.default _softmax.default add.Tensor add_.Tensor addmm.default bmm.default cat.default clone.default
        convolution.default div.Tensor exp.default expand.default index_select.default log.default mm.default mul.Tensor
        mul_.Tensor native_batch_norm.default native_group_norm.default native_layer_norm.default neg.default
        permute.default relu.default relu_.default rsqrt.default select.int sigmoid.default sigmoid_.default
        sqrt.default stack.default sub.Tensor sum.dim_IntList t.default tanh.default tanh_.default transpose.int
        unbind.int unsafe_split.Tensor unsqueeze.default view.default
    """):
        base, overload = name.split(".")
        bound = getattr(torch, base, None) or getattr(torch.Tensor, base, None)
        if bound is not None:
            found[getattr(getattr(torch.ops.aten, base), overload)] = bound
    return found


_BINDINGS = _bindings()


def generate(
    graph: Graph,
    *,
    nodes: Optional[Sequence[Node]] = None,
    results: Optional[Sequence[Value]] = None,
    alias_detach: bool = True,
) -> Replay:
    """Return a function that runs the graph on its inputs (all but the constants, in graph order).

    Args:
        graph: The captured program.
        nodes: The nodes to run, all of them by default.
        results: The values to return, by default the outputs and then the gradients.
        alias_detach: Whether detach may return the same tensor; only allowed while autograd is off.
    """
    nodes = graph.nodes if nodes is None else nodes
    results = [*graph.outputs, *graph.grads.values()] if results is None else results
    namespace: Dict[str, Any] = {}
    lines: List[str] = []
    arguments = [item.value for item in graph.inputs if item.kind != "constant"]
    if arguments:
        lines.append(f"{', '.join(_local(value) for value in arguments)}, = inputs")
    lines.extend(_load_constants(graph, namespace))
    last_use = _last_uses(nodes, set(results))
    alias_detach = alias_detach and not any(node.name in _METADATA_WRITERS for node in nodes)
    defined: Set[Value] = set(arguments) | set(graph.constants)
    for index, node in enumerate(nodes):
        lines.append(_statement(node, namespace, defined, alias_detach))
        dropped = [value for value in last_use.get(index, ()) if value in defined]
        if dropped:
            lines.append("del " + ", ".join(_local(value) for value in dropped))
            defined.difference_update(dropped)
    lines.append(f"return ({''.join(_local(value) + ', ' for value in results)})")
    source = "def replay(inputs):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<captured graph>", "exec"), namespace)
    return namespace["replay"]


def _local(value: Value) -> str:
    return f"v{int(value)}"


def _load_constants(graph: Graph, namespace: Dict[str, Any]) -> List[str]:
    written = graph.storages_written()
    lines = []
    for value, tensor in graph.constants.items():
        namespace[f"k{int(value)}"] = tensor
        copied = ".clone()" if graph.specs[value].storage in written else ""
        lines.append(f"{_local(value)} = k{int(value)}{copied}")
    return lines


def _last_uses(nodes: Sequence[Node], kept: Set[Value]) -> Dict[int, List[Value]]:
    seen: Set[Value] = set(kept)
    result: Dict[int, List[Value]] = {}
    for index in range(len(nodes) - 1, -1, -1):
        for value in (*nodes[index].reads(), *values_in(nodes[index].outputs)):
            if value not in seen:
                seen.add(value)
                result.setdefault(index, []).append(value)
    return result


def _statement(node: Node, namespace: Dict[str, Any], defined: Set[Value], alias_detach: bool) -> str:
    if node.name == "detach" and alias_detach:
        right = _expression(node.args[0], namespace)
    else:
        function = f"f{len(namespace)}"
        namespace[function] = binding(node)
        parts = [_expression(arg, namespace) for arg in node.args]
        parts += [f"{name}={_expression(arg, namespace)}" for name, arg in node.kwargs.items()]
        right = f"{function}({', '.join(parts)})"
    left = _targets(node.outputs, defined)
    defined.update(values_in(node.outputs))
    return f"{left} = {right}" if left else right


def binding(node: Node) -> Callable[..., Any]:
    """Return the quickest way to call a node's operation from Python: torch's own binding, if any, or its overload."""
    op = node.op
    if not isinstance(op, torch._ops.OpOverload):
        return op
    if node.name == "mkldnn_rnn_layer":
        # Only while gradients are enabled does it return the workspace that its backward operation reads.
        return torch.enable_grad()(op)
    bound = _BINDINGS.get(op) if not node.kwargs else None
    return bound or getattr(op, "_op", op)


def _targets(outputs: Any, defined: Set[Value]) -> str:
    """Return the left side of an assignment; the result of an in-place op keeps its name."""
    if isinstance(outputs, Value):
        return "" if outputs in defined else _local(outputs)
    if isinstance(outputs, (list, tuple)) and outputs:
        names = [_targets(item, defined) or "_" for item in outputs]
        return "" if set(names) == {"_"} else ", ".join(names) + ","
    return ""


def _expression(argument: Any, namespace: Dict[str, Any]) -> str:
    if isinstance(argument, Value):
        return _local(argument)
    if argument is None or type(argument) in (bool, int):
        return repr(argument)
    if isinstance(argument, (list, tuple)):
        items = ", ".join(_expression(item, namespace) for item in argument)
        if isinstance(argument, list):
            return f"[{items}]"
        return f"({items},)" if argument else "()"
    name = f"c{len(namespace)}"
    namespace[name] = argument
    return name
