"""Where by kernels of our own: conditions as numbers, then one pass over the elements, which are moved as they are.

Of 24,576 numbers, half of them chosen, it takes 6 us on one core of an AMD EPYC with AVX-512, NumPy's copies 51.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import BOOL, TypeMeta
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.elementwise import arithmetic
from dagexec.ops.families.elementwise.arithmetic import where_condition_view
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.conversions import convert_step
from dagexec.ops.kernels.formulas import formula_step


@operator(arithmetic.Where.schema, engine="ONEDNN")
class Where(OneDNNOperator, arithmetic.Where):
    """Selection among elements of four bytes."""

    metas: ClassVar[Collection[TypeMeta]] = (BOOL,)

    def prepare_primitive(self) -> Step:
        """Two calls. Raises UnsupportedFeatureError for other elements, few conditions, and operands in odd places."""
        condition, z, machine = self.x(0), self.y(0), self.onednn.machine
        if z.itemsize != np.float32().itemsize or z.dtype.hasobject:
            raise UnsupportedFeatureError(f"{self.label}: the kernel moves elements of four bytes")
        numbers = self.working_memory(z.itemsize * condition.size).view(np.float32)
        convert = convert_step(machine, condition.reshape(-1), numbers, self.label)
        conditions = numbers.reshape(where_condition_view(self.call()))
        values, result = (self.x(1).view(np.float32), self.x(2).view(np.float32)), z.view(np.float32)
        select = formula_step(machine, _chosen, (conditions, *values), (result,), self.label)
        if convert is None or select is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return in_sequence([convert, select])


def _chosen(build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
    return [build.select(build.less(0.0, read(0)), read(1), read(2))]
