"""Element-wise operators by oneDNN, alone and as chains, against formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.registry import create_operator
from dagexec.errors import ArgumentError, ShapeError
from tests.ops.drawing import drawn
from tests.ops.onednn.engine import AVX2, AVX512, ENGINES, needs_onednn, normal, run_fallback, run_onednn
from tests.ops.running import Array, operator_def, run_net, run_operator, workspace_of

Formula = Callable[[Array], Array]


@needs_onednn
def test_an_exact_gelu_is_exact_whatever_the_library_makes_of_it() -> None:
    x = np.linspace(-6, 6, 500, dtype=np.float32)
    expected = [0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    for op_type, arguments in (("Gelu", {}), ("FusedElementwise", {"post_ops": ["abs", "linear:1.0:0.0", "gelu_erf"]})):
        (found,) = run_operator(op_type, [x], engine="ONEDNN", **arguments)
        wanted = expected if op_type == "Gelu" else [*expected[:249:-1], *expected[250:]]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@needs_onednn
def test_a_logarithm_near_zero_is_exact() -> None:
    x = np.linspace(0.5, 2, 500, dtype=np.float32)
    expected = np.log(x.astype(np.float64))
    np.testing.assert_allclose(run_operator("Log", [x], engine="ONEDNN")[0], expected, rtol=1e-6, atol=2e-6)
    (found,) = run_operator("FusedElementwise", [x], engine="ONEDNN", post_ops=["log", "abs"])
    np.testing.assert_allclose(found, np.abs(expected), rtol=1e-6, atol=2e-6)


@needs_onednn
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4, 5, 6, 2, 2)])
def test_any_number_of_axes(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    (found,) = run_onednn("Relu", [x])
    np.testing.assert_array_equal(found, np.where(x > 0, x, 0))


STRETCHES = [
    ((2, 6, 5, 4), (2, 6, 5, 4)),
    ((2, 6, 5, 4), (6, 1, 1)),
    ((2, 5, 4, 6), (6,)),
    ((2, 6, 5, 4), (2, 6, 1, 1)),
    ((2, 6, 5, 4), (1,)),
    ((2, 3, 5, 4, 16), (3, 1, 1, 16)),
    ((2, 3, 5, 4, 16), (2, 3, 1, 1, 16)),
    ((3, 40), (3, 1)),
]


def lanes_for(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Blocks of 16 channels that meet one number for each are a vector of AVX-512; oneDNN is slow there with less."""
    return AVX512 if len(a) == 5 and a != b else 1


ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}


@needs_onednn
@pytest.mark.parametrize("op_type", ARITHMETIC)
@pytest.mark.parametrize(("a", "b"), STRETCHES)
def test_two_tensors_meet(op_type: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    left, right = normal(4, *a), normal(5, *b)
    (found,) = run_onednn(op_type, [left, right], lanes=lanes_for(a, b), pieces=2)
    expected = ARITHMETIC[op_type](left.astype(np.float64), right.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@needs_onednn
def test_the_first_tensor_may_be_the_stretched_one() -> None:
    left, right = normal(6, 5, 1), normal(7, 4, 5, 6)
    np.testing.assert_allclose(run_onednn("Mul", [left, right])[0], left * right, rtol=1e-6)
    np.testing.assert_allclose(run_onednn("Sub", [left, right], lanes=AVX2)[0], left - right, rtol=1e-6)


@needs_onednn
@pytest.mark.parametrize("op_type", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_many_tensors_meet(op_type: str, count: int) -> None:
    tensors = [normal(index, 3, 16, 5) for index in range(count)]
    (found,) = run_onednn(op_type, list(tensors), pieces=2)
    stack = np.stack(tensors).astype(np.float64)
    expected = {"Sum": stack.sum(0), "Mean": stack.mean(0), "Max": stack.max(0), "Min": stack.min(0)}[op_type]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


CHAIN_LINKS: dict[str, Formula] = {
    "relu": lambda y: np.where(y > 0, y, 0),
    "leaky_relu:0.25": lambda y: np.where(y > 0, y, 0.25 * y),
    "clip:-1.0:1.5": lambda y: np.clip(y, -1, 1.5),
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "tanh": np.tanh,
    "linear:0.5:0.25": lambda y: 0.5 * y + 0.25,
    "abs": np.abs,
    "hardswish": lambda y: y * np.clip(y / 6 + 0.5, 0, 1),
    "swish:1.5": lambda y: y / (1 + np.exp(-1.5 * y)),
}
CHAIN_OPERANDS = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "max": np.maximum, "min": np.minimum}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@drawn(60)
@given(data=st.data())
def test_a_chain_applies_its_links_in_order(engine: str, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2, 6, 5, 4), (3, 40), (2, 2, 3, 3, 16), (7,), ()]))
    count = data.draw(st.integers(0, 45))
    x = data.draw(st.integers(0, 9).map(lambda seed: np.random.default_rng(seed).standard_normal(shape)))
    expected, tensors, links = x.astype(np.float32).astype(np.float64), [x.astype(np.float32)], []
    for number in range(count):
        if data.draw(st.integers(0, 2)):
            link = data.draw(st.sampled_from(sorted(CHAIN_LINKS)))
            expected = CHAIN_LINKS[link](expected)
            links.append(link)
            continue
        kind = data.draw(st.sampled_from(sorted(CHAIN_OPERANDS)))
        axes = [size if data.draw(st.booleans()) else 1 for size in shape]
        operand = np.random.default_rng(number).uniform(-1, 1, axes).astype(np.float32)
        expected = CHAIN_OPERANDS[kind](expected, operand.astype(np.float64))
        links.append(f"{kind}:{len(tensors)}")
        tensors.append(operand)
    (found,) = run_operator("FusedElementwise", list(tensors), engine=engine, post_ops=links)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize("links", [1, 31, 32, 33, 34, 66, 100])
