"""What all operators with a sliding window promise alike: three spellings, what they cost, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.registry import registered_operators, schema_of
from dagexec.devices.host import HostRuntime
from dagexec.errors import ArgumentError, DagexecError, ResourceError
from tests.ops.conv.test_conv import Named, cost_of
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Array, Geometry

CONVOLUTIONS = ("Conv", "ConvTranspose", "LC")
POOLINGS = ("MaxPool", "AveragePool", "LpPool", "MaxPoolWithIndex")
FORWARD = (*CONVOLUTIONS, *POOLINGS, "Im2Col", "Col2Im")
FAMILY = (*FORWARD, *(f"{name}Gradient" for name in (*CONVOLUTIONS, *POOLINGS)))
BATCH, CHANNELS, GROUP, FILTERS, SIZE = 2, 4, 2, 6, (9, 8)

ONE = Geometry(SIZE, (3, 3), (2, 2), (2, 2), (1, 1, 1, 1))
MIXED = Geometry(SIZE, (3, 2), (1, 2), (2, 1), (1, 0, 2, 1))
PLAIN = Geometry(SIZE, (3, 3), (1, 1), (1, 1), (0, 0, 0, 0))


OTHERS = {"FusedConv", "QuantConv", "ConvInteger", "AveragePoolFixedPoint"}
"""Those that are tested against Conv, or on integers."""


def test_the_family_is_complete() -> None:
    windowed = {name for name in registered_operators() if "kernels" in schema_of(name).args} - OTHERS
    assert {name for name in windowed if not any(f"{rank}D" in name for rank in (1, 2, 3))} == set(FAMILY)
    ranked = {name.replace(f"{rank}D", "") for rank in (1, 2, 3) for name in windowed if f"{rank}D" in name}
    assert ranked == set(FAMILY) - {"Im2Col", "Col2Im"}


def integers(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).integers(-4, 5, shape).astype(np.float32)


def outputs_of(op_type: str) -> int:
    return 3 if op_type in [f"{name}Gradient" for name in CONVOLUTIONS] else 2 if op_type == "MaxPoolWithIndex" else 1


def group_of(op_type: str) -> Named:
    return {"group": GROUP} if op_type.removesuffix("Gradient") in CONVOLUTIONS else {}


def inputs_of(op_type: str, geometry: Geometry) -> list[Array]:
    """Inputs of an operator with this window, in NCHW; those of a gradient come from its forward operator."""
    x, out = integers(BATCH, CHANNELS, *SIZE), [len(axis.taps) for axis in geometry.windows()]
    arguments = geometry.arguments()
    if op_type == "Conv":
        return [x, integers(FILTERS, CHANNELS // GROUP, *geometry.kernel)]
    if op_type == "ConvTranspose":
        return [x, integers(CHANNELS, FILTERS // GROUP, *geometry.kernel)]
    if op_type == "LC":
        return [x, integers(*out, FILTERS, CHANNELS // GROUP, *geometry.kernel)]
    if op_type == "Col2Im":
        return [run_operator("Im2Col", [x], **arguments)[0], x]
    if op_type in FORWARD:
        return [x]
    forward = op_type.removesuffix("Gradient")
    inputs = inputs_of(forward, geometry)
    found = run_operator(forward, list(inputs), outputs_of(forward), **arguments, **group_of(forward))
    gradient = integers(*found[0].shape)
    if forward in CONVOLUTIONS:
        return [*inputs, gradient]
    return [x, gradient, found[1]] if forward == "MaxPoolWithIndex" else [x, found[0], gradient]


def run(op_type: str, inputs: Sequence[Array], arguments: Named) -> list[bytes]:
    found = run_operator(op_type, list(inputs), outputs_of(op_type), **group_of(op_type), **arguments)
    return [array.tobytes() for array in found]


def pairs(name: str, values: Sequence[int]) -> Named:
    return {f"{name}_h": values[0], f"{name}_w": values[1]}


def spelled_by_letters(geometry: Geometry) -> Named:
    """The third spelling: one argument for each axis or side."""
    axes = pairs("kernel", geometry.kernel) | pairs("stride", geometry.stride) | pairs("dilation", geometry.dilation)
    return axes | dict(zip(["pad_t", "pad_l", "pad_b", "pad_r"], geometry.pads, strict=True))


@pytest.mark.parametrize("op_type", FAMILY)
def test_the_three_spellings_say_the_same(op_type: str) -> None:
    inputs = inputs_of(op_type, ONE)
    expected = run(op_type, inputs, ONE.arguments())
    assert run(op_type, inputs, {"kernel": 3, "stride": 2, "dilation": 2, "pad": 1}) == expected
    assert run(op_type, inputs, spelled_by_letters(ONE)) == expected
    inputs = inputs_of(op_type, MIXED)
    assert run(op_type, inputs, spelled_by_letters(MIXED)) == run(op_type, inputs, MIXED.arguments())


def operations(op_type: str, inputs: Sequence[Array], geometry: Geometry) -> int:
    """The operations of an operator, from the windows that are found by walking."""
    taps = math.prod(geometry.kernel)
    windows = math.prod(len(axis.taps) for axis in geometry.windows())
    products = 2 * BATCH * FILTERS * (CHANNELS // GROUP) * taps * windows
    transposed = 2 * BATCH * CHANNELS * (FILTERS // GROUP) * taps * math.prod(SIZE)
    pooled = BATCH * CHANNELS * windows * taps
    return {
        "Conv": products,
        "ConvGradient": 2 * products + BATCH * FILTERS * windows,
        "LC": products,
        "LCGradient": 2 * products + BATCH * FILTERS * windows,
        "ConvTranspose": transposed,
        "ConvTransposeGradient": 2 * transposed + inputs[-1].size,
        "Im2Col": 0,
        "Col2Im": pooled,
        "MaxPool": pooled,
        "AveragePool": pooled,
        "LpPool": 2 * pooled,
        "MaxPoolWithIndex": 2 * pooled,
        "MaxPoolGradient": 2 * pooled,
        "AveragePoolGradient": pooled,
        "LpPoolGradient": 2 * pooled,
        "MaxPoolWithIndexGradient": pooled,
    }[op_type]


@pytest.mark.parametrize("geometry", [PLAIN, ONE, MIXED], ids=["plain", "one", "mixed"])
@pytest.mark.parametrize("op_type", sorted(set(FAMILY) - {"MaxPoolWithIndexGradient"}))
def test_the_cost_counts_the_windows_that_there_are_once_for_each_group(op_type: str, geometry: Geometry) -> None:
    """Dilation is no stride, and the channels of other groups take no part."""
    inputs = inputs_of(op_type, geometry)
    shapes = tuple(array.shape for array in inputs)
    found = cost_of(shapes, op_type, outputs_of(op_type), **geometry.arguments(), **group_of(op_type))
    assert found.flops == operations(op_type, inputs, geometry)


HUGE = (1 << 31) - 1
REFUSED: dict[str, tuple[Named, str]] = {
    "kernel": ({"kernel": 10}, "kernel 10 .*10 pixels.* 9 [+] 0 [+] 0"),
    "dilated kernel": ({"kernel": 3, "dilation": 5}, "kernel 3 with dilation 5 spans 11 pixels.* 9 [+] 0 [+] 0"),
    "zero stride": ({"kernel": 3, "stride": 0}, r"strides must be at least 1 .*found \[0, 0\]"),
    "zero dilation": ({"kernel": 3, "dilations": [1, 0]}, r"dilations must be at least 1 .*found \[1, 0\]"),
    "zero kernel": ({"kernels": [3, 0]}, r"kernels must be at least 1 .*found \[3, 0\]"),
    "negative pad": ({"kernel": 3, "pad": -1}, r"pads must be at least 0 .*found \[-1, -1, -1, -1\]"),
    "huge kernel": ({"kernel": 1 << 40}, "kernels must be .*1099511627776"),
    "huge extent": ({"kernel": HUGE, "dilation": HUGE}, f"spans {(HUGE - 1) * HUGE + 1} pixels"),
    "pads of three": ({"kernel": 3, "pads": [1, 1, 1]}, r"pads needs 4 entries .*found \[1, 1, 1\]"),
    "two forms": ({"kernel": 3, "stride": 1, "strides": [1, 1]}, "'strides', 'stride'.* mean the same"),
}
TOO_LARGE = ("kernel", "dilated kernel", "huge extent")  # no window of a transposed convolution is


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op_type", "bad"),
    [(name, bad) for name in FAMILY for bad in REFUSED if bad not in TOO_LARGE or "Transpose" not in name],
)
def test_bad_windows_are_refused_with_the_numbers_before_anything_is_allocated(op_type: str, bad: str) -> None:
    arguments, message = REFUSED[bad]
    refuse(op_type, inputs_of(op_type, PLAIN), arguments | group_of(op_type), ArgumentError, message)


def refuse(op_type: str, inputs: Sequence[Array], arguments: Named, error: type[DagexecError], message: str) -> None:
    """Run the operator, which must raise `error` without any allocation."""
    workspace = Workspace()
    names = [f"x{index}" for index in range(len(inputs))]
    for name, array in zip(names, inputs, strict=True):
        workspace.feed_blob(name, array)
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs_of(op_type))], **arguments)
    allocated = AssertionError("something was allocated before")
    with (
        patch.object(HostRuntime, "allocate", side_effect=allocated),
        pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"),
    ):
        workspace.run_operator_once(definition)


SHAPES_OF_HUGE: dict[str, list[tuple[int, ...]]] = {
    "Conv": [(1, 1, 9, 8), (1, 1, 3, 3)],
    "LC": [(1, 1, 9, 8), (1, 1, 1, 1, 3, 3)],
    "Im2Col": [(1, 1, 9, 8)],
    "ConvTranspose": [(1, 1, 9, 8), (1, 1, 3, 3)],
}


@pytest.mark.parametrize(("op_type", "shapes"), SHAPES_OF_HUGE.items(), ids=SHAPES_OF_HUGE)
def test_sizes_that_no_machine_holds_are_refused_with_the_numbers(op_type: str, shapes: list[tuple[int, ...]]) -> None:
    wide = {"stride": HUGE} if op_type == "ConvTranspose" else {"pad": HUGE}
    inputs = [np.zeros(shape, np.float32) for shape in shapes]
    refuse(op_type, inputs, {"kernel": 3, **wide}, DagexecError, "429496730[01]|171798691[0-9][0-9]")


@pytest.mark.parametrize("op_type", [name for name in FAMILY if name.removesuffix("Gradient") in CONVOLUTIONS])
@pytest.mark.parametrize("group", [0, -1, 3])
def test_a_group_that_does_not_divide_the_channels_is_refused_with_both(op_type: str, group: int) -> None:
    refuse(op_type, inputs_of(op_type, PLAIN), {"kernel": 3, "group": group}, ArgumentError,
           f"group must divide the 4 input channels, found {group}")  # fmt: skip


@pytest.mark.parametrize("op_type", [name for name in FAMILY if name.removesuffix("Gradient") in CONVOLUTIONS])
def test_a_filter_of_another_rank_is_refused_with_both(op_type: str) -> None:
    x, weights, *rest = inputs_of(op_type, PLAIN)
    refuse(op_type, [x, weights[0], *rest], {"kernel": 3, "group": GROUP}, DagexecError,
           f"'x1' must have .*found ({weights.ndim - 1}|.{str(weights[0].shape)[1:-1]}.)")  # fmt: skip


@pytest.mark.parametrize("op_type", POOLINGS)
def test_padding_that_no_machine_holds_is_refused_with_the_numbers(op_type: str) -> None:
    """The output has one pixel or a few, but the image under the window would have 2^62."""
    wide: Named = {"kernel": HUGE, "pad": HUGE - 1, "stride": HUGE}
    with pytest.raises(ResourceError, match=rf"(?s){op_type} 'y0'.*needs \d{{2}}(,\d{{3}}){{6}} bytes"):
        run_operator(op_type, [np.zeros((1, 1, 9, 8), np.float32)], outputs_of(op_type), **wide)
