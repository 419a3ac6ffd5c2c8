"""CNNModelHelper: a model whose layers are methods, as scripts older than `brew` write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagexec.caffe2 import brew
from dagexec.caffe2.creation import make_device_option
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.proto import caffe2_pb2
from dagexec.caffe2.references import BlobReference
from dagexec.core.proto import DeviceOption

__all__ = ["CNNModelHelper"]

_LAYERS: dict[str, Callable[..., Any]] = {
    "Accuracy": brew.accuracy,
    "AddWeightDecay": brew.add_weight_decay,
    "AveragePool": brew.average_pool,
    "Concat": brew.concat,
    "Conv": brew.conv,
    "ConvNd": brew.conv_nd,
    "ConvTranspose": brew.conv_transpose,
    "DepthConcat": brew.depth_concat,
    "Dropout": brew.dropout,
    "FC": brew.fc,
    "GroupConv": brew.group_conv,
    "ImageInput": brew.image_input,
    "InstanceNorm": brew.instance_norm,
    "Iter": brew.iter,
    "LRN": brew.lrn,
    "MaxPool": brew.max_pool,
    "PRelu": brew.prelu,
    "Relu": brew.relu,
    "Softmax": brew.softmax,
    "SpatialBN": brew.spatial_bn,
    "Sum": brew.sum,
    "Tanh": brew.tanh,
    "Transpose": brew.transpose,
}


class CNNModelHelper(ModelHelper):
    """A model with the layers of `brew` as methods: `model.Conv("data", "conv1", 1, 20, 5)`.

    Attributes:
        order: how images lie in memory: NCHW or NHWC.
        use_cudnn: whether layers ask for cuDNN, which dagexec has on GPUs.
    """

    def __init__(
        self,
        order: str = "NCHW",
        name: str | None = None,
        use_cudnn: bool = True,
        cudnn_exhaustive_search: bool = False,
        ws_nbytes_limit: int | None = None,
        init_params: bool = True,
        skip_sparse_optim: bool = False,
        param_model: ModelHelper | None = None,
    ) -> None:
        """dagexec chooses cuDNN's algorithms itself, so `cudnn_exhaustive_search` and the limit change nothing.

        Raises ValueError for an unknown order.
        """
        if order not in ("NCHW", "NHWC"):
            raise ValueError(f"order must be NCHW or NHWC, found {order!r}")
        super().__init__(
            name or "CNN",
            init_params=init_params,
            skip_sparse_optim=skip_sparse_optim,
            param_model=param_model,
            arg_scope={"order": order, "use_cudnn": use_cudnn},
        )
        self.order = order
        self.use_cudnn = use_cudnn

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        layer = _LAYERS.get(op_type)
        if layer is None:
            return super().__getattr__(op_type)
        return lambda *args, **kwargs: layer(self, *args, **kwargs)

    @property
    def XavierInit(self) -> tuple[str, dict[str, Any]]:
        """What fills weights by Xavier's rule, for `weight_init`."""
        return ("XavierFill", {})

    def ConstantInit(self, value: float) -> tuple[str, dict[str, Any]]:
        """What fills a parameter with a number."""
        return ("ConstantFill", {"value": value})

    def PadImage(self, blob_in: Any, blob_out: Any, **kwargs: Any) -> BlobReference:
        """Images with borders."""
        padded: BlobReference = self.net.PadImage(blob_in, blob_out, order=self.order, **kwargs)
        return padded

    @property
    def CPU(self) -> DeviceOption:
        """The host."""
        return make_device_option(caffe2_pb2.CPU)

    def GPU(self, gpu_id: int = 0) -> DeviceOption:
        """A GPU."""
        return make_device_option(caffe2_pb2.CUDA, gpu_id)