@pytest.mark.parametrize("first", ["add:1", "linear:1.0:0.5"])
def test_chains_of_any_length_go_to_onednn(links: int, first: str) -> None:
    x, b = normal(9, 4, 8), normal(10, 4, 8)
    chain = [first] + ["linear:0.5:1.0"] * (links - 1)
    expected = x.astype(np.float64) + (b if first == "add:1" else 0.5)
    for _ in range(links - 1):
        expected = 0.5 * expected + 1
    tensors = [x, b] if first == "add:1" else [x]
    (found,) = run_onednn("FusedElementwise", list(tensors), post_ops=chain)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@needs_onednn
@pytest.mark.parametrize(("a", "b"), STRETCHES)
def test_a_chain_with_a_stretched_operand_goes_to_onednn(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, operand = normal(11, *a), normal(12, *b)
    (found,) = run_onednn("FusedElementwise", [x, operand], lanes=lanes_for(a, b), post_ops=["relu", "mul:1", "tanh"])
    expected = np.tanh(np.where(x > 0, x, 0).astype(np.float64) * operand)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def run_in_place(engine: str, links: list[str], x: Array, held: Array) -> Array:
    workspace = workspace_of({"x": x, "y": held})
    definition = operator_def("FusedElementwise", ["x", "y"], ["y"], post_ops=links, engine=engine)
    run_net(workspace, definition)
    return workspace.fetch_blob("y")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", [0, 1, 5, 31, 32, 40, 70])
@pytest.mark.parametrize("after", [0, 1, 33])
def test_what_the_output_holds_is_added_where_the_chain_says_so(engine: str, before: int, after: int) -> None:
    x, held = normal(13, 3, 40), normal(14, 3, 40)
    half = "linear:0.5:0.25"
    found = run_in_place(engine, [half] * before + ["sum:1"] + [half] * after, x, held)
    expected = x.astype(np.float64)
    for _ in range(before):
        expected = 0.5 * expected + 0.25
    expected = expected + held
    for _ in range(after):
        expected = 0.5 * expected + 0.25
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@needs_onednn
def test_a_chain_reads_and_writes_a_callers_memory() -> None:
    workspace = workspace_of({"x": normal(16, 4, 8)})
    definition = operator_def("FusedElementwise", ["x"], ["y"], post_ops=["tanh", "abs"], engine="ONEDNN")
    op = create_operator(definition, workspace)
    step = op.bind(op.infer())
    other, result = normal(17, 4, 8), np.empty((4, 8), np.float32)
    step.input_rebinds[0](other)
    step.output_rebinds[0](result)
    step()
    np.testing.assert_allclose(result, np.abs(np.tanh(other.astype(np.float64))), rtol=1e-5)


def test_an_operand_that_no_link_names_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="not named in post_ops"):
        run_operator("FusedElementwise", [normal(1, 3), normal(2, 3)], post_ops=["relu"])


def test_an_operand_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ShapeError, match="must broadcast to the result"):
        run_operator("FusedElementwise", [normal(1, 3), normal(2, 4)], post_ops=["add:1"])


@needs_onednn
@pytest.mark.parametrize(
    ("shape", "slope", "order"), [((2, 3, 5), 3, "NCHW"), ((2, 5, 3), 3, "NHWC"), ((4, 7), 1, "NCHW")]
)
def test_prelu_is_that_of_numpy(shape: tuple[int, ...], slope: int, order: str) -> None:
    x, slopes = normal(0, *shape), normal(1, slope)
    x.flat[:2] = np.nan, -np.inf
    (found,) = run_onednn("PRelu", [x, slopes], order=order, lanes=AVX2)
    np.testing.assert_array_equal(found, run_operator("PRelu", [x, slopes], order=order)[0])


@needs_onednn
@pytest.mark.parametrize("exponent", [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 4.0])
def test_powers_that_are_products_and_roots_are_those_of_numpy(exponent: float) -> None:
    x = np.abs(normal(0, 3, 13)) + np.float32(0.1)
    (found,) = run_onednn("Pow", [x], exponent=exponent, lanes=AVX2)
    np.testing.assert_allclose(found, x.astype(np.float64) ** exponent, rtol=3e-7)


@needs_onednn
def test_other_powers_are_left_to_numpy() -> None:
    x = np.abs(normal(0, 3, 13))
    for inputs, arguments in (([x], {"exponent": 1.7}), ([x, np.float32(2)], {}), ([x, x], {})):
        (found,), _ = run_fallback("Pow", list(inputs), **arguments)
        np.testing.assert_allclose(found, x.astype(np.float64) ** (inputs[1] if len(inputs) > 1 else 1.7), rtol=1e-6)
