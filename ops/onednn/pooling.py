"""Pooling by oneDNN: MaxPool and AveragePool, windows of 1 to 3 axes and the whole image, in every order.

oneDNN's maximum of a window with a NaN is that of its other pixels, or NaN; NumPy's is NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8
from dagexec.core.errors import UnsupportedFeatureError
from dagexec.core.operator import Step
from dagexec.core.registry import operator, schema_of
from dagexec.ops.geometry import Axis, tap_count
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import DST, FORWARD_INFERENCE, POST_OP, SRC, SRC_1, Array
from dagexec.ops.pool.average import AveragePooling
from dagexec.ops.pool.maximum import MaxPooling
from dagexec.ops.pool.window import RANKS, pool_window

_MAX, _MEAN_WITH_PADDING, _MEAN_OF_PIXELS = 0x1FF, 0x2FF, 0x3FF
_MULTIPLY = 0x1FFF1


class Pooling(OneDNNOperator):
    """What poolings share.

    oneDNN's windows have pads at the head and the tail; a last window that reaches over the end (ceil_mode, Caffe's
    rounding) needs a larger tail.
    """

    def prepare_primitive(self) -> Step:
        """One primitive."""
        window, axes = pool_window(self.call())
        if any(0 in axis.window_sizes(with_padding=False) for axis in axes):
            raise UnsupportedFeatureError(f"{self.label}: a window has no pixel, of which oneDNN says nothing")
        x, y = self.x(0), self.y(0)
        source, target = self.image(x, window.order), self.image(y, window.order)
        algorithm, factor = self.algorithm(axes)
        arguments = {SRC: (source, x), DST: (target, y)}
        attributes = self.attributes()
        if factor is not None:
            layout = self.packed(factor)
            attributes.binary(_MULTIPLY, layout)
            arguments[POST_OP | SRC_1] = (layout, factor)
        dims = self.onednn.dims
        found = self.describe_fast(
            "pooling_forward",
            self.onednn.engine,
            FORWARD_INFERENCE,
            algorithm,
            source.handle,
            target.handle,
            dims(axis.stride for axis in axes),
            dims(axis.kernel for axis in axes),
            dims(axis.dilation - 1 if axis.kernel > 1 else 0 for axis in axes),
            dims(axis.head for axis in axes),
            dims(_tail(axis) for axis in axes),
            attributes.handle,
        )
        bound = self.bound(found, arguments)
        self.offer_moves(bound, {0: SRC}, {0: DST})
        return bound.step

    @abstractmethod
    def algorithm(self, axes: Sequence[Axis]) -> tuple[int, Array | None]:
        """oneDNN's algorithm, and a factor for its result: 1, 1, output sizes."""


def _tail(axis: Axis) -> int:
    """The padding behind the image that the last window reads; negative when it ends before the last pixel."""
    return axis.covered - axis.head - axis.size


class MaximumPooling(Pooling, MaxPooling):
    """The maximum of each window."""

    metas = (FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32)

    def algorithm(self, axes: Sequence[Axis]) -> tuple[int, None]:
        """The maximum of the pixels; padding never wins."""
        return _MAX, None


class MeanPooling(Pooling, AveragePooling):
    """The mean of each window."""

    def algorithm(self, axes: Sequence[Axis]) -> tuple[int, Array | None]:
        """The mean of pixels, or with padding.

        oneDNN then divides by the taps of the window, also where it reaches over the padding; a factor corrects that.
        """
        if not self.arguments.bool("count_include_pad"):
            return _MEAN_OF_PIXELS, None
        sizes = np.ones((), np.float32)
        for axis in axes:
            sizes = sizes[..., None] * np.asarray(axis.window_sizes(with_padding=True), np.float32)
        taps = tap_count(axes)
        if (sizes == taps).all():
            return _MEAN_WITH_PADDING, None
        return _MEAN_WITH_PADDING, (taps / sizes)[None, None]


for _base in (MaximumPooling, MeanPooling):
    for _rank in RANKS:
        _name = f"{'Max' if _base is MaximumPooling else 'Average'}Pool{_rank}"
        operator(schema_of(_name), engine="ONEDNN")(type(_name, (_base,), {"__doc__": _base.__doc__}))
