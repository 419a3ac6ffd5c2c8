"""Running one operator on arrays, for the tests of what operators compute."""

from __future__ import annotations

import itertools
import logging
import os
import tracemalloc
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, OperatorDef, Workspace, op, testing
from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import Device
from dagexec.core.node import arguments_of
from dagexec.core.registry import create_operator, registered_engines
from dagexec.ops.base.layout import blocked_orders
from dagexec.ops.engines.onednn.binding import Library, engine_library
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices, has_compiler, has_gpu
from tests.ops.pieces import cut_into

Array = npt.NDArray[Any]

SIM = Device("sim", 0)
ON_DEVICE_EVERY = int(os.environ.get("DAGEXEC_ON_DEVICE_EVERY", "4"))
"""Of the calls of `run_operator`, one in so many runs its operator on the simulated device, too."""

CUDA = Device("cuda", 0)
ON_CUDA_EVERY = int(os.environ.get("DAGEXEC_ON_CUDA_EVERY", "25"))
"""Of the calls of `run_operator`, one in so many runs its operator on CUDA, emulated where there is no GPU; 0: none.
Not while memory is being traced: the emulation takes some of its own."""

ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 3e-5, "float64": 1e-11}
"""How far CUDA may be from the host, relative to the largest element."""

CANCELLED = 1e-3
"""Of the largest element of the inputs, what counts as the largest of the output where terms cancel to less."""

_calls = itertools.count()
_cuda_calls = itertools.count()


def start_counting(test: str) -> None:
    """Count the calls of `run_operator` anew from a number that the name of a test gives.

    So which of its calls run on devices is decided by the test alone, and not by those that ran before it.
    """
    global _calls, _cuda_calls
    start = zlib.crc32(test.encode())
    _calls, _cuda_calls = itertools.count(start), itertools.count(start)


operator_def = op


def _is_float(value: Array) -> bool:
    return value.dtype.kind in "fV"  # bfloat16 is of kind V


def computed(
    op_type: str,
    arrays: dict[str, Array],
    results: list[str],
    frozen: str = "",
    engine: str = "ONEDNN",
    pieces: int = 0,
    **arguments: Any,
) -> list[Array]:
    """The results of one operator on blobs of these names, those in `frozen` constant, one run.

    It is cut into so many `pieces`, by default into as many as its work is worth.
    """
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    for name in frozen:
        workspace.get_blob(name).tensor().freeze()
    definition = operator_def(op_type, list(arrays), results, **arguments)
    definition.engine = engine
    operator = create_operator(definition, workspace)
    with cut_into(pieces):
        step = operator.bind(operator.infer())
    with operator_arithmetic():
        step()
    return [workspace.fetch_blob(name) for name in results]


def run_operator(
    op_type: str,
    inputs: list[npt.ArrayLike],
    outputs: int = 1,
    *,
    engine: str = "",
    pieces: int = 0,
    **arguments: ArgumentValue,
) -> list[Array]:
    """`dagexec.testing.run_operator`; now and then on the simulated device, too, which must give the same bytes.

    `pieces` are as in `computed`.
    """
    with cut_into(pieces):
        found = testing.run_operator(op_type, inputs, outputs, engine=engine, **arguments)
    arrays = {f"x{index}": np.asarray(value) for index, value in enumerate(inputs)}
    definition = operator_def(op_type, list(arrays), [f"y{index}" for index in range(outputs)], **arguments)
    definition.engine = engine
    if next(_calls) % ON_DEVICE_EVERY == 0 and not any(array.dtype == object for array in (*arrays.values(), *found)):
        for one, other in zip(found, on_device(SIM, definition, arrays), strict=True):
            assert (one.shape, one.tobytes()) == (other.shape, other.tobytes()), "the simulated device gave other bytes"
    if is_turn_of_cuda() and not tracemalloc.is_tracing():
        check_on_cuda(definition, arrays, found)
    return found


def is_turn_of_cuda() -> bool:
    """True once in `ON_CUDA_EVERY` calls."""
    return ON_CUDA_EVERY > 0 and next(_cuda_calls) % ON_CUDA_EVERY == 0 and (has_compiler() or has_gpu())


def check_on_cuda(definition: OperatorDef, arrays: dict[str, Array], expected: list[Array]) -> None:
    """Run the operator on CUDA if it has an implementation there, and compare; not in oneDNN's own orders."""
    if any(array.dtype == object for array in (*arrays.values(), *expected)):
        return
    if blocked_orders(arguments_of(definition, "")):
        return
    if not registered_engines(definition.type, "cuda"):
        return
    placed = OperatorDef()
    placed.CopyFrom(definition)
    placed.engine = ""
    with cuda_devices():
        found = on_device(CUDA, placed, arrays)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_rounds_to(one, other, f"output {index} of {definition.type} on {CUDA}", list(arrays.values()))


def assert_rounds_to(found: Array, expected: Array, message: str, inputs: Sequence[Array] = ()) -> None:
    """Raise AssertionError unless CUDA found what the host did, floats but for rounding, see ROUNDING and CANCELLED."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), message
    if not _is_float(expected):
        np.testing.assert_array_equal(found, expected, message)
        return
    rounding = ROUNDING[expected.dtype.name]
    read = max((_largest(array) for array in inputs if _is_float(array)), default=0.0)
    limit = rounding * max(_largest(expected), CANCELLED * read)
    wide = expected.astype(np.float64)
    np.testing.assert_allclose(found.astype(np.float64), wide, rtol=rounding, atol=limit, err_msg=message)


def _largest(array: Array) -> float:
    """The largest magnitude of the finite elements; 0 without one."""
    wide = array.astype(np.float64)
    return float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))


def on_device(device: Device, definition: OperatorDef, arrays: dict[str, Array]) -> list[Array]:
    """The outputs of the operator on `device`; the net copies its inputs there."""
    placed = OperatorDef()
    placed.CopyFrom(definition)
    placed.device_option.CopyFrom(device.to_option())
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    logging.disable()  # tests read what is logged for the host
    try:
        with SimpleNet(NetDef(name="test", op=[placed]), workspace) as net:
            net.run()
            return [workspace.fetch_blob(name) for name in definition.output]
    finally:
        logging.disable(logging.NOTSET)


def the_library() -> Library:
    """What engine ONEDNN computes with, where tests of it run."""
    found = engine_library()
    assert found is not None
    return found


def workspace_of(blobs: Mapping[str, npt.ArrayLike] | Iterable[tuple[str, npt.ArrayLike]]) -> Workspace:
    """A workspace with these blobs."""
    workspace = Workspace()
    for name, array in dict(blobs).items():
        workspace.feed_blob(name, array)
    return workspace


def run_net(workspace: Workspace, *operators: OperatorDef) -> None:
    """Run a net of these operators once."""
    with SimpleNet(NetDef(name="test", op=operators), workspace) as net:
        net.run()
