"""Operators whose work is a Python function of the script: `net.Python(f, grad_f)(["x"], ["y"])`.

A net is a message and holds no function: what stands for one is a token that nobody can guess (`core.python_step`), so
that a file names no function of this process. A function is called without any lock of dagexec's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.caffe2.native_workspace import NativeWorkspace
from dagexec.core import dtypes
from dagexec.core.blob import Blob
from dagexec.core.device import CPU
from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.python_step import PythonStep, step_of
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import GradientError, ShapeError

PYTHON = "PythonFunction"
"""The operator type. `Python` is a step of a pipeline, whose types are declared."""

_registered: list[PythonStep] = []  # a message does not keep its function, so they stay, as in Caffe2

Function = Callable[..., Any]


class TensorCPU:
    """A tensor as a function gets it. That of an input may only be read."""

    def __init__(self, blob: Blob, is_output: bool = False) -> None:
        self._blob = blob
        self._is_output = is_output

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        return tuple(self._blob.tensor().shape)

    @property
    def data(self) -> npt.NDArray[Any]:
        """Its memory as an array; of an output that has none, float32."""
        array = self._blob.tensor().array
        if not self._is_output:
            array = array.view()
            array.flags.writeable = False
        return array

    def reshape(self, dims: Sequence[int]) -> None:
        """Give an output another shape; what it holds is undefined then."""
        tensor = self._blob.tensor()
        self._resize(dims, FLOAT32 if tensor.is_empty else tensor.meta)

    def init(self, dims: Sequence[int], caffe_type: int) -> None:
        """Give an output a shape and a type, by the number of `core.DataType`."""
        self._resize(dims, dtypes.from_number(caffe_type))

    def feed(self, arr: Any, device_option: Any = None) -> None:
        """Let an output hold a copy of an array."""
        self._require_output()
        self._blob.tensor().feed(np.asarray(arr))

    def fetch(self) -> npt.NDArray[Any]:
        """A copy."""
        return self._blob.tensor().fetch()

    def _resize(self, dims: Sequence[int], meta: TypeMeta) -> None:
        self._require_output()
        self._blob.tensor().resize(tuple(int(size) for size in dims), meta)

    def _require_output(self) -> None:
        if not self._is_output:
            raise ShapeError(f"{self._blob.name!r} is an input, which a function may only read")


class _Calls(Operator):
    """Calls the function that a token stands for."""

    reads_strided = True
    writes_strided = True

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises AccessError for a function that this process does not know."""
        super().__init__(definition, workspace, index=index, net=net)
        self._step = step_of(self.arguments.string("token", ""), self.label)
        self._workspace = workspace if self.arguments.bool("pass_workspace") else None

    def prepare(self) -> Step:
        """One call."""
        inputs = [TensorCPU(blob) for blob in self.input_blobs]
        outputs = [TensorCPU(blob, is_output=True) for blob in self.output_blobs]
        around = [] if self._workspace is None else [NativeWorkspace(self._workspace)]
        function = self._step.function

        def call() -> None:
            function(inputs, outputs, *around)
            for blob in self.output_blobs:
                if not isinstance(blob.value, Tensor) or blob.tensor(CPU).is_empty:
                    raise ShapeError(f"{self.label}: its function left output {blob.name!r} empty: feed or reshape it")

        return call


_ARGS = {
    "token": "what stands for the function in this process",
    "pass_workspace": "1: the function takes the workspace as well",
    "grad_input_indices": "the inputs that have gradients (default: all)",
    "grad_output_indices": "the outputs whose gradients the function of the gradient takes (default: all)",
    "grad_token": "what stands for the function of the gradient, if there is one",
}


@new_operator(
    PYTHON,
    inputs=(0, UNBOUNDED),
    outputs=(0, UNBOUNDED),
    infer=None,
    doc="Calls a function of a script on its inputs and outputs. `dagexec.caffe2` makes it.",
    args=_ARGS,
    inplace=lambda _source, _target: True,
    effects=True,
    calls_application=True,
    on_host=True,
    reproducible=False,
)
class PythonFunction(_Calls):
    """A function of a script."""


@new_operator(
    f"{PYTHON}Gradient",
    inputs=(0, UNBOUNDED),
    outputs=(0, UNBOUNDED),
    infer=None,
    doc="Calls the function of a script that computes the gradients of another. `dagexec.caffe2` makes it.",
    args=_ARGS,
    inplace=lambda _source, _target: True,
    effects=True,
    calls_application=True,
    on_host=True,
    reproducible=False,
)
class PythonFunctionGradient(_Calls):
    """The function of a gradient."""


no_gradient(f"{PYTHON}Gradient")


@gradient_of(PYTHON)
def python_gradient(request: GradientRequest) -> GradientOperators:
    """The function of the gradient on inputs, outputs and the gradients of outputs."""
    arguments, definition = request.arguments, request.definition
    token = arguments.string("grad_token", "")
    if not token:
        raise GradientError(f"{request.label}: its function was registered without that of its gradient")
    of_outputs = arguments.ints("grad_output_indices") or range(len(definition.output))
    of_inputs = arguments.ints("grad_input_indices") or range(len(definition.input))
    inputs = [*definition.input, *definition.output, *(request.dy(place) for place in of_outputs)]
    return request.single(f"{PYTHON}Gradient", inputs, list(of_inputs), token=token)


def register(function: Any) -> str:
    """The token of a function, or of what `(make, arguments, keywords)` gives."""
    if not callable(function):
        make, arguments, keywords = function
        function = make(*arguments, **keywords)
    _registered.append(PythonStep(function))
    return _registered[-1].token
