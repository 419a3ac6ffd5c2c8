"""What operators say of themselves is true of what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.node import new_node
from dagexec.core.registry import is_registered, registered_operators, schema_of
from dagexec.core.schema import UNBOUNDED
from dagexec.ops.families.activation.post_ops import BINARY, FUNCTIONS, PostOp, as_post_ops
from tests.ops.running import Array, computed

ARGUMENTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "Clip": ({}, {"min": -0.5}, {"max": 1.0}, {"min": -0.5, "max": 1.0}),
    "Dropout": ({"is_test": 1}, {"is_test": 0}),
    "Elu": (
        {},
        {"alpha": 0.3},
    ),
    "FusedElementwise": ({"post_ops": ["relu", "mish"]},),
    "Gelu": (
        {},
        {"fast_gelu": 1},
    ),
    "HardSigmoid": (
        {},
        {"alpha": 0.3, "beta": 0.25},
    ),
    "LeakyRelu": (
        {},
        {"alpha": 0.3},
    ),
    "Pow": ({"exponent": 0.5}, {"exponent": 2.0}, {"exponent": -1.5}),
    "ReluN": (
        {},
        {"n": 1.5},
    ),
    "Selu": (
        {},
        {"alpha": 1.5, "scale": 1.25},
    ),
}
X = np.concatenate([-np.geomspace(0.01, 9, 23), [0.0], np.geomspace(0.01, 9, 23)])


def _calls() -> Iterator[Any]:
    """Each operator that may be post-ops, with each number of inputs up to 3, and arguments."""
    for name in registered_operators():
        schema = schema_of(name)
        if schema.post_ops is None:
            continue
        counts = range(schema.inputs[0], 4 if schema.inputs[1] == UNBOUNDED else schema.inputs[0] + 1)
        for count, arguments in itertools.product(counts, ARGUMENTS.get(name, ({},))):
            yield pytest.param(name, count, arguments, id=f"{name}-{count}-{arguments}")


@pytest.mark.parametrize(("name", "count", "arguments"), list(_calls()))
def test_an_operator_computes_what_it_says_that_it_is_as_post_ops(
    name: str, count: int, arguments: dict[str, Any]
) -> None:
    """In float64, by NumPy."""
    arrays = {f"x{index}": np.roll(X, 7 * index)[None] for index in range(count)}
    post_ops = as_post_ops(new_node(name, list(arrays), ["y"], **arguments), FLOAT64)
    if post_ops is None:
        return
    entries = [str(post_op) for post_op in post_ops]
    with np.errstate(all="ignore"):
        [expected] = computed("FusedElementwise", arrays, ["y"], engine="", post_ops=entries)
        [got] = computed(name, arrays, ["y"], engine="", **arguments)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("arguments", [{"min": 2.0, "max": 1.0}, {"min": "a"}])
def test_an_operator_whose_arguments_make_no_sense_is_no_post_op(arguments: dict[str, Any]) -> None:
    """It is the operator that refuses them, when it is made."""
    assert as_post_ops(new_node("Clip", ["x"], ["y"], **arguments)) is None


def test_a_clip_has_the_limits_of_its_type() -> None:
    """As the operator, so that infinity becomes the greatest finite number."""
    [clip] = as_post_ops(new_node("Clip", ["x"], ["y"], min=1.0), FLOAT32) or []
    assert clip == PostOp("clip", 1.0, float(np.finfo(np.float32).max))


def _post_op(kind: str) -> PostOp:
    return PostOp(kind, *(0.5, 3.0)[: FUNCTIONS[kind].numbers])


def _applied(post_op: PostOp, x: Array) -> Array:
    with np.errstate(all="ignore"):
        [result] = computed("FusedElementwise", {"x": x}, ["y"], engine="", post_ops=[str(post_op)])
    return result


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_post_op_is_positive_when_nothing_below_zero_comes_out_of_it(kind: str) -> None:
    """What is computed from numbers of both signs and far from zero; what is NaN says nothing."""
    x = np.concatenate([X, 1e3 * X])
    least = np.nanmin(_applied(_post_op(kind), x))
    assert _post_op(kind).is_positive == (least >= 0)


@pytest.mark.parametrize(("kind", "finite"), [("div", False), *((kind, True) for kind in BINARY if kind != "div")])
def test_a_binary_post_op_makes_something_finite_of_zeros_unless_it_divides(kind: str, finite: bool) -> None:
    """0 / 0 is NaN."""
    assert PostOp(kind, input=1).is_finite_at_zero == finite


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_post_op_that_is_finite_at_zero_makes_something_finite_of_zeros(kind: str) -> None:
    """A power may have an exponent below zero."""
    post_op = PostOp("pow", 1.0, -1.0) if kind == "pow" else _post_op(kind)
    assert post_op.is_finite_at_zero == np.isfinite(_applied(post_op, np.zeros(1))).all()


@pytest.mark.parametrize("name", [name for name in registered_operators() if schema_of(name).fused])
def test_the_operator_that_a_layer_is_fused_to_takes_post_ops(name: str) -> None:
    """And operands of theirs."""
    fused = schema_of(name).fused
    assert is_registered(fused)
    assert "post_ops" in schema_of(fused).args
    assert schema_of(fused).inputs[1] == UNBOUNDED


@pytest.mark.parametrize("name", [name for name in registered_operators() if schema_of(name).results])
def test_outputs_behind_the_results_may_be_left_out(name: str) -> None:
    """And there are some."""
    schema = schema_of(name)
    assert schema.outputs[0] <= schema.results < schema.outputs[1]
