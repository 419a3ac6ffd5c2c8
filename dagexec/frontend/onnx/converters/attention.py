"""Converters of attention, with its optional inputs and outputs."""

from __future__ import annotations

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.frontend.onnx.node import OnnxNode, converts

_MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = 3, 4, 5, 6


def _outputs(node: OnnxNode) -> list[str]:
    """Names for the outputs up to the last that is read."""
    count = max((index + 1 for index in range(len(node.outputs)) if node.is_read(index)), default=1)
    return [name or node.new_name(f"output_{index}") for index, name in enumerate(node.outputs[:count])]


@converts(Attention=25)
def attention(node: OnnxNode) -> list[Node]:
    """Attention; the precision that softmax asks for is at most what it is computed in."""
    node.ignore("softmax_precision")
    arguments: dict[str, ArgumentValue | None] = {
        "q_num_heads": node.integer("q_num_heads", 0) or None,
        "kv_num_heads": node.integer("kv_num_heads", 0) or None,
        "scale": node.number("scale", 0.0) if "scale" in node else None,
        "softcap": node.number("softcap", 0.0),
        "is_causal": node.integer("is_causal", 0),
        "left_window": node.integer("left_window_size", -1),
        "right_window": node.integer("right_window_size", -1),
        "products": node.integer("qk_matmul_output_mode", 0),
        "mask": int(node.has_input(_MASK)),
        "cache": int(node.has_input(_PAST_KEY) or node.has_input(_PAST_VALUE)),
        "lengths": int(node.has_input(_LENGTHS)),
    }
    return [node.operator("Attention", [name for name in node.inputs if name], _outputs(node), **arguments)]


@converts(LinearAttention=27)
def linear_attention(node: OnnxNode) -> list[Node]:
    """LinearAttention, step by step whatever the size of its chunks."""
    node.ignore("chunk_size")
    inputs = [name for name in node.inputs if name]
    return [
        node.operator(
            "LinearAttention",
            inputs,
            _outputs(node),
            q_num_heads=node.integer("q_num_heads", 0),
            kv_num_heads=node.integer("kv_num_heads", 0),
            scale=node.number("scale", 0.0),
            update_rule=node.text("update_rule", "gated_delta"),
            state=int(node.has_input(3)),
        )
    ]


@converts(CausalConvWithState=27)
def causal_conv(node: OnnxNode) -> list[Node]:
    """A depthwise convolution over the steps up to each."""
    inputs = [name for name in node.inputs if name]
    flags = {"bias": int(node.has_input(2)), "state": int(node.has_input(3))}
    activation = node.text("activation", "none")
    return [node.operator("CausalConv", inputs, _outputs(node), activation=activation, **flags)]
