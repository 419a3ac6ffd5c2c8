"""Fully connected layers, activations, and operators that join blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagexec.caffe2.helpers.parameters import Init, bias, weight
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.modeling.initializers import Initializer
from dagexec.caffe2.modeling.parameter_info import ParameterTags
from dagexec.caffe2.references import as_list


def fc(
    model: ModelHelper,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    weight_init: Init = None,
    bias_init: Init = None,
    WeightInitializer: Any = None,
    BiasInitializer: Any = None,
    **kwargs: Any,
) -> Any:
    """x W^T + b, with W of dim_out x dim_in; where `blob_out` is None, under a new name."""
    blob_out = blob_out or model.net.NextName()
    w = weight(model, blob_out, [dim_out, dim_in], weight_init, WeightInitializer)
    b = bias(model, blob_out, dim_out, bias_init, BiasInitializer)
    return model.net.FC([blob_in, w, b], blob_out, **kwargs)


def layer_norm(
    model: ModelHelper,
    blob_in: Any,
    blob_out: Any,
    dim_in: int | Sequence[int],
    axis: int = 1,
    epsilon: float = 1e-4,
    initial_scale: float = 1.0,
    initial_bias: float = 0.0,
) -> Any:
    """Layer normalization from `axis` on, with `<out>_scale` and `<out>_bias`; returns mean and deviation, too."""
    shape = [dim_in] if isinstance(dim_in, int) else list(dim_in)
    filled = Initializer("ConstantFill", value=float(initial_scale))
    scale = model.create_param(f"{blob_out}_scale", shape, filled, tags=ParameterTags.WEIGHT)
    filled = Initializer("ConstantFill", value=float(initial_bias))
    bias = model.create_param(f"{blob_out}_bias", shape, filled, tags=ParameterTags.BIAS)
    outputs = [blob_out, f"{blob_out}_mean", f"{blob_out}_std"]
    return model.net.LayerNorm([blob_in, scale, bias], outputs, axis=axis, epsilon=epsilon, elementwise_affine=1)


def relu(model: ModelHelper, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """max(x, 0)."""
    return model.net.Relu(blob_in, blob_out, **kwargs)


def prelu(
    model: ModelHelper, blob_in: Any, blob_out: Any, num_channels: int = 1, slope_init: Init = None, **kwargs: Any
) -> Any:
    """x, or where it is negative x times a slope `<out>_slope`, which starts at 0.25."""
    operator, arguments = slope_init or ("ConstantFill", {"value": 0.25})
    slope = model.create_param(blob_out + "_slope", [num_channels], Initializer(operator, **arguments))
    return model.net.PRelu([blob_in, slope], blob_out, **kwargs)


def tanh(model: ModelHelper, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """The hyperbolic tangent."""
    return model.net.Tanh(blob_in, blob_out, **kwargs)


def softmax(model: ModelHelper, blob_in: Any, blob_out: Any = None, **kwargs: Any) -> Any:
    """Softmax over all axes but the first."""
    return model.net.Softmax(blob_in, blob_out, **kwargs)


def dropout(model: ModelHelper, blob_in: Any, blob_out: Any, is_test: bool = False, **kwargs: Any) -> Any:
    """Drops elements while a net is trained; the mask is `_<in>_mask`."""
    outputs = [blob_out] if is_test else [blob_out, "_" + blob_out + "_mask"]
    made = model.net.Dropout(blob_in, outputs, is_test=int(is_test), **kwargs)
    return made if is_test else made[0]


def concat(model: ModelHelper, blobs_in: Any, blob_out: Any, order: str = "NCHW", **kwargs: Any) -> Any:
    """Joined along the channels; their counts are `_<out>_concat_dims`."""
    outputs = [blob_out, "_" + blob_out + "_concat_dims"]
    where = {} if "axis" in kwargs else {"order": order}
    return model.net.Concat(blobs_in, outputs, **where, **kwargs)[0]


def depth_concat(model: ModelHelper, blobs_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """`concat`, under its old name."""
    return concat(model, blobs_in, blob_out, **kwargs)


def sum(model: ModelHelper, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """The sum of blobs."""
    return model.net.Sum(as_list(blob_in), blob_out, **kwargs)


def transpose(model: ModelHelper, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Axes in another order."""
    return model.net.Transpose(blob_in, blob_out, **kwargs)
