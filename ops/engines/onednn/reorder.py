"""Reorder by a transposing copy of our own where one side is NCHW, and between NHWC and blocks by oneDNN.

Both read the tensor once. The library transposes 1000 x 256 numbers to 256 x 1000 in 260 us on one core with AVX-512,
`ops/kernels/copies.py` in 50; runs of 16 channels are moved as fast by either.
"""

from __future__ import annotations

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Prepared, Step
from dagexec.core.registry import operator
from dagexec.ops.base.layout import NCHW
from dagexec.ops.engines.onednn.descriptors import DST, DTYPES, SRC
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.shape import reorder
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.moving import table_rebind


@operator(reorder.Reorder.schema, engine="ONEDNN")
class Reorder(OneDNNOperator, reorder.Reorder):
    """One copy; a caller's memory may be read and written in place of X and Y."""

    repeats = True

    metas = DTYPES

    def needs_onednn(self) -> bool:
        return False

    def prepare_primitive(self) -> Step:
        """By the kernel that is faster."""
        return self._transposed() or self._by_primitive()

    def _transposed(self) -> Step | None:
        """The copy by our own kernels; None where there are none, and where no side is NCHW."""
        x, y = self.x(0), self.y(0)
        source, target = reorder.orders_of(self.call())
        if NCHW not in (source, target) or self.input(0).meta is not FLOAT32 or not x.size:
            return None
        pair = reorder.in_common_blocks(x, source, target), reorder.in_common_blocks(y, target, source)
        step = copy_step(self.onednn.machine, [pair], self.label)
        if step is None:
            return None
        reads, writes = table_rebind(step, x), table_rebind(step, y)
        return Prepared(step, {0: reads} if reads else {}, {0: writes} if writes else {})

    def _by_primitive(self) -> Step:
        """The same logical tensor in two layouts."""
        x, y = self.x(0), self.y(0)
        source, target = reorder.orders_of(self.call())
        bound = self.reorder(self.image(x, source), self.image(y, target), x, y)
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})
