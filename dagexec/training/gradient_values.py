"""Names for what gradient operators compute: a name is given again only when nothing needs what it holds any more.

Gradients have the names Caffe2 gives them: that of `x` is `x_grad`; where that name is in use, it is
`_x_grad_autosplit_0`, `_x_grad_autosplit_1` and so on. A name is in use while a later operator, or the caller, needs
the value under it; so a gradient that an operator passes on unchanged, which then belongs to several blobs, survives
an in-place operator on one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from dagexec.core.proto import DeviceOption, OperatorDef
from dagexec.core.registry import is_registered, schema_of
from dagexec.training.control_gradients import is_block, renamed_in_nets


class Value:
    """A tensor that gradient operators read or write.

    Attributes:
        name: of the blob; of a value that no operator has been emitted for, the name its maker asked for.
        needed: how many uses are still to come: operators to be emitted, blobs whose gradient it is, the caller.
        device: where the operator that computes it runs, if its def says so.
    """

    __slots__ = ("device", "name", "needed")

    def __init__(self, name: str, device: DeviceOption | None = None) -> None:
        self.name = name
        self.needed = 0
        self.device = device


class Emitter:
    """Collects the operators of the backward pass and names their outputs."""

    def __init__(self, taken: Collection[str]) -> None:
        """`taken` are the names of the forward net, which no gradient may have."""
        self.operators: list[OperatorDef] = []
        self._taken = frozenset(taken)
        self._holders: dict[str, Value] = {}

    def emit(self, definition: OperatorDef, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Append `definition` with the names of `inputs`, and names near those asked for as `outputs`.

        Each input must have been counted as needed once for each time it stands there; that need ends here.
        """
        for value in inputs:
            value.needed -= 1
        made = OperatorDef()
        made.CopyFrom(definition)
        del made.input[:], made.output[:]
        made.input.extend(value.name for value in inputs)
        is_control = is_block(definition)
        for position, value in enumerate(outputs):
            if is_control and definition.output[position] in definition.input:
                value.name = inputs[list(definition.input).index(definition.output[position])].name
                made.output.append(value.name)
                continue
            value.name = next(
                name for name in _candidates(value.name) if self._is_free(name, definition.type, inputs, position, made)
            )
            made.output.append(value.name)
        for value in outputs:
            self._holders[value.name] = value
        if is_control:
            names = zip((*definition.input, *definition.output), (*made.input, *made.output), strict=True)
            renamed_in_nets(made, dict(names))
        self.operators.append(made)

    def _is_free(self, name: str, op_type: str, inputs: Sequence[Value], position: int, made: OperatorDef) -> bool:
        if name in self._taken or name in made.output:
            return False
        holder = self._holders.get(name)
        if holder is None:
            return True
        if holder.needed:
            return False
        places = [index for index, value in enumerate(inputs) if value is holder]
        return not places or (len(places) == 1 and _may_overwrite(op_type, places[0], position))


def take_in_place_name_first(values: Sequence[Value], name: str) -> list[Value]:
    """The same values, the one called `name` changing places with the first: Sum may only overwrite its first input."""
    ordered = list(values)
    for index, value in enumerate(ordered):
        if value.name == name:
            ordered[0], ordered[index] = ordered[index], ordered[0]
            break
    return ordered


def need(values: Sequence[Value]) -> None:
    """Count one more use of each of `values`."""
    for value, times in Counter(values).items():
        value.needed += times


def release(values: Sequence[Value]) -> None:
    """Count one use less of each of `values`."""
    for value in values:
        value.needed -= 1


def _candidates(name: str) -> Iterator[str]:
    yield name
    for number in count():
        yield f"_{name}_autosplit_{number}"


def _may_overwrite(op_type: str, input_index: int, output_index: int) -> bool:
    if not is_registered(op_type):
        return False
    schema = schema_of(op_type)
    pair = (input_index, output_index)
    return schema.inplace(*pair) or pair in schema.enforced_inplace
