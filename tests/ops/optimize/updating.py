"""Running update operators for several steps, and the rules again, one element after the other in Python's floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, OperatorDef
from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import Device
from dagexec.core.registry import registered_engines
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices
from tests.ops.running import assert_rounds_to, is_turn_of_cuda, operator_def, workspace_of

Array = npt.NDArray[Any]
RATES = (-0.1, -0.05, -0.07)
DEVICES = ("cpu", "sim:0")


def run_steps(
    op_type: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    blobs: Mapping[str, Array],
    fed: Sequence[Mapping[str, Array]],
    *,
    device: str = "cpu",
    **arguments: ArgumentValue,
) -> dict[str, Array]:
    """What the outputs hold after a run of the operator for each entry of `fed`, blobs to feed before it.

    When asked (see `running.is_turn_of_cuda`), what runs on the host runs on CUDA, too, and is compared.
    """
    definition = operator_def(op_type, list(inputs), list(outputs), **arguments)
    results = _run_steps(definition, blobs, fed, device)
    if device == "cpu" and registered_engines(op_type, "cuda") and is_turn_of_cuda():
        with cuda_devices():
            found = _run_steps(definition, blobs, fed, "cuda:0")
        for name, expected in results.items():
            assert_rounds_to(found[name], expected, f"{name} of {op_type} on cuda:0")
    return results


def _run_steps(
    definition: OperatorDef, blobs: Mapping[str, Array], fed: Sequence[Mapping[str, Array]], device: str
) -> dict[str, Array]:
    placed = OperatorDef()
    placed.CopyFrom(definition)
    placed.device_option.CopyFrom(Device.parse(device).to_option())
    workspace = workspace_of(blobs)
    with SimpleNet(NetDef(name="test", op=[placed]), workspace) as net:
        for step in fed:
            for name, array in step.items():
                workspace.feed_blob(name, array)
            net.run()
        return {name: workspace.fetch_blob(name).copy() for name in placed.output}


def scalar(value: float) -> Array:
    """One float32."""
    return np.array([value], np.float32)


def counter(value: int) -> Array:
    """One int64."""
    return np.array([value], np.int64)


Formula = Callable[[float, list[float], float, float, int], tuple[float, list[float], list[float]]]
"""Parameter, state, gradient, rate and iteration of one element to the new parameter, state and extra outputs."""


def each_element(
    formula: Formula, param: Array, state: Sequence[Array], grads: Sequence[Array], rates: Sequence[float]
) -> tuple[Array, list[Array], list[Array]]:
    """Parameter, state and the last step's extra outputs after the formula was applied to every element, step by step.

    A state array may have several numbers an element, in a last axis.
    """
    values = param.astype(np.float64).reshape(-1).copy()
    states = [array.astype(np.float64).reshape(values.size, array.size // max(1, values.size)) for array in state]
    extras: list[list[float]] = [[] for _ in values]
    for iteration, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        slope = grad.astype(np.float64).reshape(-1)
        for place in range(values.size):
            own = [number for array in states for number in array[place]]
            values[place], found, extras[place] = formula(values[place], own, slope[place], rate, iteration)
            rest = list(found)
            for array in states:
                for column in range(array.shape[1]):
                    array[place, column] = rest.pop(0)
    shaped = [array.reshape(old.shape) for array, old in zip(states, state, strict=True)]
    count = len(extras[0]) if extras else 0
    outputs = [np.array([extra[k] for extra in extras]).reshape(param.shape) for k in range(count)]
    return values.reshape(param.shape), shaped, outputs
