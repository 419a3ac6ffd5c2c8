"""The net of a step for rows that are sessions: each has a cache and a length of its own.

It is made of the net of a step for one session, whose inputs have one row. What follows from the length, or grows with
it, is *lifted* here: there is an axis of rows before its own axes, and its operators work behind that. Where it meets
what has rows on its first axis, as hidden states have, the axis of rows takes the place of the first. With one row each
operator computes what it did, and whether rows are computed apart from each other is proven by `core.row_axes`, so that
each row is what it is alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np

from dagexec.compiler.growing_axes import NotSteppingError
from dagexec.compiler.length_contents import Array
from dagexec.compiler.stepping import CACHE, LENGTH, OPENED, Stepping
from dagexec.core.dtypes import INT64, from_numpy
from dagexec.core.inference import infer_listed
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.row_axes import rule_of
from dagexec.core.rows import elementwise, keeps_axes
from dagexec.core.schema import TensorType
from dagexec.ops.families.attention.cached import CACHED_ATTENTION
from dagexec.ops.families.attention.cached import RANK as ATTENTION_RANK
from dagexec.ops.families.attention.opening import CLOSE_CACHES, OPEN_CACHES

_OF_SESSIONS = (CACHE, LENGTH)
_NUMBERS = (*_OF_SESSIONS, OPENED)
"""One of each for each row, which attention over caches reads as they are."""


class _Rows(Enum):
    """Where a blob has rows."""

    NONE = "they share it"
    FIRST = "on its first axis"
    LIFTED = "on an axis before its own"


def joined_step(net: Stepping, types: Mapping[str, TensorType]) -> Model:
    """The net for any number of rows; `types` are those of the inputs of `net`, with one row.

    Raises NotSteppingError where the model has no free first axis, and where rows cannot be shown to be right.
    """
    return _Joined(net, types).made()


class _Joined:
    """Such a net in the making."""

    def __init__(self, net: Stepping, types: Mapping[str, TensorType]) -> None:
        self._model = net.model
        self._inputs = {name: types[name] for name in net.model.inputs if name not in _OF_SESSIONS}
        self._nodes: list[Node] = []
        self._constants: dict[str, Array] = {}
        self._numbers = itertools.count()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._rows = dict.fromkeys(net.model.parameters, _Rows.NONE)
        self._names: dict[str, str] = {}
        for name, kind in self._inputs.items():
            free = net.model.inputs[name].shape
            if free is None or free[:1] != (None,) or kind.shape[:1] != (1,):
                raise NotSteppingError(f"input {name!r} has no row for each session")
            self._take(name, kind.shape, is_lifted=name in net.growing)
        self._take(LENGTH, (1,), is_lifted=True)

    def _take(self, name: str, shape: tuple[int, ...], *, is_lifted: bool) -> None:
        """An input, of this shape with one row."""
        self._shapes[name] = shape
        self._rows[name] = _Rows.LIFTED if is_lifted else _Rows.FIRST
        if is_lifted:
            self._names[name] = self._viewed(name, (0, *shape))

    def made(self) -> Model:
        """It. Raises NotSteppingError."""
        model = self._model
        numbers = dict.fromkeys(_OF_SESSIONS, TensorType((1,), INT64))
        known = infer_listed(
            model.name, model.program.op, {**_types_of(model), **self._inputs, **numbers}, model.parameters
        )
        self._shapes |= {name: tuple(array.shape) for name, array in model.parameters.items()}
        for node, outputs in zip(model.program.op, known.outputs, strict=True):
            if None in outputs:
                raise NotSteppingError(f"what {node.type} makes is not known before a run")
            self._follow(node, [one.shape for one in outputs if one is not None])
        for name in model.outputs:
            if self._rows[name] is not _Rows.FIRST:
                raise NotSteppingError(f"output {name!r} has no row for each session")
        inputs = {name: InputInfo(kind.meta, (None, *kind.shape[1:])) for name, kind in self._inputs.items()}
        return model.changed(
            net=type(model.program)(tuple(self._nodes), model.program.header),
            parameters={**model.parameters, **self._constants},
            inputs={**inputs, **dict.fromkeys(_OF_SESSIONS, InputInfo(INT64, (None,)))},
        )

    def _follow(self, node: Node, shapes: Sequence[tuple[int, ...]]) -> None:
        """Put what does the work of an operator into the net; `shapes` are those of its outputs with one row."""
        if node.type in (OPEN_CACHES, CLOSE_CACHES):
            self._nodes.append(node)
            return
        rows = [self._rows.get(name, _Rows.FIRST) for name in node.input]
        if _Rows.FIRST in rows:
            made, found = self._beside_rows(node, rows, shapes[0]), _Rows.FIRST
        elif _Rows.LIFTED in rows:
            made, found = self._lifted(node, rows, shapes[0]), _Rows.LIFTED
        else:
            made, found = node, _Rows.NONE
        self._nodes.append(made)
        for name, shape in zip(node.output, shapes, strict=True):
            self._shapes[name], self._rows[name] = shape, found
            self._names.pop(name, None)

    def _beside_rows(self, node: Node, rows: Sequence[_Rows], shape: tuple[int, ...]) -> Node:
        """An operator that reads what has rows on its first axis."""
        if node.type == CACHED_ATTENTION:
            names = [
                name if name in _NUMBERS else self._with_rows_first(name, own, ATTENTION_RANK)
                for name, own in zip(node.input, rows, strict=True)
            ]
            return node.changed(inputs=names)
        if _is_elementwise(node):
            return node.changed(
                inputs=[
                    self._with_rows_first(name, own, len(shape)) for name, own in zip(node.input, rows, strict=True)
                ]
            )
        if _Rows.LIFTED in rows:
            raise NotSteppingError(f"{node.type} joins what follows from the length with rows")
        return self._reshaping(node) if node.type == "Reshape" else node

    def _with_rows_first(self, name: str, rows: _Rows, rank: int) -> str:
        """An operand of so many axes, where others have rows on the first."""
        shape = self._shapes[name]
        if rows is _Rows.NONE or (rows is _Rows.FIRST and len(shape) == rank):
            return name
        whole = (1,) * (rank - len(shape)) + shape
        if whole[0] != 1:
            raise NotSteppingError(f"{name!r} has an axis in the place of rows")
        return self._viewed(self._names.get(name, name), (0, *whole[1:]))

    def _reshaping(self, node: Node) -> Node:
        """Reshape to sizes of which the first, 1, was the number of rows."""
        sizes = [int(size) for size in self._sizes(node)]
        if sizes[:1] != [1] or 0 in sizes:
            return node
        sizes[0] = 0 if -1 in sizes else -1
        return new_node("Reshape", node.input[:1], node.output, name=node.name, engine=node.engine, shape=sizes)

    def _sizes(self, node: Node) -> Sequence[int]:
        """The sizes that Reshape or Expand is told."""
        if len(node.input) == 1:
            return node.arguments(node.type).ints("shape")
        array = self._model.parameters.get(node.input[1])
        if array is None:
            raise NotSteppingError(f"{node.type} makes what is as large as only a run knows")
        return [int(size) for size in array]

    def _lifted(self, node: Node, rows: Sequence[_Rows], shape: tuple[int, ...]) -> Node:
        """An operator that works behind the axis of rows."""
        names = [self._names.get(name, name) for name in node.input]
        arguments, rank = node.arguments(node.type), len(self._shapes[node.input[0]])
        is_only = rows[0] is _Rows.LIFTED and _Rows.LIFTED not in rows[1:]
        if _is_elementwise(node):
            return node.changed(
                inputs=[self._behind_rows(name, own, len(shape)) for name, own in zip(node.input, rows, strict=True)]
            )
        if is_only and schema_of(node.type).is_view(node) and len(node.output) == 1:
            return new_node("Reshape", names[:1], node.output, name=node.name, shape=[0, *shape])
        if is_only and node.type == "Transpose":
            axes = tuple(arguments.ints("axes")) or tuple(range(rank))[::-1]
            return node.changed(inputs=names, arguments={"axes": [0, *(axis % rank + 1 for axis in axes)]})
        if is_only and node.type == "Expand":
            operand = self._behind_rows(node.input[0], rows[0], len(shape))
            return new_node("Expand", [operand, self._constant(np.array((1, *shape)))], node.output, name=node.name)
        if node.type == "Concat" and set(rows) == {_Rows.LIFTED} and not arguments.bool("add_axis"):
            return node.changed(inputs=names, arguments={"axis": arguments.int("axis", 1) % rank + 1})
        if node.type == "Gather" and not is_only and rows[0] is _Rows.NONE and arguments.int("axis", 0) % rank == 0:
            return node.changed(inputs=names)
        if is_only and node.type == "Gather":
            return node.changed(inputs=names, arguments={"axis": arguments.int("axis", 0) % rank + 1})
        if is_only and node.type == "GatherND" and not arguments.int("batch_dims", 0):
            return self._picked(node, names)
        raise NotSteppingError(f"{node.type} reads {node.input[0]!r}, which follows from the length of each session")

    def _behind_rows(self, name: str, rows: _Rows, rank: int) -> str:
        """An operand of so many axes behind that of rows; what has no rows is the same for all."""
        shape, own = self._shapes[name], self._names.get(name, name)
        if rows is _Rows.NONE or len(shape) == rank:
            return own
        return self._viewed(own, (0, *(1,) * (rank - len(shape)), *shape))

    def _picked(self, node: Node, names: Sequence[str]) -> Node:
        """GatherND as a Gather from neighbors."""
        indices, shape = self._model.parameters.get(node.input[1]), self._shapes[node.input[0]]
        if indices is None:
            raise NotSteppingError(f"{node.type} picks what only a run knows")
        sizes = np.array(shape[: indices.shape[-1]])
        flat = np.ravel_multi_index(tuple(np.moveaxis(indices % sizes, -1, 0)), tuple(sizes))
        data = self._viewed(names[0], (0, int(sizes.prod()), *shape[len(sizes) :]))
        return new_node("Gather", [data, self._constant(np.asarray(flat))], node.output, name=node.name, axis=1)

    def _viewed(self, name: str, shape: tuple[int, ...]) -> str:
        """The elements of a blob under another shape, in which 0 stands for the number of rows."""
        view = f"rows/{next(self._numbers)}"
        self._nodes.append(new_node("Reshape", [name], [view], shape=list(shape)))
        return view

    def _constant(self, array: Array) -> str:
        name = f"rows/{next(self._numbers)}"
        self._constants[name] = array
        return name


def _is_elementwise(node: Node) -> bool:
    """Each element is of those in its place, as NumPy broadcasts."""
    return rule_of(schema_of(node.type)) in (elementwise, keeps_axes) and not node.arguments(node.type).bool(
        "broadcast"
    )


def _types_of(model: Model) -> dict[str, TensorType]:
    return {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in model.parameters.items()}
