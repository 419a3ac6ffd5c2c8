"""ResizeNearest by oneDNN where its rule is the operator's."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import image_order, spatial_sizes
from dagexec.ops.image import spatial
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import DST, FORWARD_INFERENCE, SRC

_NEAREST = 0x2FFF0
_CACHE_LINE = 64
"""Bytes. A large result is stored past the caches, by instructions that end the process where it is not aligned."""


@operator(spatial.ResizeNearest.schema, engine="ONEDNN")
class ResizeNearest(OneDNNOperator, spatial.ResizeNearest):
    """Nearest-neighbor resizing."""

    def prepare_primitive(self) -> Step:
        """One resampling.

        Output pixel i is oneDNN's pixel round((i + 1/2) * in / out - 1/2) and the operator's int(i / scale): the same
        when the scale is a whole number, and not always when it is not.
        """
        x, y, order = self.x(0), self.y(0), image_order(self.call())
        scales = spatial.resize_scales(self.call())
        sizes = zip(spatial_sizes(order, x.shape), spatial_sizes(order, y.shape), scales, strict=True)
        for size, out, scale in sizes:
            centers = (np.arange(out, dtype=np.float32) + np.float32(0.5)) * np.float32(size / out) - np.float32(0.5)
            if (np.floor(centers + np.float32(0.5)).astype(np.intp) != spatial.nearest_pixels(out, scale)).any():
                raise UnsupportedFeatureError(f"{self.label}: scale {scale:g} selects other pixels than oneDNN does")
        if y.ctypes.data % _CACHE_LINE:
            raise UnsupportedFeatureError(f"{self.label}: its output does not start at a cache line")
        source, target, attributes = self.image(x, order), self.image(y, order), self.attributes()
        tensors = (self.onednn.ffi.NULL, source, target, attributes)
        found = self.describe_fast("resampling_forward", self.onednn.engine, FORWARD_INFERENCE, _NEAREST, *tensors)
        bound = self.bound(found, {SRC: (source, x), DST: (target, y)})
        return self.rebindable(bound.step, bound, {0: SRC}, {})  # a caller's memory may begin anywhere
