"""Checking gradient operators against numerical derivatives.

The loss is the sum of all outputs, each times weights drawn at random; its derivative by each element of an input is
taken by central differences of the forward operator alone, in float64, and compared with what the gradient operators
give for those weights as the gradients of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue
from dagexec.core.gradient import Gradient, SparseGradient, gradient
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.workspace import Workspace
from dagexec.scheduler.nets.simple import SimpleNet

Array = npt.NDArray[Any]
Also = Callable[[Sequence[OperatorDef], Workspace], object]
"""Called when operators have run: with them, and with their blobs."""


def nothing_else(operators: Sequence[OperatorDef], workspace: Workspace) -> None:
    """An `Also` that does nothing."""


def check_gradient(
    op_type: str,
    inputs: Sequence[npt.ArrayLike],
    *,
    wanted: Collection[int] | None = None,
    outputs: int = 1,
    weighted: Collection[int] | None = None,
    inplace: Mapping[int, int] | None = None,
    statistics: Collection[int] = (),
    step: float = 1e-6,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    seed: int = 0,
    also: Also = nothing_else,
    **arguments: ArgumentValue,
) -> dict[int, Array]:
    """Compare the gradients of the inputs `wanted` (all of floats by default) with numerical ones; returns them.

    `weighted` are the outputs that the loss depends on, by default all of floats; the others have no gradient.
    `inplace` maps an output to the input whose name it takes. `statistics` are outputs that only the forward operator
    has; they are not of the loss. Inputs should be float64, and away from where the operator has no derivative.
    `also` is called when the gradient operators have run. Raises AssertionError where the two differ.
    """
    arrays = [np.array(value) for value in inputs]
    definition = _definition(op_type, len(arrays), outputs, inplace or {}, arguments)
    differentiable = [index for index, array in enumerate(arrays) if array.dtype == np.float64]
    asked = sorted(differentiable if wanted is None else wanted)
    results = _run(definition, arrays, [])
    rng = np.random.default_rng(seed)
    chosen = [
        index
        for index, result in enumerate(results)
        if result.dtype == np.float64 and index not in statistics and (weighted is None or index in weighted)
    ]
    weights = {index: rng.uniform(-1, 1, results[index].shape) for index in chosen}
    found = analytic_gradients(definition, arrays, weights, asked, also)

    with _Forward(definition, arrays, results) as forward:

        def loss(position: int, varied: Array) -> float:
            values = forward([varied if i == position else array for i, array in enumerate(arrays)])
            return float(sum(np.sum(values[index] * weight) for index, weight in weights.items()))

        numerical = {position: _differences(loss, position, arrays[position], step) for position in asked}
    for position, expected in numerical.items():
        np.testing.assert_allclose(
            found[position], expected, rtol, atol, err_msg=f"gradient of input {position} of {op_type} {arguments}"
        )
    return found


def _differences(loss: Callable[[int, Array], float], position: int, array: Array, step: float) -> Array:
    """The central difference of the loss by each element of one input."""
    found = np.zeros(array.shape)
    varied = array.copy()
    for place in np.ndindex(found.shape):
        value = varied[place]
        sides = []
        for sign in (1, -1):
            varied[place] = value + sign * step
            sides.append(loss(position, varied))
        varied[place] = value
        found[place] = (sides[0] - sides[1]) / (2 * step)
    return found


class _Forward:
    """The forward operator, made once for all runs where a run leaves no trace on the next: else made anew for each."""

    def __init__(self, definition: OperatorDef, inputs: Sequence[Array], results: Sequence[Array]) -> None:
        self._definition = definition
        self._workspace = Workspace()
        self._feed(inputs)
        self._net = SimpleNet(NetDef(name="test", op=[definition]), self._workspace)
        self._is_pure = all(
            one.tobytes() == other.tobytes()
            for _ in range(2)
            for one, other in zip(self._again(inputs), results, strict=True)
        )

    def __enter__(self) -> _Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self._net.close()

    def __call__(self, inputs: Sequence[Array]) -> Sequence[Array]:
        return self._again(inputs) if self._is_pure else _run(self._definition, inputs, [])

    def _again(self, inputs: Sequence[Array]) -> list[Array]:
        self._feed(inputs)
        self._net.run()
        return [self._workspace.fetch_blob(name) for name in self._definition.output]

    def _feed(self, inputs: Sequence[Array]) -> None:
        for name, array in zip(self._definition.input, inputs, strict=True):
            self._workspace.feed_blob(name, array)


def analytic_gradients(
    definition: OperatorDef,
    inputs: Sequence[Array],
    output_gradients: Mapping[int, Array],
    wanted: Collection[int],
    also: Also = nothing_else,
) -> dict[int, Array]:
    """The dense gradients of the inputs `wanted` that the gradient operators of `definition` compute.

    `output_gradients` are those of the outputs, by index. A sparse gradient is added up into a dense array.
    """
    given: list[Gradient | None] = [
        f"{name}_grad" if index in output_gradients else None for index, name in enumerate(definition.output)
    ]
    made = gradient(definition, given, wanted=wanted)
    feeds = {f"{definition.output[index]}_grad": array for index, array in output_gradients.items()}
    names: list[str] = []
    for position in wanted:
        one = made.inputs[position]
        assert one is not None, f"{definition.type} gives no gradient of input {position}"
        names += [one.indices, one.values] if isinstance(one, SparseGradient) else [one]
    fetched = dict(zip(names, _run(definition, inputs, names, made.operators, feeds, also), strict=True))
    results = {}
    for position in wanted:
        one = made.inputs[position]
        if isinstance(one, SparseGradient):
            results[position] = np.zeros_like(inputs[position])
            np.add.at(results[position], fetched[one.indices], fetched[one.values])
        else:
            assert one is not None
            results[position] = fetched[one]
    return results


def _definition(
    op_type: str, inputs: int, outputs: int, inplace: Mapping[int, int], arguments: dict[str, ArgumentValue]
) -> OperatorDef:
    targets = [f"x{inplace[index]}" if index in inplace else f"y{index}" for index in range(outputs)]
    return op(op_type, [f"x{index}" for index in range(inputs)], targets, arg=arguments)


def _run(
    definition: OperatorDef,
    inputs: Sequence[Array],
    fetch: Sequence[str],
    behind: Sequence[OperatorDef] = (),
    feeds: Mapping[str, Array] | None = None,
    also: Also = nothing_else,
) -> list[Array]:
    """The outputs of `definition` followed by the operators `behind`, or the blobs `fetch`."""
    workspace = Workspace()
    for name, array in {**dict(zip(definition.input, inputs, strict=True)), **(feeds or {})}.items():
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="test", op=[definition, *behind]), workspace) as net:
        net.run()
    also([definition, *behind], workspace)
    return [workspace.fetch_blob(name) for name in fetch or definition.output]
