"""What a net that is trained has besides layers: batches from databases, a counter, accuracy, weight decay."""

from __future__ import annotations

from typing import Any

from dagexec.caffe2 import scope
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.references import GradientSlice
from dagexec.core.proto import DeviceOption, TensorProto
from dagexec.errors import GradientError

_HOST = DeviceOption(device_type=0)


def db_input(model: ModelHelper, blobs_out: Any, batch_size: int, db: str, db_type: str, **kwargs: Any) -> Any:
    """Batches from a database of TensorProtos, one blob for each tensor of a record."""
    return model.TensorProtosDBInput([], blobs_out, batch_size, db, db_type, **kwargs)


def image_input(
    model: ModelHelper, blob_in: Any, blob_out: Any, order: str = "NCHW", use_gpu_transform: bool = False, **kwargs: Any
) -> Any:
    """Batches of images and labels from a reader, `blob_out` being [images, labels, ...] in `order`.

    Raises ValueError unless `is_test` is given.
    """
    if "is_test" not in kwargs:
        raise ValueError("image_input: say is_test=1 or is_test=0")
    if order != "NCHW":
        return model.net.ImageInput(blob_in, blob_out, **kwargs)
    if use_gpu_transform:
        return model.net.ImageInput(blob_in, blob_out, use_gpu_transform=1, **kwargs)
    images, *others = model.net.ImageInput(blob_in, [f"{blob_out[0]}_nhwc", *blob_out[1:]], **kwargs)
    return model.net.NHWC2NCHW(images, blob_out[0]), *others


def iter(model: ModelHelper, blob_out: Any, **kwargs: Any) -> Any:
    """A counter of runs, on the host: the init net sets it to 0, and each run adds 1."""
    device = kwargs.pop("device_option", _HOST)
    counter = model.param_init_net.ConstantFill(
        [], blob_out, shape=[1], value=0, dtype=TensorProto.INT64, device_option=device, **kwargs
    )
    return model.net.Iter(counter, counter, device_option=device, **kwargs)


def accuracy(model: ModelHelper, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """The share of rows whose label is among the `top_k` largest predictions; `blob_in` is [prediction, label]."""
    return model.net.Accuracy(blob_in, blob_out, **kwargs)


def add_weight_decay(model: ModelHelper, weight_decay: float) -> None:
    """Add so much of each weight of the name scope that is open to its gradient, before updates are added.

    Raises GradientError for a weight with a sparse gradient.
    """
    if weight_decay <= 0:
        return
    decay = model.param_init_net.ConstantFill([], "wd", shape=[1], value=float(weight_decay))
    one = model.param_init_net.ConstantFill([], "ONE", shape=[1], value=1.0)
    for param in model.weights:
        if not str(param).startswith(scope.CurrentNameScope()):
            continue
        gradient = model.param_to_grad[param]
        if isinstance(gradient, GradientSlice):
            raise GradientError(
                f"model {model.name!r}: {str(param)!r} has a sparse gradient, which has no weight decay"
            )
        model.net.WeightedSum([gradient, one, param, decay], gradient)
