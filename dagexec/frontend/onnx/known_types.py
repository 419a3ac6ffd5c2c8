"""Types of tensors while nodes are converted, as far as they follow from the model, an open size taken as 1.

An operator that does not compute with the elements it would get is found here, when its node can still become another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.model import InputInfo
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import ElementTypeError, OperatorCall, TensorType
from dagexec.errors import DagexecError
from dagexec.frontend.onnx.initializers import Array

_OPEN = 1


class KnownTypes:
    """Types by name, of inputs, constants, and what operators compute."""

    def __init__(self, values: Mapping[str, Array]) -> None:
        """`values` are constants, to which more may come."""
        self._values = values
        self._types: dict[str, TensorType | None] = {}

    def add_inputs(self, inputs: Mapping[str, InputInfo]) -> None:
        """Note what the model says of its inputs."""
        for name, info in inputs.items():
            if info.shape is not None and not (info.is_sequence or info.is_optional):
                sizes = tuple(_OPEN if size is None else size for size in info.shape)
                self._types[name] = TensorType(sizes, info.dtype or FLOAT32)

    def of(self, names: Iterable[str]) -> list[TensorType] | None:
        """The types of tensors, None unless all are known."""
        found = [self._of(name) for name in names]
        return [kind for kind in found if kind is not None] if None not in found else None

    def _of(self, name: str) -> TensorType | None:
        array = self._values.get(name)
        return self._types.get(name) if array is None else TensorType(tuple(array.shape), from_numpy(array.dtype))

    def follow(self, operators: Sequence[Node]) -> None:
        """Note what operators compute. Raises ElementTypeError for one that refuses the elements it would get."""
        for operator in operators:
            types = self.outputs(operator)
            for index, name in enumerate(operator.output):
                self._types[name] = None if types is None or index >= len(types) else types[index]

    def outputs(self, operator: Node) -> Sequence[TensorType] | None:
        """The types of its outputs, None where they do not follow from those of its inputs. Raises as `follow`."""
        inputs = self.of(operator.input)
        if inputs is None:
            return None
        values = tuple(self._values.get(name) for name in operator.input)
        try:
            schema = schema_of(operator.type)
            if schema.infer is None:
                return None
            call = OperatorCall(operator, operator.arguments(), tuple(inputs), values, operator.type)
            return schema.infer(call)
        except ElementTypeError:
            raise
        except DagexecError:
            return None
