"""A model whose inputs are drawn for as many examples as are asked for, and single operators as such models."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import InputInfo, Model, NetDef, op
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import from_numpy
from dagexec.core.schema import TensorType
from dagexec.core.traits import Rows

Array = npt.NDArray[Any]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Of a normal distribution, float32."""
    return random.standard_normal(shape, dtype=np.float32)


def positive(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Between 0.1 and 2, float32."""
    return random.uniform(0.1, 2, shape).astype(np.float32)


def integers(low: int, high: int, dtype: npt.DTypeLike = np.int64) -> Draw:
    """From `low` to below `high`."""
    return lambda random, shape: random.integers(low, high, shape).astype(dtype)


@dataclass(frozen=True)
class Given:
    """An input.

    Attributes:
        shape: of one example, with the size of one on the axis that examples are on.
        axis: which that is; None for what all examples share.
        is_constant: it is a parameter, and not fed.
        draw: makes it.
        values: what it is, where nothing is drawn.
    """

    shape: tuple[int, ...]
    axis: int | None = None
    is_constant: bool = False
    draw: Draw = normal
    values: Array | None = None

    def of_examples(self, chosen: Sequence[int], seed: str = "") -> Array:
        """The input for these examples; an example has the same values in every call with one `seed`."""
        if self.values is not None:
            return self.values
        if self.axis is None:
            return self._drawn(seed)
        return np.concatenate([self._drawn(f"{seed} {number}") for number in chosen], self.axis)

    def _drawn(self, seed: str) -> Array:
        return self.draw(np.random.default_rng(zlib.crc32(f"{seed} {self.shape}".encode())), self.shape)


def of_examples(array: Array, rows: Rows | None, chosen: Sequence[int], examples: int) -> Array:
    """What of `array`, which is for so many examples, belongs to the chosen ones."""
    if rows is None:
        return array
    before, after = array.shape[: rows.axis], array.shape[rows.axis + 1 :]
    split = array.reshape(*before, rows.before, examples, rows.each, *after)
    taken = np.take(split, list(chosen), axis=rows.axis + 1)
    return np.ascontiguousarray(taken.reshape(*before, rows.size(len(chosen)), *after))


@dataclass(frozen=True)
class Subject:
    """A model, and what its inputs are."""

    name: str
    model: Model
    inputs: Mapping[str, Given]

    def feeds(self, chosen: Sequence[int]) -> dict[str, Array]:
        """The inputs for a batch of these examples."""
        return {name: given.of_examples(chosen, name) for name, given in self.inputs.items()}

    def axes(self) -> dict[str, int]:
        """The batch axis by input."""
        return {name: given.axis for name, given in self.inputs.items() if given.axis is not None}

    def types(self) -> dict[str, TensorType]:
        """Of the inputs, for one example."""
        return {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in self.feeds([0]).items()}


@dataclass(frozen=True)
class Case:
    """One operator on some inputs.

    Attributes:
        outputs: how many it has.
        unread: how many of them, at the end, are not compared: what is in them may be of the batch, such as its shape.
    """

    op_type: str
    inputs: Sequence[Given]
    outputs: int = 1
    unread: int = 0
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, given.shape)) + "c" * given.is_constant for given in self.inputs)
        kinds = {given.of_examples([0]).dtype.name for given in self.inputs} - {"float32"}
        shown = ",".join(f"{name}={value}" for name, value in self.arguments.items())
        return " ".join([self.op_type, shapes, *sorted(kinds), shown]).strip()[:100]

    def subject(self, engine: str = "") -> Subject:
        """The model of the operator alone, by one engine."""
        names = [f"x{index}" for index in range(len(self.inputs))]
        results = [f"y{index}" for index in range(self.outputs)]
        named = dict(zip(names, self.inputs, strict=True))
        definition = op(self.op_type, names, results, engine=engine, **self.arguments)
        fed = {name: given for name, given in named.items() if not given.is_constant}
        parameters = {name: given.of_examples([], name) for name, given in named.items() if given.is_constant}
        infos = {name: InputInfo(from_numpy(given.of_examples([0], name).dtype)) for name, given in fed.items()}
        net = NetDef(name="rows", op=[definition])
        compared = tuple(results[: self.outputs - self.unread])
        return Subject(str(self), Model("rows", net, parameters=parameters, inputs=infos, outputs=compared), fed)


def case(op_type: str, *inputs: Given, outputs: int = 1, unread: int = 0, **arguments: ArgumentValue) -> Case:
    """A case of an operator with these arguments."""
    return Case(op_type, inputs, outputs, unread, arguments)


def batch(*shape: int, draw: Draw = normal) -> Given:
    """Examples of this shape each, on a first axis before it."""
    return Given((1, *shape), 0, draw=draw)


def examples_at(axis: int, *shape: int, draw: Draw = normal) -> Given:
    """Examples on an axis of this shape, which has the size of one there."""
    return Given(shape, axis, draw=draw)


def constant(*shape: int, draw: Draw = normal) -> Given:
    """A parameter."""
    return Given(shape, is_constant=True, draw=draw)


def shared(*shape: int, draw: Draw = normal) -> Given:
    """What is fed, and the same for all examples."""
    return Given(shape, draw=draw)


def constant_values(values: npt.ArrayLike, dtype: npt.DTypeLike = None) -> Given:
    """A parameter of these values."""
    array = np.asarray(values, dtype)
    return Given(array.shape, is_constant=True, values=array)
