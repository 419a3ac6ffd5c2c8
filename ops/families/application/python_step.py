"""Python: a function of the application on NumPy arrays, with declared types, as a step of a pipeline.

Only `dagexec.Pipeline` makes it: what stands for the function in a net is a token of this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import STRING, TypeMeta, from_numpy
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.python_step import step_of
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import FLOPS_PER_SECOND, UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.core.tensor_spec import TensorSpec
from dagexec.core.traits import Rows
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, ShapeError
from dagexec.ops.base.blocks import Array

_CALL_SECONDS = 20e-6  # what calling a function on a few arrays takes at least, checks of its result included


@lru_cache(maxsize=1024)
def _spec(text: str) -> TensorSpec:
    return TensorSpec.of(text)


def _specs(arguments: Arguments, name: str) -> list[TensorSpec]:
    return [_spec(text) for text in arguments.strings(name)]


def _bound(call: OperatorCall) -> dict[str, int]:
    """The named sizes of the inputs. Raises ShapeError where one is not what was declared."""
    sizes: dict[str, int] = {}
    for name, spec, kind in zip(call.definition.input, _specs(call.arguments, "takes"), call.inputs, strict=True):
        before = dict(sizes)
        if not spec.binds(kind.meta, kind.shape, sizes):
            named = ", ".join(f"{key} = {before[key]}" for key in spec.names() if key in before)
            raise call.fail(f"input {name!r} must be {spec}{f' with {named}' if named else ''}, found {kind}")
    return sizes


def infer_python(call: OperatorCall) -> Sequence[TensorType]:
    """The declared types, with sizes that the inputs name."""
    sizes = _bound(call)
    found: list[TensorType] = []
    for spec in _specs(call.arguments, "gives"):
        shape = spec.sizes_with(sizes)
        if shape is None or spec.dtype is None:
            raise call.fail(f"output {spec}: only a run can tell it")
        found.append(TensorType(shape, spec.dtype))
    return found


def python_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """The declared seconds, or those of a call; and the elements once."""
    seconds = call.arguments.float("seconds", _CALL_SECONDS)
    read = sum(kind.nbytes for kind in call.inputs)
    return Cost(math.ceil(seconds * FLOPS_PER_SECOND), read, sum(kind.nbytes for kind in outputs))


def _rows(asked: RowsCall) -> list[Rows | None]:
    if not asked.call.arguments.bool("row_wise"):
        raise asked.refuse("a Python step that is not declared row_wise takes all rows together")
    asked.require_uncounted()
    rows = asked.common({index: one for index, one in enumerate(asked.rows) if one is not None})
    if rows.axis != 0:
        raise asked.refuse(f"its inputs have the rows on axis {rows.axis}; a Python step that is row_wise, on axis 0")
    return asked.all_outputs(rows)


@new_operator(
    "Python",
    inputs=(0, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_python,
    cost=python_cost,
    doc="A Python function on the arrays of the inputs, which may only be read. `dagexec.Pipeline` makes it.",
    args={
        "function": "the token that stands for it in this process",
        "takes": "the declared type of each input, such as float32[N, 3, ?]",
        "gives": "the declared type of each output, with names of sizes that inputs have, or that it chooses",
        "results": "what each output is called where the function gives a mapping",
        "inferred": "1: the sizes of the outputs follow from those of the inputs",
        "row_wise": "1: each row of the outputs follows from the same row of the inputs alone",
        "seconds": "how long a call takes, as an estimate",
    },
    required_args=("function", "takes", "gives"),
    inferred_if="inferred",
    rows=_rows,
    calls_application=True,
    on_host=True,
)
class Python(Operator):
    """A function of the application."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises AccessError for a function that this process does not know, and MissingBlobError."""
        super().__init__(definition, workspace, index=index, net=net)
        self._step = step_of(self.arguments.string("function", ""), self.label)

    def prepare(self) -> Step:
        """One call, its results checked and copied to the outputs."""
        inputs = [_read_only(self.x(index)) for index in range(len(self.input_blobs))]
        call = self.call()
        sizes = _bound(call)
        specs = _specs(self.arguments, "gives")
        place = self._copy_to() if self.schema.can_infer(self.definition) else self._adopt
        function, label = self._step.function, self.label
        names = self.arguments.strings("results")

        def step() -> None:
            found = _listed(function(*inputs), names, label)
            named = dict(sizes)
            checked = [
                _checked(value, name, spec, named, label) for value, name, spec in zip(found, names, specs, strict=True)
            ]
            for index, array in enumerate(checked):
                place(index, array)

        return step

    def _copy_to(self) -> Callable[[int, Array], None]:
        outputs = [self.y(index) for index in range(len(self.output_blobs))]

        def copy(index: int, array: Array) -> None:
            np.copyto(outputs[index], array)

        return copy

    def _adopt(self, index: int, array: Array) -> None:
        """Have an output be of the size of a result, and hold it."""
        kind = from_numpy(array.dtype)
        np.copyto(self.output(index).resize(array.shape, kind), array)


def _read_only(array: Array) -> Array:
    """A view; one that cannot be made writable again, where the element type has a buffer."""
    try:
        view = np.asarray(array.data.toreadonly())
    except (ValueError, TypeError, BufferError):  # bfloat16
        view = array.view()
        view.flags.writeable = False
    return view


def _listed(found: object, names: Sequence[str], label: str) -> list[Any]:
    """What a function gave, in the order of the outputs."""
    if isinstance(found, Mapping):
        if set(found) != set(names):
            raise ShapeError(f"{label}: the function gave {sorted(map(str, found))}, and declares {sorted(names)}")
        return [found[name] for name in names]
    if len(names) == 1 and not (isinstance(found, tuple) and len(found) == 1):
        return [found]
    if not isinstance(found, tuple | list) or len(found) != len(names):
        count = len(found) if isinstance(found, tuple | list) else 1
        raise ShapeError(f"{label}: the function gave {count} results, and declares {len(names)}: {list(names)}")
    return list(found)


def _checked(value: object, name: str, spec: TensorSpec, sizes: dict[str, int], label: str) -> Array:
    """A result as an array. Raises ShapeError where it is not what is declared."""
    try:
        array = np.asarray(value)
        kind: TypeMeta = from_numpy(array.dtype)
    except (DagexecError, ValueError, TypeError) as error:
        raise ShapeError(f"{label}: output {name!r} is no array: {error}") from None
    if kind is STRING:
        array = _encoded(array, name, label)
    before = dict(sizes)
    if not spec.binds(kind, array.shape, sizes):
        named = ", ".join(f"{key} = {before[key]}" for key in spec.names() if key in before)
        given = f"{kind}{list(array.shape)}"
        raise ShapeError(f"{label}: output {name!r} is declared {spec}{f' with {named}' if named else ''}, got {given}")
    return array


def _encoded(array: Array, name: str, label: str) -> Array:
    """Strings as `bytes`, as blobs hold them."""
    texts = np.empty(array.shape, object)
    flat = texts.reshape(-1)
    for place, text in enumerate(array.reshape(-1).tolist()):
        if not isinstance(text, str | bytes):
            raise ShapeError(f"{label}: output {name!r} has a {type(text).__name__} among its strings")
        flat[place] = text.encode() if isinstance(text, str) else text
    return texts


no_gradient("Python")
