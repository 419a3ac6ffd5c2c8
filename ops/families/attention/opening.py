"""OpenCaches and CloseCaches: what attention over caches does at the beginning of a run, and when it has ended.

Which caches a run has, and how many positions they hold, is known when it begins. What kernels need of them is found
out then, for all layers at once, which are native calls after that: threads share them, and none waits for Python.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from dagexec.core.caches import Found, found_caches
from dagexec.core.dtypes import INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.core.tensor import Tensor
from dagexec.core.traits import Rows
from dagexec.platform.records import dataclass

OPEN_CACHES, CLOSE_CACHES = "OpenCaches", "CloseCaches"


class Layer(Protocol):
    """Attention over caches, prepared."""

    def open(self, found: Found) -> None:
        """A run begins, with these caches."""

    def close(self) -> None:
        """It needs them no more."""


@dataclass
class Layers:
    """Those that OpenCaches opens.

    Attributes:
        layers: them.
        shared: what several have in common, under a key of theirs.
    """

    layers: list[Layer] = field(default_factory=list)
    shared: dict[Hashable, Any] = field(default_factory=dict)


_layers: WeakKeyDictionary[Tensor, Layers] = WeakKeyDictionary()
"""By what OpenCaches writes, the layers that read it."""


def layers_of(opened: Tensor) -> Layers | None:
    """The layers that are opened before `opened` is written; None for what OpenCaches does not write."""
    return _layers.get(opened)


def _infer_open(call: OperatorCall) -> list[TensorType]:
    for index in range(2):
        call.require_types(index, INT64)
        call.require_rank(index, 1)
    call.require_shape(1, call.inputs[0].shape, "a length for each cache")
    return [call.inputs[1]]


_FLOPS = 1 << 21
"""About what could be computed meanwhile: other work of a run is for other threads, or comes later."""


def _cost(_call: OperatorCall, _outputs: Sequence[TensorType]) -> Cost:
    return Cost(_FLOPS, 0, 0)


@new_operator(
    OPEN_CACHES,
    inputs=(2, 2),
    outputs=(1, 1),
    infer=_infer_open,
    doc="Finds the caches that the CachedAttention operators of a net read, before the first of them. (dagexec's own, "
    "for sessions.)",
    input_names=("cache: the number of each session's caches", "length: how many positions each holds"),
    output_names=("the lengths, for CachedAttention",),
    cost=_cost,
    rows=elementwise,
    effects=True,
)
class OpenCaches(Operator):
    """Opens the layers that were prepared after it."""

    def prepare(self) -> Step:
        """A step that calls all of them."""
        numbers, lengths, opened, label = self.x(0), self.x(1), self.y(0), self.label
        layers = _layers[self.output(0)] = Layers()

        def step() -> None:
            np.copyto(opened, lengths)
            found = found_caches(numbers, lengths, label)
            for layer in layers.layers:
                layer.open(found)

        return step


def _rows_of_close(asked: RowsCall) -> list[Rows | None]:
    asked.require_uncounted()
    return []


@new_operator(
    CLOSE_CACHES,
    inputs=(1, UNBOUNDED),
    outputs=(0, 0),
    infer=lambda _call: [],
    doc="Lets go of what OpenCaches found, after all CachedAttention operators. (dagexec's own, for sessions.)",
    input_names=("what OpenCaches wrote", "the outputs of CachedAttention"),
    rows=_rows_of_close,
    effects=True,
)
class CloseCaches(Operator):
    """Closes the layers that OpenCaches opened."""

    def prepare(self) -> Step:
        """A step that calls all of them."""
        layers = layers_of(self.input(0)) or Layers()

        def step() -> None:
            for layer in layers.layers:
                layer.close()

        return step


not_differentiable("train without a session", OPEN_CACHES, CLOSE_CACHES)
