"""Chains of element-wise links by one kernel: NumPy's values, every way that operands broadcast, bytes of elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dagexec.ops.families.activation.post_ops import BINARY as UFUNCS
from dagexec.ops.kernels.chains import BINARY, FUNCTIONS, PRELU, Link, chain_step, is_known
from dagexec.ops.kernels.machine import Machine
from tests.ops.kernels.running import Array, each_size, needs_kernels
from tests.ops.pieces import cut_into
from tests.ops.running import run_operator, the_library


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def computed(
    links: Sequence[Link], x: Array, operands: Sequence[Array] = (), *, lanes: int = 8, pieces: int = 1
) -> Array:
    """By the kernel, which must leave what is around the result as it was."""
    memory = np.full(x.size + 64, 7, np.float32)
    y = memory[32 : 32 + x.size].reshape(x.shape)
    machine = Machine(lanes)
    with cut_into(pieces):
        step = chain_step(machine, links, x, y, operands, "chain")
    assert step is not None
    step()
    assert (memory[:32] == 7).all()
    assert (memory[32 + x.size :] == 7).all()
    return y


NUMBERS = {
    "leaky_relu": (0.3, 0.0),
    "clip": (-0.5, 0.7),
    "elu": (1.3, 0.0),
    "swish": (1.7, 0.0),
    "hardsigmoid": (0.3, 0.4),
    "linear": (-2.0, 0.5),
    "pow": (2.0, -2.0),
}


@each_size
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_is_that_of_numpy_s_engine(kind: str, lanes: int) -> None:
    a, b = NUMBERS.get(kind, (0.0, 0.0))
    x = normal(0, 3, 37) * 3
    if kind in ("log", "sqrt"):
        x = np.abs(x)
    entry = ":".join([kind, *map(str, NUMBERS.get(kind, ()))][: {"leaky_relu": 2, "elu": 2, "swish": 2}.get(kind, 3)])
    (expected,) = run_operator("FusedElementwise", [x], post_ops=[entry])
    np.testing.assert_allclose(computed([(kind, a, b, -1)], x, lanes=lanes), expected, rtol=2e-6, atol=3e-7)


@each_size
@pytest.mark.parametrize("kind", UFUNCS)
def test_an_operand_is_that_of_numpy(kind: str, lanes: int) -> None:
    x, other = normal(0, 5, 19), normal(1, 5, 19)
    x[0, :3], other[0, 1:4] = np.nan, np.nan
    found = computed([(kind, 0.0, 0.0, 0)], x, [other], lanes=lanes)
    np.testing.assert_array_equal(found, UFUNCS[kind](x, other))
    assert kind in BINARY


@each_size
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 5, 6)],
        [(6,)],
        [(5, 1), (6,)],
        [(4, 1, 1), (1, 5, 6)],
        [(4, 1, 6), (1,), (4, 5, 1)],
        [(1, 1, 1)],
    ],
)
def test_operands_broadcast(shapes: list[tuple[int, ...]], pieces: int, lanes: int) -> None:
    x = normal(0, 4, 5, 6)
    operands = [normal(number + 1, *shape) for number, shape in enumerate(shapes)]
    links: list[Link] = [("add", 0.0, 0.0, number) for number in range(len(operands))]
    expected = x.copy()
    for operand in operands:
        expected = expected + operand
    found = computed([*links, ("relu", 0.0, 0.0, -1)], x, operands, lanes=lanes, pieces=pieces)
    np.testing.assert_array_equal(found, np.maximum(expected, 0))


@each_size
def test_bytes_of_an_element_depend_on_its_numbers_alone(lanes: int) -> None:
    x, slope = normal(0, 7, 203), normal(1, 203)
    links: list[Link] = [("gelu_erf", 0.0, 0.0, -1), (PRELU, 0.0, 0.0, 0), ("tanh", 0.0, 0.0, -1)]
    whole = computed(links, x, [slope], lanes=lanes)
    for pieces in (1, 2, 3, 8):
        assert computed(links, x, [slope], lanes=lanes, pieces=pieces).tobytes() == whole.tobytes()
        assert computed(links, x[:1], [slope], lanes=lanes, pieces=pieces).tobytes() == whole[:1].tobytes()
    part = computed(links, x[3:4, 5:90], [slope[5:90]], lanes=lanes)
    assert part.tobytes() == np.ascontiguousarray(whole[3:4, 5:90]).tobytes()


@needs_kernels
def test_it_works_in_place_and_reads_no_operand_too_late() -> None:
    machine = the_library().machine
    x, other = normal(0, 4, 9), normal(1, 4, 9)
    y = x.copy()
    step = chain_step(machine, [("add", 0.0, 0.0, 0), ("mul", 0.0, 0.0, 1)], y, y, [other, y], "chain")
    assert step is not None
    step()
    np.testing.assert_array_equal(y, (x + other) * x)
    assert chain_step(machine, [("add", 0.0, 0.0, 0)], y, y, [y[:1]], "chain") is None


@needs_kernels
def test_what_it_does_not_serve_is_left_to_others() -> None:
    machine = the_library().machine
    x = normal(0, 4, 9)
    relu: list[Link] = [("relu", 0.0, 0.0, -1)]
    assert chain_step(machine, relu, x, np.empty_like(x), (), "chain") is not None
    assert chain_step(Machine(4), relu, x, np.empty_like(x), (), "chain") is None
    assert chain_step(machine, relu, x.astype(np.float64), np.empty((4, 9)), (), "chain") is None
    assert chain_step(machine, relu, x.T, np.empty((9, 4), np.float32), (), "chain") is None
    assert chain_step(machine, relu, x[:0], np.empty((0, 9), np.float32), (), "chain") is None
    assert not is_known(("pow", 1.0, 1.7, -1))
    assert not is_known(("unheard-of", 1.0, 1.7, -1))
