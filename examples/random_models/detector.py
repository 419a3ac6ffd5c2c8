"""A detector of speech in a stream of samples, of the kind of Silero's."""

import numpy as np
import onnx

from random_models.graph import Graph

HOP, CONTEXT = 512, 64
"""Samples of a frame, and of those before it that its convolutions see."""

_WINDOW, _STRIDE, _UNITS = 256, 128, 128


def detector() -> onnx.ModelProto:
    """`samples` [streams, HOP], `context` [streams, CONTEXT] and `state` [2, streams, 128] of the frame before.

    `probability` [streams, 1] that somebody speaks; `new_context` and `new_state` for the next frame.
    """
    g = Graph("detector")
    samples, context = g.input("samples", ["streams", HOP]), g.input("context", ["streams", CONTEXT])
    state = g.input("state", [2, "streams", _UNITS])
    x = g.node("Unsqueeze", g.node("Concat", context, samples, axis=1), g.constant([1]))
    x = g.node("Pad", x, g.constant([0, 0, 0, 0, 0, CONTEXT]), mode="reflect")
    times, bins = np.arange(_WINDOW), np.arange(_WINDOW // 2 + 1)[:, None]
    waves = np.stack([np.cos(2 * np.pi / _WINDOW * bins * times), np.sin(2 * np.pi / _WINDOW * bins * times)])
    waves = waves.reshape(-1, 1, _WINDOW) * np.hanning(_WINDOW)
    both = g.node("Conv", x, g.constant(waves, np.float32), kernel_shape=[_WINDOW], strides=[_STRIDE])
    real, imaginary = g.nodes("Split", 2, both, g.constant([len(bins)] * 2), axis=1)
    x = g.node("Sqrt", g.node("Add", g.node("Mul", real, real), g.node("Mul", imaginary, imaginary)))
    inner = len(bins)
    for units, stride in ((_UNITS, 1), (64, 2), (64, 2), (_UNITS, 1)):
        kernel, bias = g.weight(units, inner, 3), g.weight(units)
        x = g.node("Relu", g.node("Conv", x, kernel, bias, kernel_shape=[3], pads=[1, 1], strides=[stride]))
        inner = units
    h, c = g.nodes("Split", 2, state, g.constant([1, 1]), axis=0)
    weights = [g.weight(1, 4 * _UNITS, _UNITS, inner=_UNITS) for _ in range(2)]
    weights.append(g.weight(1, 8 * _UNITS, inner=_UNITS))
    line = g.node("Transpose", x, perm=[2, 0, 1])
    _, h, c = g.nodes("LSTM", 3, line, *weights, "", h, c, hidden_size=_UNITS)
    g.output("new_state", [2, "streams", _UNITS], "Concat", h, c, axis=0)
    last = g.linear(g.node("Relu", g.node("Squeeze", h, g.constant([0]))), _UNITS, 1)
    g.output("probability", ["streams", 1], "Sigmoid", last)
    ends = [g.constant([number]) for number in (HOP - CONTEXT, HOP, 1)]
    g.output("new_context", ["streams", CONTEXT], "Slice", samples, *ends)
    return g.model()
