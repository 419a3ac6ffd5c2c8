"""Every operator with inputs nobody meant it for: it computes or says what is wrong, and reaches only its blobs.

Numbers of axes from 0 to 5, axes without elements, element types and arguments are drawn from a seed. A DagexecError
is an answer; a crash, or an error that Python raised somewhere inside, is none.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import dagexec
from dagexec.core.arguments import ArgumentValue, make_argument
from dagexec.core.dtypes import from_numpy
from dagexec.core.io_access import IO
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import has_engine, operator_class, registered_operators, schema_of
from dagexec.errors import DagexecError, OperatorError
from tests.ops.running import workspace_of

SHAPES = ((), (0,), (1,), (3,), (2, 3), (0, 3), (3, 3), (2, 3, 4), (2, 3, 4, 5), (2, 0, 4, 4), (1, 2, 3, 2, 2))
DTYPES = (np.float32, np.float64, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_)
NUMBERS = (0, 1, 2, 3, 7, -1, -3, 1 << 31, (1 << 63) - 1, -(1 << 63))
REAL_NUMBERS = (0.0, 0.5, -1.5, 1e38, float("inf"))
TEXTS = ("", "abc", "NCHW", "NHWC", "SAME")

FEW = (1, 2)
MANY = (0, *range(3, 23))

OPERATORS = [
    name
    for name in registered_operators()
    if schema_of(name).does_io is IO.NONE and not operator_class(name).__module__.startswith("tests.")
]

Case = tuple[OperatorDef, dict[str, np.ndarray]]

_events: list[str] | None = None
"""What was reached outside of the process while somebody watches."""


def _audit(event: str, details: tuple[object, ...]) -> None:
    if _events is None:
        return
    writes = event == "open" and isinstance(details[1], str) and set(details[1]) & set("wax+")
    if writes or event in ("socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.remove", "os.mkdir"):
        _events.append(f"{event} {details[:2]}")


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collects what is written, connected to or started."""
    global _events
    found: list[str] = []
    _events = found
    try:
        yield found
    finally:
        _events = None


def argument(draw: random.Random) -> ArgumentValue:
    """A value of some kind, small as a rule."""
    numbers = NUMBERS[:6] if draw.random() < 0.7 else NUMBERS
    kind = draw.randrange(8)
    if kind < 4:
        return draw.choice(numbers)
    if kind == 4:
        return draw.choice(REAL_NUMBERS)
    if kind == 5:
        return draw.choice(TEXTS)
    if kind == 6:
        return [draw.choice(REAL_NUMBERS) for _ in range(draw.randrange(4))]
    return [draw.choice(numbers) for _ in range(draw.randrange(5))]


def case_of(op_type: str, seed: int) -> Case:
    """A def that its schema allows, and an array for each input."""
    draw = random.Random(f"{op_type} {seed}")
    schema = schema_of(op_type)
    inputs, outputs = (draw.randint(least, min(most, least + 3)) for least, most in (schema.inputs, schema.outputs))
    definition = OperatorDef(
        type=op_type, input=[f"x{index}" for index in range(inputs)], output=[f"y{index}" for index in range(outputs)]
    )
    for source, target in schema.enforced_inplace:
        if source < inputs and target < outputs:
            definition.output[target] = definition.input[source]
    others = [name for name in schema.args if name not in schema.required_args and draw.random() < 0.25]
    definition.arg.extend(make_argument(name, argument(draw)) for name in (*schema.required_args, *others))
    arrays = {}
    alike, shape, dtype = draw.random() < 0.4, draw.choice(SHAPES), draw.choice(DTYPES)
    for name in definition.input:
        shape = shape if alike else draw.choice(SHAPES)
        dtype = draw.choice(DTYPES) if draw.random() < 0.3 else np.float32 if draw.random() < 0.5 else dtype
        values = np.random.default_rng(seed).integers(-2, 4, shape)
        arrays[name] = np.asarray(values).astype(dtype)
    return definition, arrays


def check_alone(case: Case) -> None:
    definition, arrays = case
    workspace = workspace_of(arrays)
    net = workspace.build_net(NetDef(name="odd", op=[definition]), "simple")
    try:
        net.run()
    finally:
        net.close()


def check_compiled(case: Case, seed: int) -> None:
    """Between operators that passes join with their neighbors; some inputs are constants, some have open axes."""
    definition, arrays = case
    draw = random.Random(seed)
    feeds, inputs, constants, before = {}, {}, {}, []
    for name, array in arrays.items():
        if draw.random() < 0.4:
            constants[name] = array
            continue
        feeds[f"{name}_fed"] = array
        shape = array.shape if draw.random() < 0.7 else (None,) * array.ndim
        inputs[f"{name}_fed"] = InputInfo(from_numpy(array.dtype), shape)
        before.append(OperatorDef(type=draw.choice(["Relu", "Sigmoid", "Sum"]), input=[f"{name}_fed"], output=[name]))
    results = tuple(f"{name}_out" for name in definition.output)
    after = [
        OperatorDef(type=draw.choice(["Relu", "Sqr"]), input=[name], output=[result])
        for name, result in zip(definition.output, results, strict=True)
    ]
    net = NetDef(name="odd", op=[*before, definition, *after])
    model = Model("odd", net, parameters=constants, inputs=inputs, outputs=results)
    with dagexec.compile(model, num_workers=1, net_type="simple") as executor:
        executor.run(feeds)


def check(op_type: str, seed: int) -> None:
    definition, arrays = case_of(op_type, seed)
    if seed % 3 == 1 and has_engine(op_type, "ONEDNN"):
        definition.engine = "ONEDNN"
    compiled = seed % 3 == 2 and not set(definition.input) & set(definition.output)
    try:
        with watched() as reached:
            check_compiled((definition, arrays), seed) if compiled else check_alone((definition, arrays))
    except OperatorError as error:
        cause = error.__cause__
        told = isinstance(cause, DagexecError | ArithmeticError) or str(cause).startswith(op_type)
        assert told, f"seed {seed}: {cause!r} in {definition}"
    except DagexecError:
        pass
    assert not reached, f"seed {seed}: {reached} in {definition}"


@pytest.mark.parametrize("op_type", OPERATORS)
def test_an_operator_with_odd_inputs_computes_or_says_what_is_wrong(op_type: str) -> None:
    for seed in FEW:
        check(op_type, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_operators_with_many_odd_inputs_compute_or_say_what_is_wrong(part: int) -> None:
    for op_type in OPERATORS[part::8]:
        for seed in MANY:
            check(op_type, seed)
