"""Small hand-written traced models, whose memory and time can be worked out on paper."""

from __future__ import annotations

from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter


def chain(layers: int, *, kept: int = 1000, values: int = 400, micro_batch_size: int = 1) -> TracedModel:
    """Return a chain of equal matmuls, one per module ``layer.I``, each with a weight and a result that is kept."""
    ops = [
        TracedOp(
            index=index,
            name="mm",
            module=f"layer.{index}",
            kind="matmul",
            flops_forward=2.0 * 64 * 32 * 32,
            flops_backward=4.0 * 64 * 32 * 32,
            output_bytes=kept,
            saved_bytes=kept,
            traffic_bytes=3 * kept,
            parameters=(f"layer.{index}.weight",),
            inputs=(index - 1,) if index else (),
            dims=(1, 64, 32, 32, 1),
            gradients=2,
            signature=f"mm of layer {index}",
        )
        for index in range(layers)
    ]
    parameters = [
        TracedParameter(f"layer.{index}.weight", values, element_bytes=2, trainable=True, ops=(index,))
        for index in range(layers)
    ]
    return TracedModel(tuple(ops), tuple(parameters), 0, 100, 4, micro_batch_size)
