"""Softmax and LogSoftmax by oneDNN."""

from __future__ import annotations

from typing import ClassVar

from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.ops.engines.onednn.descriptors import DST, FORWARD_INFERENCE, SRC
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.activation import softmax

SOFTMAX, LOG_SOFTMAX = 0x30000, 0x30001


class _Normalizing(OneDNNOperator):
    repeats = True
    algorithm: ClassVar[int]

    def drops_nan(self) -> bool:
        """The largest of a row is found by maxima."""
        return True

    def prepare_primitive(self) -> Step:
        """One softmax along the middle axis of outer x group x inner."""
        outer, group, inner = softmax.grouping(self.call())
        shape = (outer, group) if inner == 1 else (outer, group, inner)
        x, y = self.x(0).reshape(shape), self.y(0).reshape(shape)
        layout, attributes = self.packed(x), self.attributes()
        handles = (layout, layout, 1, attributes)
        found = self.describe_fast("softmax_forward", self.onednn.engine, FORWARD_INFERENCE, self.algorithm, *handles)
        bound = self.in_parts(found, {SRC: (layout, x), DST: (layout, y)}, (0, 2))
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})


@operator(softmax.Softmax.schema, engine="ONEDNN")
class Softmax(_Normalizing, softmax.Softmax):
    """Softmax."""

    algorithm = SOFTMAX


@operator(softmax.LogSoftmax.schema, engine="ONEDNN")
class LogSoftmax(_Normalizing, softmax.LogSoftmax):
    """Logarithm of Softmax."""

    algorithm = LOG_SOFTMAX
