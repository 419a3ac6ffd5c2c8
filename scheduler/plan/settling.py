"""Settling: operators whose results follow from shapes are computed while a net is prepared (`plan.dynamic`).

Their outputs are in memory of their own, which nobody writes: an operator of another net that writes the blob, or a
caller who feeds it, takes other memory, and the bindings of a preparation restore this one before its next run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import STRING
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.tensor import Storage, array_on
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.host_memory import check_fits
from dagexec.scheduler.plan.dynamic import Dependence

MAX_ELEMENTS = 1 << 12
"""Of an output; larger ones, such as masks, are computed by the run into shared memory."""

MAX_ELEMENTS_ASKED = 1 << 20
"""The same where shapes depend on the values."""


class Settling:
    """The operators of a net that are settled while it is prepared for some shapes."""

    def __init__(self, graph: Graph, operators: Sequence[Operator], depends: Dependence) -> None:
        self._graph = graph
        self._operators = operators
        self._depends = depends
        self._left: set[str] = set()  # outputs of operators that might be settled, and are left to the run

    def settle(self, index: int, call: OperatorCall, types: Sequence[TensorType]) -> bool:
        """Compute operator `index`, of these output types; False when that is left to the run.

        Raises what the operator raises.
        """
        operator = self._operators[index]
        if self._can_be_settled(index, types):
            _compute(operator, call, types)
            return True
        self._left.update(operator.definition.output)
        return False

    def _can_be_settled(self, index: int, types: Sequence[TensorType]) -> bool:
        operator = self._operators[index]
        limit = MAX_ELEMENTS_ASKED if index in self._depends.asked else MAX_ELEMENTS
        return (
            not operator.bodies
            and all(kind.elements <= limit for kind in types)
            and all(operator.output(place).is_packed for place in range(len(types)))
            and (operator.schema.from_types is not None or self._left.isdisjoint(operator.definition.input))
        )


def _compute(operator: Operator, call: OperatorCall, types: Sequence[TensorType]) -> None:
    arrays = []
    for place, kind in enumerate(types):
        check_fits(kind.nbytes, f"{operator.label}: output {operator.output_blobs[place].name!r} {kind}")
        buffer = np.full(kind.elements, b"", np.object_) if kind.meta is STRING else np.empty(kind.nbytes, np.uint8)
        arrays.append(array_on(buffer, kind.shape, kind.meta))
        operator.output(place).rebind(arrays[place], Storage(buffer, buffer.size, writable=False))
    with operator_arithmetic():
        if operator.schema.from_types is not None:
            for array, values in zip(arrays, operator.schema.from_types(call), strict=True):
                array[...] = values
        else:
            operator.bind(types, placed=range(len(types))).step()
    for array in arrays:
        array.flags.writeable = False
