"""Zeros of the right dtypes and shapes, to warm a model up without real inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, STRING
from dagexec.core.model import Model
from dagexec.core.shapes import element_count
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError
from dagexec.options import Shapes
from dagexec.platform.host_memory import check_fits

Array = npt.NDArray[Any]


def zero_feeds(model: Model, shapes: Shapes | None = None) -> dict[str, Array]:
    """Zeros (empty strings for text) for every input that the net needs.

    `shapes` are used where given; else the model's own, with 1 for an axis of any size. An input of unknown dtype gets
    float32. Raises FeedError for a name that is no input, and for an input of unknown shape.
    """
    sizes = shapes or {}
    unknown = sorted(set(sizes) - set(model.inputs))
    if unknown:
        raise FeedError(
            f"net {model.name!r}: warm start: {unknown} are no inputs; the inputs are {sorted(model.inputs)}"
            f"{did_you_mean(unknown[0], model.inputs)}"
        )
    feeds: dict[str, Array] = {}
    for name in sorted(model.needed_inputs() | sizes.keys()):
        info = model.inputs[name]
        if name in sizes:
            shape = tuple(sizes[name])
        elif info.shape is not None:
            shape = tuple(1 if size is None else size for size in info.shape)
        else:
            raise FeedError(
                f"net {model.name!r}: warm start: the model does not say which shape input {name!r} has; "
                f'give it: warm_start={{"{name}": (1, 3, 224, 224)}}'
            )
        dtype = info.dtype or FLOAT32
        what = f"net {model.name!r}: warm start: input {name!r} of shape {shape}"
        check_fits(element_count(shape) * dtype.itemsize, what)
        feeds[name] = np.full(shape, b"", np.object_) if dtype is STRING else np.zeros(shape, dtype.numpy)
    return feeds
