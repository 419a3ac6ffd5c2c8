"""Convolutions of any kind without oneDNN: results in float64, bytes, what is no number, and a caller's arrays."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from dagexec.core.registry import create_operator
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn import lattices
from dagexec.ops.engines.onednn.binding import own_kernels
from dagexec.ops.engines.onednn.lattices import Line, transposed_lines
from dagexec.testing import run_operator
from tests.ops.onednn.engine import fallbacks, normal
from tests.ops.running import Array, computed, operator_def, workspace_of

pytestmark = pytest.mark.skipif(own_kernels() is None, reason="no kernels run here")

Case = tuple[str, list[Array], dict[str, Any]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN is as if it were absent."""
    monkeypatch.setattr("dagexec.ops.engines.onednn.operator.known_library", own_kernels)


def case(
    op_type: str,
    order: str,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    sizes: tuple[int, int, int] = (1, 3, 10),
    **arguments: Any,
) -> Case:
    """`sizes`: groups, and channels that each of them reads and writes."""
    groups, read, written = sizes
    filters = (groups * read, written) if op_type == "ConvTranspose" else (groups * written, read)
    image, weights = (3, groups * read, *size), (*filters, *kernel)
    if order == "NHWC":
        image, weights = ((first, *sizes, channels) for first, channels, *sizes in (image, weights))
    inputs = [normal(1, *image), normal(2, *weights), normal(3, groups * written)]
    if op_type == "FusedConv":
        arguments["bias"] = 1
    return op_type, inputs, {"kernels": list(kernel), "order": order, "group": groups} | arguments


RELU = {"post_ops": ["relu"]}
CASES: dict[str, Case] = {}
for _order in ("NHWC", "NCHW"):
    _own = {
        "three axes": ("FusedConv", (4, 5, 6), (3, 2, 3), (1, 5, 29), RELU | {"pads": [1, 0, 2, 1, 1, 0]}),
        "steps": ("Conv", (7, 5, 9), (1, 3, 3), (2, 4, 8), {"strides": [2, 1, 3], "dilations": [1, 2, 1]}),
        "groups of an axis": ("Conv", (11,), (4,), (3, 7, 12), {"pads": [2, 2]}),
        "groups of two": ("FusedConv", (6, 7), (3, 3), (2, 70, 27), RELU | {"pad": 1, "strides": [1, 2]}),
        "few of a group": ("Conv", (6, 7), (2, 2), (3, 2, 1), {"dilation": 2}),
        "functions behind": ("FusedConv", (9,), (3,), (2, 3, 11), {"post_ops": ["swish:1", "elu:1.5", "abs"]}),
        "windows that overlap": ("ConvTranspose", (5, 6), (3, 4), (1, 6, 25), {"stride": 2, "pad": 1}),
        "transposed groups": ("ConvTranspose", (7,), (5,), (3, 4, 5), {"stride": 3, "adj": 1, "dilation": 2}),
        "transposed, three axes": ("ConvTranspose", (2, 3, 4), (2, 2, 3), (1, 9, 8), {"strides": [2, 1, 2]}),
        "neighbors joined": ("ConvTranspose", (5, 6), (3, 4), (1, 6, 3), {"stride": 2, "pad": 1, "adj": 1}),
        "an axis joined": ("ConvTranspose", (7,), (6,), (1, 5, 1), {"stride": 3}),
        "gaps": ("ConvTranspose", (4, 3), (1, 2), (1, 3, 7), {"stride": 3, "adj": 1}),
    }
    CASES |= {f"{name} {_order}": case(one[0], _order, *one[1:4], **one[4]) for name, one in _own.items()}
CASES["NHWC to NCHW"] = case("FusedConv", "NHWC", (5, 4), (3, 2), (1, 6, 11), output_order="NCHW", **RELU)


def error(found: Array, exact: Array) -> float:
    """The largest, relative to the largest element of the result."""
    assert found.shape == exact.shape
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def named(inputs: list[Array]) -> dict[str, Array]:
    return {str(place): array for place, array in enumerate(inputs)}


