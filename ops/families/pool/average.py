"""AveragePool and its gradient."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.expressions import Expression, element, row_mean
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.rows import along_axis
from dagexec.core.schema import OperatorCall, OpSchema
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import POOL_ARGS
from dagexec.ops.base.layout import ImageOperator, channels_last
from dagexec.ops.families.pool.reduction import Pooling
from dagexec.ops.families.pool.spreading import spread
from dagexec.ops.families.pool.window import (
    RANKS,
    Array,
    as_images,
    infer_gradient,
    infer_pooling,
    is_whole,
    of_input,
    of_output,
    pool_window,
    pooling_cost,
    register_pooling,
    window_sizes,
)


class AveragePooling(Pooling):
    """The mean of each window, over the pixels inside the image or (count_include_pad=1) inside the padded image."""

    def prepare(self) -> Step:
        """Sums along one axis after the other, then a division by the number of pixels."""
        window, axes = pool_window(self.call())
        work = compute_dtype(self.x(0).dtype)
        sizes = window_sizes(axes, window, work, with_padding=self.arguments.bool("count_include_pad"))

        def finish(found: Array, target: Array) -> Step:
            return partial(np.divide, found, sizes, out=target, casting="same_kind")

        return self.reduce(np.add, 0, work, finish)


class AveragePoolingGradient(ImageOperator):
    """Each pixel gets, of every window that it is in, dY divided by the number of pixels that the mean counts."""

    def prepare(self) -> Step:
        """A division, then sums along one axis after the other. Neither X nor Y is read."""
        window, axes = pool_window(self.call())
        work = compute_dtype(self.x(0).dtype)
        dy, dx = as_images(self.x(2), window), as_images(self.y(0), window)
        if not dx.size:
            return nothing_to_do
        sizes = window_sizes(axes, window, work, with_padding=self.arguments.bool("count_include_pad"))
        if is_whole(axes):
            return partial(np.divide, dy, sizes, out=dx, dtype=work, casting="same_kind")
        return spread(
            self,
            dx.shape,
            axes,
            work,
            lambda piece, place: [partial(np.divide, dy[piece], sizes, out=place, dtype=work)],
            lambda piece, found: [partial(np.copyto, dx[piece], found, casting="same_kind")],
        )


def _row_mean(call: OperatorCall) -> Expression | None:
    """The mean of all pixels of images of one axis, which are rows."""
    is_of_rows = len(call.inputs[0].shape) == 3 and call.arguments.bool("global_pooling") and not channels_last(call)
    return row_mean(element(0)) if is_of_rows else None


_ARGS = POOL_ARGS | {"count_include_pad": "1: padding counts as zeros, as far as it reaches (default 0)"}
_infer = infer_pooling(FLOAT_TYPES)

register_pooling(
    AveragePooling,
    [
        OpSchema(
            f"AveragePool{rank}",
            infer=_infer,
            doc="Y = the mean of each window of X (N, C, spatial, or N, spatial, C with order NHWC); padding does not "
            "count, unless count_include_pad is 1; 0 for a window with nothing that counts.",
            input_names=("X",),
            output_names=("Y",),
            args=_ARGS,
            cost=pooling_cost(1, of_output),
            onnx=() if rank else (OnnxName("GlobalAveragePool", 22, fixed={"global_pooling": 1}),),
            image_role=ImageRole.POOLING,
            expression=_row_mean,
            narrows=True,
        )
        for rank in RANKS
    ],
)
register_pooling(
    AveragePoolingGradient,
    [
        OpSchema(
            f"AveragePool{rank}Gradient",
            infer=infer_gradient(_infer),
            doc=f"Gradient of AveragePool{rank}: dX = for each pixel the sum over its windows of dY / the number of "
            "pixels that the window's mean counts. Only the shape of X matters, and Y is not read.",
            input_names=("X", "Y", "dY"),
            output_names=("dX",),
            args=_ARGS,
            cost=pooling_cost(1, of_input),
            rows=along_axis(0, 0, 1, 2),
        )
        for rank in RANKS
    ],
)
