"""Attention among the first positions of tensors by kernels of our own, whose calls are renewed with the length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.native import NativeStep, table_piece
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.attention import (
    Calls,
    How,
    calls_for,
    computing,
    lying_of,
    require_kernels,
    scores_of,
    sizes_of,
)
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.problem import in_one
from dagexec.ops.families.attention import sized
from dagexec.ops.families.attention.sized import checked_length, read_sized_attention, sized_layers
from dagexec.ops.kernels import attention_kernels as kernels
from dagexec.ops.kernels.attention_kernels import GROUP

_SCORES = 4
"""Where mask and bias are behind Q, K, V and Y."""


@operator(sized.SizedAttention.schema, engine="ONEDNN")
class SizedAttention(OneDNNOperator, sized.SizedAttention):
    """SizedAttention by the kernels of FusedAttention."""

    def prepare_primitive(self) -> Step:
        """Calls that OpenLength has renewed."""
        layers = sized_layers(self.input(len(self.input_blobs) - 1))
        if layers is None:
            raise UnsupportedFeatureError(f"{self.label}: no OpenLength tells the length")
        sizes = read_sized_attention(self.call())
        q, k, v = (sizes.by_head(self.x(index), index) for index in range(3))
        y = self.y(0).transpose(sizes.y_by_head)
        require_kernels(self, (q, k, v), y, sizes.keys)
        before = list[Step]()
        scores = scores_of(self, sizes, before)
        return in_sequence([*before, computing(self, (q, k, v), y, scores, partial(_layer, layers))])


def _layer(layers: list[sized.SizedLayer], owner: OneDNNOperator, arrays: Sequence[Array | None], how: How) -> Step:
    """The step on Q, K, V and Y, by head, and mask and bias where they are, which is one of `layers`."""
    heads = _SizedHeads(owner, arrays, how)
    layers.append(heads)
    return heads.step


class _SizedHeads:
    """The calls for all heads.

    Attributes:
        step: makes them.
    """

    def __init__(self, owner: OneDNNOperator, arrays: Sequence[Array | None], how: How) -> None:
        self._arrays, self._how, self._label = arrays, how, owner.label
        self._sizes = sizes_of(lying_of(arrays), owner.onednn.machine.lanes)
        calls = self._calls(self._most)
        most = calls.heads.most_calls()
        self._memory = [array for one in calls.heads.most_memory() for array in in_one(owner.working_memory, one)]
        nothing = kernels.nothing()
        assert nothing is not None, "other kernels are there"
        self._tables = [np.zeros((count, 6), np.uint64) for count in most]
        self._nothing = nothing
        self._kept = calls
        self.step = NativeStep((tuple(table_piece(table, self, owner.label) for table in self._tables),))
        self.resize(self._most)

    @property
    def _most(self) -> int:
        q = self._arrays[0]
        assert q is not None
        return len(q[0, 0])

    def resize(self, length: int) -> None:
        """Have the calls compute so many positions."""
        calls = self._calls(checked_length(length, self._most, self._label, GROUP))
        rows = calls.rows_on([*self._arrays, *self._memory])
        starts = (0, *calls.ends)
        for number, table in enumerate(self._tables):
            own = rows[starts[number] : starts[number + 1]] if number < len(calls.ends) else rows[:0]
            table[: len(own)] = own
            table[len(own) :] = 0
            table[len(own) :, 0] = self._nothing
        self._kept = calls

    def _calls(self, length: int) -> Calls:
        """Those for so many positions."""
        lying = tuple(
            one and one._replace(shape=(*one.shape[:2], length, one.shape[3] if number < _SCORES else length))
            for number, one in enumerate(lying_of(self._arrays))
        )
        calls = calls_for(lying, self._sizes, self._how)
        if calls is None:
            raise UnsupportedFeatureError(f"{self._label}: no machine code runs here")
        return calls
