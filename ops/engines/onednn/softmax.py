"""Softmax and LogSoftmax by oneDNN: kernels derived from the expressions are slower for some shapes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator, operator_class
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.row_operator import OfRows
from dagexec.ops.engines.onednn.descriptors import DST, FORWARD_INFERENCE, SRC
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.activation import softmax
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.row_expressions import row_step

SOFTMAX, LOG_SOFTMAX = 0x30000, 0x30001


class _Normalizing(OneDNNOperator):
    repeats = True
    algorithm: ClassVar[int]

    def drops_nan(self) -> bool:
        """The largest of a row is found by maxima."""
        return self.onednn.has_primitives

    def prepare_primitive(self) -> Step:
        """One softmax along the middle axis of outer x group x inner."""
        outer, group, inner = softmax.grouping(self.call())
        if not self.onednn.has_primitives:
            return self._by_rows((outer, group, inner))
        shape = (outer, group) if inner == 1 else (outer, group, inner)
        x, y = self.x(0).reshape(shape), self.y(0).reshape(shape)
        layout, attributes = self.packed(x), self.attributes()
        handles = (layout, layout, 1, attributes)
        found = self.describe_fast("softmax_forward", self.onednn.engine, FORWARD_INFERENCE, self.algorithm, *handles)
        bound = self.in_parts(found, {SRC: (layout, x), DST: (layout, y)}, (0, 2))
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})

    def _by_rows(self, shape: tuple[int, int, int]) -> Step:
        """The kernel of the expressions, on rows whose members are neighbors, if need be between copies."""
        assert isinstance(self, OfRows)
        label, machine, steps = self.label, self.onednn.machine, list[Step | None]()
        x, y = (np.moveaxis(array.reshape(shape), 1, 2) for array in (self.x(0), self.y(0)))
        source, target = x, y
        if shape[2] > 1:
            source, target = (self.working_memory(x.nbytes).view(x.dtype).reshape(x.shape) for _ in range(2))
            steps.append(copy_step(machine, [(x, source)], label))
        steps.append(row_step(machine, self.expressions(), [source], [target], shape[1], label))
        if shape[2] > 1:
            steps.append(copy_step(machine, [(target, y)], label))
        found = [step for step in steps if step is not None]
        if len(found) < len(steps):
            raise UnsupportedFeatureError(f"{label}: there is no kernel for these tensors")
        return in_sequence(found)


for _op_type, _algorithm in (("Softmax", SOFTMAX), ("LogSoftmax", LOG_SOFTMAX)):
    _default = operator_class(_op_type)
    _members = {"algorithm": _algorithm, "__doc__": _default.__doc__, "__module__": __name__}
    operator(_default.schema, engine="ONEDNN")(type(_op_type, (_Normalizing, _default), _members))
