"""Layers of images: convolution, pooling, normalization."""

from __future__ import annotations

from typing import Any

from dagexec.caffe2.helpers.parameters import Init, bias, weight
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.modeling.initializers import Initializer
from dagexec.caffe2.modeling.parameter_info import ParameterTags


def _window(kernel: Any) -> tuple[list[int], dict[str, Any]]:
    """The sizes of a kernel, given as a number or two, and the argument that says so."""
    if isinstance(kernel, int):
        return [kernel, kernel], {"kernel": kernel}
    return list(kernel), {"kernels": list(kernel)}


def conv(
    model: ModelHelper,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: Any,
    weight_init: Init = None,
    bias_init: Init = None,
    WeightInitializer: Any = None,
    BiasInitializer: Any = None,
    group: int = 1,
    order: str = "NCHW",
    no_bias: bool = False,
    use_cudnn: bool = False,
    **kwargs: Any,
) -> Any:
    """A convolution; `kernel` is a number, or one for each axis of space."""
    sizes, arguments = _window(kernel)
    channels = dim_in // group
    shape = [dim_out, channels, *sizes] if order == "NCHW" else [dim_out, *sizes, channels]
    blobs = [blob_in, weight(model, blob_out, shape, weight_init, WeightInitializer)]
    if not no_bias:
        blobs.append(bias(model, blob_out, dim_out, bias_init, BiasInitializer))
    if group != 1:
        arguments["group"] = group
    return model.net.Conv(blobs, blob_out, **_placed(order, use_cudnn), **arguments, **kwargs)


def group_conv(
    model: ModelHelper, blob_in: Any, blob_out: Any, dim_in: int, dim_out: int, kernel: Any, **kwargs: Any
) -> Any:
    """`conv`, which groups channels by its argument `group`."""
    return conv(model, blob_in, blob_out, dim_in, dim_out, kernel, **kwargs)


def conv_transpose(
    model: ModelHelper,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: Any,
    weight_init: Init = None,
    bias_init: Init = None,
    WeightInitializer: Any = None,
    BiasInitializer: Any = None,
    order: str = "NCHW",
    use_cudnn: bool = False,
    **kwargs: Any,
) -> Any:
    """The transposed convolution."""
    sizes, arguments = _window(kernel)
    shape = [dim_in, dim_out, *sizes] if order == "NCHW" else [dim_in, *sizes, dim_out]
    w = weight(model, blob_out, shape, weight_init, WeightInitializer)
    b = bias(model, blob_out, dim_out, bias_init, BiasInitializer)
    return model.net.ConvTranspose([blob_in, w, b], blob_out, **_placed(order, use_cudnn), **arguments, **kwargs)


def max_pool(
    model: ModelHelper, blob_in: Any, blob_out: Any, order: str = "NCHW", use_cudnn: bool = False, **kwargs: Any
) -> Any:
    """The largest of each window."""
    return model.net.MaxPool(blob_in, blob_out, **_placed(order, use_cudnn), **kwargs)


def average_pool(
    model: ModelHelper, blob_in: Any, blob_out: Any, order: str = "NCHW", use_cudnn: bool = False, **kwargs: Any
) -> Any:
    """The mean of each window."""
    return model.net.AveragePool(blob_in, blob_out, **_placed(order, use_cudnn), **kwargs)


def lrn(model: ModelHelper, blob_in: Any, blob_out: Any, order: str = "NCHW", **kwargs: Any) -> Any:
    """Local response normalization; its scale is `_<out>_scale`."""
    return model.net.LRN(blob_in, [blob_out, "_" + blob_out + "_scale"], order=order, **kwargs)[0]


def instance_norm(
    model: ModelHelper,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    scale_initializer: Any = None,
    bias_initializer: Any = None,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Instance normalization, with a scale `<out>_s` and a bias `<out>_b` a channel."""
    s, b = _scale_and_bias(model, blob_out, dim_in, scale_initializer, bias_initializer)
    return model.net.InstanceNorm([blob_in, s, b], blob_out, order=order, **kwargs)


def spatial_bn(
    model: ModelHelper,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    init_scale: float = 1.0,
    init_bias: float = 0.0,
    ScaleInitializer: Any = None,
    BiasInitializer: Any = None,
    RunningMeanInitializer: Any = None,
    RunningVarianceInitializer: Any = None,
    order: str = "NCHW",
    is_test: bool = False,
    use_cudnn: bool = False,
    **kwargs: Any,
) -> Any:
    """Batch normalization: `<out>_s`, `<out>_b`, the statistics `<out>_rm` and `<out>_riv`, saved `_sm` and `_siv`."""
    scale = ScaleInitializer or Initializer("ConstantFill", value=float(init_scale))
    shift = BiasInitializer or Initializer("ConstantFill", value=float(init_bias))
    s, b = _scale_and_bias(model, blob_out, dim_in, scale, shift)
    mean = RunningMeanInitializer or Initializer("ConstantFill", value=0.0)
    variance = RunningVarianceInitializer or Initializer("ConstantFill", value=1.0)
    tag = ParameterTags.COMPUTED_PARAM
    rm = model.create_param(blob_out + "_rm", [dim_in], mean, tags=tag)
    riv = model.create_param(blob_out + "_riv", [dim_in], variance, tags=tag)
    outputs = [blob_out] if is_test else [blob_out, rm, riv, blob_out + "_sm", blob_out + "_siv"]
    made = model.net.SpatialBN(
        [blob_in, s, b, rm, riv], outputs, is_test=int(is_test), **_placed(order, use_cudnn), **kwargs
    )
    return made if is_test else made[0]


def _scale_and_bias(model: ModelHelper, blob_out: Any, size: int, scale: Any, shift: Any) -> tuple[Any, Any]:
    s = model.create_param(
        blob_out + "_s", [size], scale or Initializer("ConstantFill", value=1.0), tags=ParameterTags.WEIGHT
    )
    b = model.create_param(
        blob_out + "_b", [size], shift or Initializer("ConstantFill", value=0.0), tags=ParameterTags.BIAS
    )
    return s, b


def _placed(order: str, use_cudnn: bool) -> dict[str, Any]:
    """The arguments that say how images lie in memory, and which engine is asked for."""
    return {"order": order, **({"engine": "CUDNN"} if use_cudnn else {})}
