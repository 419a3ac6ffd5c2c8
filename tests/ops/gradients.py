"""Numerical gradients: central differences in float64, against which gradient operators are checked.

The loss is sum(dY * Y) over the outputs, so that the gradient of an input is what its gradient operator gives for dY.
Griewank and Walther 2008, "Evaluating Derivatives", chapter 1: (f(x + h) - f(x - h)) / 2h is off by O(h^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, OperatorDef
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import Array, workspace_of

STEP = 1e-5


def numerical_gradients(
    definition: OperatorDef,
    inputs: Sequence[npt.ArrayLike],
    output_gradients: Sequence[npt.ArrayLike],
    wanted: Sequence[int],
    *,
    step: float = STEP,
) -> list[Array]:
    """For each input number in `wanted`, how sum(dY * Y) changes with each of its elements.

    `definition` is the forward operator; its inputs are fed in float64, whatever their dtype. The outputs that
    `output_gradients` has no entry for do not count.
    """
    arrays = [np.array(value, np.float64) for value in inputs]
    weights = [np.asarray(value, np.float64) for value in output_gradients]
    workspace = workspace_of(zip(definition.input, arrays, strict=True))
    with SimpleNet(NetDef(name="forward", op=[definition]), workspace) as net:

        def loss(index: int) -> float:
            workspace.feed_blob(definition.input[index], arrays[index])
            net.run()
            outputs = zip(definition.output, weights, strict=False)
            return sum(float((weight * workspace.fetch_blob(name)).sum()) for name, weight in outputs)

        return [_central_differences(arrays[index], partial(loss, index), step) for index in wanted]


def _central_differences(array: Array, loss: Callable[[], float], step: float) -> Array:
    gradient = np.zeros_like(array)
    for place in np.ndindex(array.shape):
        value = array[place]
        array[place] = value + step
        above = loss()
        array[place] = value - step
        below = loss()
        array[place] = value
        gradient[place] = (above - below) / (2 * step)
    loss()
    return gradient
