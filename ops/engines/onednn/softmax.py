"""Softmax and LogSoftmax by oneDNN: kernels derived from the expressions are slower for some shapes."""

from __future__ import annotations

from typing import ClassVar

from dagexec.core.operator import Step
from dagexec.core.registry import operator, operator_class
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


for _op_type, _algorithm in (("Softmax", SOFTMAX), ("LogSoftmax", LOG_SOFTMAX)):
    _default = operator_class(_op_type)
    _members = {"algorithm": _algorithm, "__doc__": _default.__doc__, "__module__": __name__}
    operator(_default.schema, engine="ONEDNN")(type(_op_type, (_Normalizing, _default), _members))
