"""Types of tensors while nodes are converted, as far as they follow from the model, an open size taken as 1.

An operator that does not compute with the elements it would get is found here, when its node can still become another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from dagexec.core.dtypes import FLOAT32, STRING, from_numpy
from dagexec.core.inferred_types import output_types, typing_form
from dagexec.core.model import InputInfo
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import ElementTypeError, OperatorCall, TensorType
from dagexec.errors import DagexecError
from dagexec.frontend.onnx.initializers import Array

_OPEN = 1


class KnownTypes:
    """Types by name, of inputs, constants, and what operators compute.

    Attributes:
        texts: tensors that hold strings.
        untyped: tensors whose types were not known when they came into being.
    """

    def __init__(self, values: Mapping[str, Array]) -> None:
        """`values` are constants, to which more may come."""
        self._values = values
        self._types: dict[str, TensorType | None] = {}
        self._one_of_each: dict[TensorType, TensorType] = {}
        self._made: dict[Hashable, Sequence[TensorType] | None] = {}  # by operator, and identity of types
        self.texts: set[str] = set()
        self.untyped: set[str] = set()
        self.add_constants(values)

    def add_constants(self, values: Mapping[str, Array]) -> None:
        """Note which of these constants hold strings."""
        self.texts.update(name for name, array in values.items() if array.dtype.hasobject)

    def add_inputs(self, inputs: Mapping[str, InputInfo]) -> None:
        """Note what the model says of its inputs."""
        for name, info in inputs.items():
            kind = None
            if info.shape is not None and not (info.is_sequence or info.is_optional):
                sizes = tuple(_OPEN if size is None else size for size in info.shape)
                kind = TensorType(sizes, info.dtype or FLOAT32)
            self._note(name, kind)

    def of(self, names: Iterable[str]) -> list[TensorType] | None:
        """The types of tensors, None unless all are known."""
        found = [self.of_one(name) for name in names]
        return [kind for kind in found if kind is not None] if None not in found else None

    def of_one(self, name: str) -> TensorType | None:
        """The type of a tensor, None unless it is known."""
        kind = self._types.get(name)
        if kind is None and (array := self._values.get(name)) is not None:
            kind = TensorType(tuple(array.shape), from_numpy(array.dtype))
            self._note(name, kind)
            return self._types[name]
        return kind

    def follow(self, operators: Sequence[Node]) -> None:
        """Note what operators compute. Raises ElementTypeError for one that refuses the elements it would get."""
        for operator in operators:
            types = self.outputs(operator)
            for index, name in enumerate(operator.output):
                self._note(name, None if types is None or index >= len(types) else types[index])

    def outputs(self, operator: Node) -> Sequence[TensorType] | None:
        """The types of its outputs, None where they do not follow from those of its inputs. Raises as `follow`."""
        inputs = self.of(operator.input)
        if inputs is None:
            return None
        schema = schema_of(operator.type)
        if schema.infer is None:
            return None
        values = tuple([self._values.get(name) for name in operator.input])
        form = typing_form(operator, schema, values)
        if form is not None:
            form = form, *map(id, inputs)
            if form in self._made:
                return self._made[form]
        try:
            found: Sequence[TensorType] | None = output_types(
                OperatorCall(operator, operator.arguments(), tuple(inputs), values, operator.type), schema
            )
        except ElementTypeError:
            raise
        except DagexecError:
            found = None
        if form is not None:
            self._made[form] = found
        return found

    def _note(self, name: str, kind: TensorType | None) -> None:
        self._types[name] = None if kind is None else self._one_of_each.setdefault(kind, kind)
        if kind is None:
            self.untyped.add(name)
        elif kind.meta is STRING:
            self.texts.add(name)
