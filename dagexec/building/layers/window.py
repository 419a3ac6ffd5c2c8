"""Layers that slide a window: convolutions and pooling."""

from __future__ import annotations

import math

from dagexec.building.fillers import Filler
from dagexec.building.net_builder import NetBuilder
from dagexec.building.scopes import layer
from dagexec.core.arguments import ArgumentValue
from dagexec.errors import SchemaError

Pair = int | tuple[int, int]
"""A height and a width, or one number for both."""


class WindowLayers(NetBuilder):
    """Convolutions and pooling."""

    @layer
    def conv(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        kernel: Pair,
        *,
        stride: Pair = 1,
        pad: Pair = 0,
        dilation: Pair = 1,
        group: int = 1,
        bias: bool = True,
        weight_init: Filler | None = None,
        bias_init: Filler | None = None,
    ) -> str:
        """Convolution of `dim_in` to `dim_out` channels: filter `<out>_w` (M x C/group x kH x kW), bias `<out>_b` (M).

        Raises SchemaError when `group` does not divide both channel counts.
        """
        if group < 1 or dim_in % group or dim_out % group:
            raise SchemaError(f"conv {blob_out!r}: {group} groups do not divide {dim_in} and {dim_out} channels")
        kernels = _pair(kernel)
        channels = dim_in // group
        window = [*kernels, channels] if self._order == "NHWC" else [channels, *kernels]
        fan_in = math.prod(window)
        inputs = [blob_in, self._weight(blob_out, [dim_out, *window], fan_in, weight_init)]
        if bias:
            inputs.append(self._bias(blob_out, dim_out, bias_init))
        arguments = {**_window(kernel, stride, pad), **self._order_argument()}
        if group != 1:
            arguments["group"] = group
        if _pair(dilation) != (1, 1):
            arguments["dilations"] = list(_pair(dilation))
        return self.add_operator("Conv", inputs, [blob_out], **arguments)

    @layer
    def conv_transpose(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        kernel: Pair,
        *,
        stride: Pair = 1,
        pad: Pair = 0,
        adjust: Pair = 0,
        group: int = 1,
        bias: bool = True,
        weight_init: Filler | None = None,
        bias_init: Filler | None = None,
    ) -> str:
        """Transposed convolution: filter `<out>_w` (C x M/group x kH x kW), bias `<out>_b` (M).

        An output axis has (in - 1) * stride + kernel + adjust - 2 * pad elements.
        Raises SchemaError when `group` does not divide both channel counts.
        """
        if group < 1 or dim_in % group or dim_out % group:
            raise SchemaError(
                f"conv_transpose {blob_out!r}: {group} groups do not divide {dim_in} and {dim_out} channels"
            )
        kernels, strides = _pair(kernel), _pair(stride)
        channels = dim_out // group
        window = [*kernels, channels] if self._order == "NHWC" else [channels, *kernels]
        fan_in = max(1, dim_in // group * math.prod(kernels) // math.prod(strides))
        inputs = [blob_in, self._weight(blob_out, [dim_in, *window], fan_in, weight_init)]
        if bias:
            inputs.append(self._bias(blob_out, dim_out, bias_init))
        arguments = {**_window(kernel, stride, pad), **self._order_argument()}
        if group != 1:
            arguments["group"] = group
        if _pair(adjust) != (0, 0):
            arguments["adjs"] = list(_pair(adjust))
        return self.add_operator("ConvTranspose", inputs, [blob_out], **arguments)

    @layer
    def max_pool(
        self, blob_in: str, blob_out: str, kernel: Pair, *, stride: Pair = 1, pad: Pair = 0, ceil_mode: bool = False
    ) -> str:
        """The maximum of each window; with `ceil_mode` a window that reaches over the edge counts too."""
        return self._pool("MaxPool", blob_in, blob_out, _window(kernel, stride, pad), ceil_mode)

    @layer
    def average_pool(
        self, blob_in: str, blob_out: str, kernel: Pair, *, stride: Pair = 1, pad: Pair = 0, ceil_mode: bool = False
    ) -> str:
        """The mean of each window, over the elements that are inside the image."""
        return self._pool("AveragePool", blob_in, blob_out, _window(kernel, stride, pad), ceil_mode)

    @layer
    def global_average_pool(self, blob_in: str, blob_out: str) -> str:
        """The mean of each channel."""
        return self._pool("AveragePool", blob_in, blob_out, {"global_pooling": 1}, False)

    def _pool(
        self, op_type: str, blob_in: str, blob_out: str, window: dict[str, ArgumentValue], ceil_mode: bool
    ) -> str:
        arguments = {**window, **self._order_argument()}
        if ceil_mode:
            arguments["ceil_mode"] = 1
        return self.add_operator(op_type, [blob_in], [blob_out], **arguments)


def _pair(value: Pair) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _window(kernel: Pair, stride: Pair, pad: Pair) -> dict[str, ArgumentValue]:
    """The arguments of a sliding window, in Caffe2's short form where height and width agree."""
    if all(isinstance(value, int) for value in (kernel, stride, pad)):
        return {"kernel": int(_pair(kernel)[0]), "stride": int(_pair(stride)[0]), "pad": int(_pair(pad)[0])}
    return {"kernels": list(_pair(kernel)), "strides": list(_pair(stride)), "pads": list(_pair(pad) * 2)}