@pytest.mark.parametrize("constant", ["12", ""], ids=["constant", "fed"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_their_bytes(name: str, constant: str) -> None:
    op_type, inputs, arguments = CASES[name]
    with fallbacks() as reasons:
        one, three = (
            computed(op_type, named(inputs), ["y"], constant, pieces=pieces, **arguments)[0] for pieces in (1, 3)
        )
        last = computed(op_type, named([inputs[0][2:], *inputs[1:]]), ["y"], constant, **arguments)[0]
    assert not reasons
    [expected] = run_operator(op_type, [array.astype(np.float64) for array in inputs], **arguments)
    assert error(one, expected) < 2e-6
    assert one.tobytes() == three.tobytes()
    assert one[2:].tobytes() == last.tobytes()


@pytest.mark.parametrize("name", [name for name in CASES if "pad" not in " ".join(CASES[name][2])])
def test_what_is_no_number_stays_none_and_reaches_what_reads_it(name: str) -> None:
    op_type, inputs, arguments = CASES[name]
    x = inputs[0].copy()
    x.reshape(-1)[[3, 40]] = np.nan, np.inf
    [found] = computed(op_type, named([x, *inputs[1:]]), ["y"], "12", **arguments)
    [expected] = run_operator(op_type, [array.astype(np.float64) for array in (x, *inputs[1:])], **arguments)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert np.isnan(found).any()


@pytest.mark.parametrize(
    ("post_ops", "order"), [*product((["sum:3", "relu"], ["relu", "add:3"], ["mul:3"]), ("NHWC", "NCHW"))]
)
def test_another_tensor(post_ops: list[str], order: str) -> None:
    op_type, inputs, arguments = case("FusedConv", order, (3, 4, 5), (1, 3, 1), (2, 3, 9), post_ops=post_ops)
    plain = [text.replace("sum", "add") for text in post_ops]
    before = computed("Conv", named(inputs), ["y"], "12", kernels=arguments["kernels"], order=order, group=2)
    other = normal(4, *before[0].shape)
    exact = [array.astype(np.float64) for array in (*inputs, other)]
    [expected] = run_operator(op_type, exact, **arguments | {"post_ops": plain})
    result = "3" if "sum:3" in post_ops else "y"
    with fallbacks() as reasons:
        [found] = computed(op_type, named([*inputs, other]), [result], "12", pieces=3, **arguments)
    assert not reasons
    assert error(found, expected) < 2e-6


@pytest.mark.parametrize(
    "name",
    [
        "three axes NHWC",
        "groups of two NCHW",
        "transposed groups NCHW",
        "gaps NHWC",
        "neighbors joined NCHW",
        "an axis joined NHWC",
    ],
)
def test_a_step_works_on_a_callers_arrays(name: str) -> None:
    op_type, inputs, arguments = CASES[name]
    workspace = workspace_of(named(inputs).items())
    for parameter in "12":
        workspace.get_blob(parameter).tensor().freeze()
    operator = create_operator(operator_def(op_type, ["0", "1", "2"], ["y"], engine="ONEDNN", **arguments), workspace)
    prepared = operator.bind(operator.infer())
    prepared.step()
    own = workspace.fetch_blob("y")
    x = normal(7, *inputs[0].shape)
    y = np.full_like(own, np.nan)
    prepared.input_rebinds[0](x)
    prepared.output_rebinds[0](y)
    prepared.step()
    [expected] = computed(op_type, named([x, *inputs[1:]]), ["y"], "12", **arguments)
    assert y.tobytes() == expected.tobytes()
    assert workspace.fetch_blob("y").tobytes() == own.tobytes()


def test_constant_filters_are_packed_once_and_can_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.core.constant.MIN_BYTES", 1)
    for name in ("three axes NCHW", "windows that overlap NHWC", "transposed groups NHWC", "neighbors joined NHWC"):
        op_type, inputs, arguments = CASES[name]
        workspace = workspace_of(named(inputs).items())
        tensor = workspace.get_blob("1").tensor()
        tensor.freeze()
        operator = create_operator(
            operator_def(op_type, ["0", "1", "2"], ["y"], engine="ONEDNN", **arguments), workspace
        )
        for _ in range(2):
            operator.bind(operator.infer())
        constant = tensor.constant
        assert constant is not None
        assert len(constant.forms()) == 1, name
        np.testing.assert_array_equal(constant.made_anew(), inputs[1])


def test_rows_are_cut_where_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And taken some at a time where the second cache has no room for more."""
    names = ("three axes NHWC", "groups of an axis NCHW", "windows that overlap NHWC")

    def found() -> list[bytes]:
        ran = (computed(CASES[name][0], named(CASES[name][1]), ["y"], "12", **CASES[name][2]) for name in names)
        return [y.tobytes() for [y] in ran]

    whole = found()
    monkeypatch.setattr(lattices, "_LONGEST", 4)
    monkeypatch.setattr(lattices, "core_cache", lambda: 1 << 10)
    assert found() == whole


def test_lines_are_what_a_transposed_axis_adds_up() -> None:
    for kernel, stride, dilation, head, out in product((1, 2, 3, 5), (1, 2, 3, 4), (1, 2, 3), (0, 1, 3), (1, 4)):
        size = (out - 1) * stride + dilation * (kernel - 1) + 1 - head
        if size <= 0:
            continue
        axis = Axis(size, kernel, stride, dilation, head, 0, out)
        expected = {
            (place * stride + tap * dilation - head, place, tap) for place in range(out) for tap in range(kernel)
        }
        found = set().union(*map(_reads, transposed_lines(axis)))
        assert {one for one in found if 0 <= one[1] < out} == {one for one in expected if 0 <= one[0] < size}


def _reads(line: Line) -> set[tuple[int, int, int]]:
    """Each result, a pixel that it reads, and the tap."""
    return {
        (line.first + number * line.step, line.pixel + number * line.stride + place * line.apart, tap)
        for number in range(line.count)
        for place, tap in enumerate(line.taps)
    }
