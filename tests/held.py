"""A small model, and operators of type Held that wait until let go, so that it is certain which runs overlap."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from tests.nets import temporary_operator
from tests.ops.running import operator_def

PATIENCE = 30


def doubled_model(op_type: str = "Relu") -> Model:
    """y = op(x) * scale, with a float32 input of any number of rows and a parameter."""
    net = NetDef(
        name="doubled",
        op=[operator_def(op_type, ["x"], ["h"]), operator_def("Mul", ["h", "scale"], ["y"])],
        external_input=["x", "scale"],
        external_output=["y"],
    )
    return Model(
        name="doubled",
        net=net,
        parameters={"scale": np.full((3,), 2, np.float32)},
        inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3))},
        outputs=("y",),
    )


def rows(value: float, count: int = 2) -> np.ndarray:
    return np.full((count, 3), value, np.float32)


class Held:
    """Control over the operators of type Held: they count themselves in and wait until let go.

    `seen` holds the first element of what each was fed with, in order; `failing` those at which it raises ValueError.
    """

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.seen: list[float] = []
        self.failing: set[float] = set()

    def __call__(self, operator: Operator) -> None:
        value = float(operator.x(0).flat[0])
        self.seen.append(value)
        operator.y(0)[...] = 1
        self.inside.release()
        # in slices: a signal that comes just before the main thread waits does not wake it
        assert any(self.go_on.acquire(timeout=PATIENCE / 100) for _ in range(100))
        if value in self.failing:
            raise ValueError(f"told to fail at {value:g}")

    def wait_inside(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.inside.acquire(timeout=PATIENCE)


@contextmanager
def held_operators() -> Iterator[Held]:
    """While it lasts, operators of type Held and HeldRows are the control's: an output of one element, and of rows."""
    control = Held()
    with temporary_operator("Held", control), temporary_operator("HeldRows", control, row_by_row=True):
        yield control
