"""Integers that stand for real numbers: real = scale * (integer - zero point), and operators that compute on them.

- `scales`: reading and checking scales and zero points.
- `linear`: QuantizeLinear and DequantizeLinear, between floats and integers.
- `accumulation`: exact integer sums on the floating-point unit; `requantization`: from a sum to the output's integers.
- `convolution`, `product`, `addition`: QuantConv, QuantFC and QuantAdd, from integers to integers.
- `by_range`: quantization by the range that values have in a run.
- `fixed_point`: what Caffe2's int8 nets compute, scaled by integers.
- `integer`: ConvInteger, MatMulInteger and DynamicQuantizeLinear of ONNX.

Jacob et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference".
"""

from dagexec.core.gradient import not_differentiable

not_differentiable(
    "its numbers are rounded to integers; differentiate the net before it is quantized",
    *("QuantConv", "QuantFC", "QuantAdd", "QuantizeLinear", "DequantizeLinear"),
    *("ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"),
    *("RequantizeFixedPoint", "AddFixedPoint", "AveragePoolFixedPoint", "SoftmaxOfBytes"),
)
