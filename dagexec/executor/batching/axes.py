"""Where the requests of a model have their rows, along which they are joined.

Inferred when the model is compiled, and again for shapes that were left open then: a proof for some sizes need not
hold for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.model import InputInfo, Model
from dagexec.core.row_axes import RowAxes, find_row_axes
from dagexec.core.schema import TensorType
from dagexec.core.spelling import did_you_mean
from dagexec.errors import RowsError, SettingError
from dagexec.executor.batching.padding import Padding
from dagexec.options import CompileOptions, Shapes

_MAX_ELEMENTS = 1 << 10
"""Shapes may depend on the values of parameters up to this size; only the types of larger ones are kept."""

_OPEN_SIZES = (8, 64, 224)
"""Tried at compile time for sizes that the model leaves open: a net may need a minimum size."""


class BatchAxes:
    """The batch axes of a model.

    Attributes:
        inputs: the axis by input. An input that is missing here is the same for all rows.
        found: where blobs have rows in every request; None when that is to be shown for the shapes of each.
        padding: of requests of different lengths, if it was asked for.
        has_empty_rows: rows of zeros are of no request, and do nothing.
    """

    def __init__(self, model: Model, options: CompileOptions, *, has_empty_rows: bool = False) -> None:
        """Raises RowsError, or SettingError, for a model whose rows cannot be shown to be apart."""
        listed = sorted(name for name, info in model.inputs.items() if info.is_sequence or info.is_optional)
        if listed:
            raise SettingError(f"net {model.name!r}: max_batch joins arrays; inputs {listed} are sequences or optional")
        init_operators = model.init_program.op
        parameter_names = {*model.parameters, *(name for definition in init_operators for name in definition.output)}
        if not parameter_names.isdisjoint(name for definition in model.program.op for name in definition.output):
            raise SettingError(f"net {model.name!r}: max_batch is for nets that do not update their parameters")
        self.has_empty_rows = has_empty_rows
        parameters = model.parameters.items()
        self._large = {
            name: TensorType(tuple(array.shape), from_numpy(array.dtype))
            for name, array in parameters
            if array.size > _MAX_ELEMENTS
        }
        self._model = model.changed(parameters={n: array for n, array in parameters if n not in self._large})
        row_axes, types, is_open = _found(self._model, self._large, options.batch_axes, options.shapes or {})
        self.inputs = {name: rows.axis for name, rows in row_axes.inputs.items()}
        self.found = None if is_open else row_axes
        self.padding: Padding | None = None
        if options.batch_padding is not None:
            self.padding = Padding(model, options.batch_padding, types, self.inputs)

    def of(self, types: Mapping[str, TensorType]) -> RowAxes:
        """Where blobs have rows in runs of inputs of these types, with any number of rows. Raises RowsError."""
        return _joinable(self._model.name, find_row_axes(self._model, {**self._large, **types}, self.inputs))


def _found(
    model: Model, large: Mapping[str, TensorType], axes: Mapping[str, int] | None, shapes: Shapes
) -> tuple[RowAxes, Mapping[str, TensorType], bool]:
    """The rows at compile time, the types of the inputs, and whether sizes besides the number of rows are open."""
    inputs = {name: model.inputs[name] for name in sorted(model.needed_inputs())}
    chosen = _free_first_axes(model.name, inputs) if axes is None else _checked(model.name, inputs, axes)
    unknown = sorted(name for name, info in inputs.items() if info.shape is None and name not in shapes)
    if unknown:
        raise SettingError(f"net {model.name!r}: max_batch needs the shapes of inputs {unknown}: compile(shapes=...)")
    is_open = any(
        info.shape is None or any(size is None for axis, size in enumerate(info.shape) if axis != chosen.get(name))
        for name, info in inputs.items()
    )
    refused: list[RowsError] = []
    for size in _OPEN_SIZES if is_open else _OPEN_SIZES[:1]:
        types = {name: _type(info, shapes.get(name), size) for name, info in inputs.items()}
        try:
            return _joinable(model.name, find_row_axes(model, {**large, **types}, chosen)), types, is_open
        except RowsError as error:
            refused.append(error)
    refused[0].add_note("max_batch joins requests only where rows are shown to be apart")
    raise refused[0]


def _free_first_axes(net: str, inputs: Mapping[str, InputInfo]) -> dict[str, int]:
    """Axis 0 of every input where that size is free. Raises SettingError when there is none."""
    axes = {name: 0 for name, info in inputs.items() if info.shape is None or info.shape[:1] == (None,)}
    if not axes:
        shapes = {name: info.shape for name, info in inputs.items()}
        raise SettingError(f"net {net!r}: max_batch needs an input of any number of rows, found {shapes}")
    return axes


def _checked(net: str, inputs: Mapping[str, InputInfo], axes: Mapping[str, int]) -> dict[str, int]:
    """`axes`. Raises SettingError for one that no input has, or whose size is fixed."""
    for name, axis in axes.items():
        info = inputs.get(name)
        if info is None:
            hint = did_you_mean(name, inputs)
            raise SettingError(f"net {net!r}: batch_axes: {name!r} is none of the inputs {sorted(inputs)}{hint}")
        if info.shape is not None and (axis >= len(info.shape) or info.shape[axis] is not None):
            raise SettingError(f"net {net!r}: batch_axes: axis {axis} of input {name!r} is not free in {info.shape}")
    return dict(axes)


def _type(info: InputInfo, shape: Sequence[int] | None, size: int) -> TensorType:
    sizes = info.shape if shape is None else shape
    assert sizes is not None
    return TensorType(
        tuple(size if given_size is None else int(given_size) for given_size in sizes), info.dtype or FLOAT32
    )


def _joinable(net: str, axes: RowAxes) -> RowAxes:
    """`axes`. Raises RowsError for an output in which the rows of one request do not lie together."""
    for name, rows in axes.outputs.items():
        if rows.before != 1:
            raise RowsError(f"net {net!r}: output {name!r} has each row in {rows.before} places of axis {rows.axis}")
    return axes
