"""The values of a net: what each write to a blob makes, who reads it, and which of them are results."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy.typing as npt

from dagexec.core.model import Model
from dagexec.platform.records import dataclass


@dataclass(eq=False)
class Value:
    """What a blob holds from one write to the next.

    Attributes:
        number: counts the values of a net.
        name: the blob.
        writer: the operator that writes it, None for what is there before the run.
        position: of the output.
        readers: (operator, position of the input).
        is_output: the net gives it to its caller.
    """

    number: int
    name: str
    writer: int | None
    position: int
    readers: list[tuple[int, int]] = field(default_factory=list)
    is_output: bool = False


class Values:
    """The values of a model's net.

    Attributes:
        all: every value that is no constant, by number.
        read: by operator and input, the value; None for a constant: a parameter that is neither fed nor written.
        written_by: by operator and output, the value.
        names: of all blobs.
    """

    def __init__(self, model: Model) -> None:
        operators = model.program.op
        self.names = {name for definition in operators for name in (*definition.input, *definition.output)}
        self.names |= {*model.inputs, *model.outputs, *model.parameters}
        constants = constants_of(model)
        self.all: list[Value] = []
        self.read: list[tuple[Value | None, ...]] = []
        self.written_by: list[tuple[Value, ...]] = []
        current: dict[str, Value] = {}
        for index, definition in enumerate(operators):
            row: list[Value | None] = []
            for position, name in enumerate(definition.input):
                if name in constants:
                    row.append(None)
                    continue
                value = current.get(name) or self._new(current, name, None, 0)
                value.readers.append((index, position))
                row.append(value)
            self.read.append(tuple(row))
            self.written_by.append(
                tuple(self._new(current, name, index, position) for position, name in enumerate(definition.output))
            )
        for name in {*model.outputs, *model.program.external_output}:
            if name in current:
                current[name].is_output = True

    def _new(self, current: dict[str, Value], name: str, writer: int | None, position: int) -> Value:
        value = Value(len(self.all), name, writer, position)
        self.all.append(value)
        current[name] = value
        return value


def constants_of(model: Model) -> dict[str, npt.NDArray[Any]]:
    """The parameters that hold the same in every run: neither fed nor written by an operator."""
    changing = {name for definition in model.program.op for name in definition.output} | model.inputs.keys()
    return {name: array for name, array in model.parameters.items() if name not in changing}
