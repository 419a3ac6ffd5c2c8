"""Sessions of `onnx.reference`: NumPy, one thread, for models that need few of it or types that nothing else has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dagexec.platform.forking import ProcessLock
from dagexec.platform.lazy import LazyModule
from dagexec.sessions.session import Array, Session

if not TYPE_CHECKING:
    onnx = LazyModule("onnx")
    reference = LazyModule("onnx.reference")
else:
    import onnx
    from onnx import reference


class ReferenceSession(Session):
    """An evaluator, which runs for one thread at a time."""

    runtime = "onnx.reference"

    def __init__(self, model: onnx.ModelProto) -> None:
        """Raises what the package raises for an operator that it does not have."""
        super().__init__([value.name for value in model.graph.input], [value.name for value in model.graph.output])
        self._evaluator = reference.ReferenceEvaluator(model)
        self._turn = ProcessLock()

    def run(self, values: Sequence[object]) -> list[object]:
        with self._turn.own, np.errstate(all="ignore"):
            return list(self._evaluator.run(None, dict(zip(self.inputs, values, strict=True))))

    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], object]:
        return partial(self._run_into, inputs, outputs)

    def _run_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        for name, target, found in zip(self.outputs, outputs, self.run(inputs), strict=True):
            array = np.asarray(found)
            if array.shape != target.shape:
                raise ValueError(f"{self.runtime} gives {name!r} the shape {array.shape}; inferred was {target.shape}")
            np.copyto(target, array, casting="unsafe")
