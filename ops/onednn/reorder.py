"""Reorder by oneDNN, which reads the tensor once, in blocks, whatever the orders."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import DST, DTYPES, SRC
from dagexec.ops.shape import reorder


@operator(reorder.Reorder.schema, engine="ONEDNN")
class Reorder(OneDNNOperator, reorder.Reorder):
    """One reorder primitive; a caller's memory may be read and written in place of X and Y."""

    repeats = True

    metas = DTYPES

    def needs_onednn(self) -> bool:
        return False

    def prepare_primitive(self) -> Step:
        """The same logical tensor in two layouts."""
        x, y = self.x(0), self.y(0)
        source, target = reorder.orders_of(self.call())
        bound = self.reorder(self.image(x, source), self.image(y, target), x, y)
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})
