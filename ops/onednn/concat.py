"""Concat by oneDNN on several threads, on one by kernels of our own.

On one thread NumPy copies as fast as oneDNN or faster at every size (0.8 MB of four parts: 21 us against 31), on two it
takes 1.2 to 4 times as long.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.operator import Prepared, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.ops.onednn.copies import Moving
from dagexec.ops.onednn.primitive import DST, DTYPES, MULTIPLE_SRC
from dagexec.ops.shape import concat


class Joining(Moving):
    """What Concat and DepthConcat do. Tensors of blocks are joined along the blocks."""

    repeats = False

    def prefers_default(self) -> bool:
        """True where the parts are in their place already."""
        return self.arguments.bool("zero_copy")

    def prepare_primitive(self) -> Step | Prepared:
        """One concat of matrices, whose columns are the axes from the joint one on, or a copy of each part."""
        if self.threads == 1 or self.input(0).meta not in DTYPES:
            return super().prepare_primitive()
        call, y = self.call(), self.y(0)
        axis = concat.joint_axis(call, y.ndim)
        added = self.arguments.bool("add_axis")
        parts = [self.x(index) for index in range(len(self.input_blobs))]
        sizes = [1 if added else part.shape[axis] for part in parts]
        rows = math.prod(y.shape[:axis])
        matrices = [part.reshape(rows, -1) for part in parts if part.size]
        layouts, target = [self.packed(matrix) for matrix in matrices], self.packed(y.reshape(rows, -1))
        handles = self.onednn.ffi.new("h[]", [layout.handle for layout in layouts])
        attributes = self.attributes()
        found = self.describe_fast(
            "concat", self.onednn.engine, target.handle, len(layouts), 1, handles, attributes.handle
        )
        sources = {MULTIPLE_SRC + index: pair for index, pair in enumerate(zip(layouts, matrices, strict=True))}
        bound = self.bound(found, {**sources, DST: (target, y)})
        information: Step = nothing_to_do
        if len(self.output_blobs) == 2:
            information = partial(np.copyto, self.y(1), np.array(sizes, np.int32))
        return self.rebindable(in_sequence([bound.step, information]), bound, {}, {0: DST})


@operator(concat.Concat.schema, engine="ONEDNN")
class Concat(Joining, concat.Concat):
    """Inputs joined along an axis."""


@operator(concat.DepthConcat.schema, engine="ONEDNN")
class DepthConcat(Joining, concat.DepthConcat):
    """Inputs joined along the channels."""
