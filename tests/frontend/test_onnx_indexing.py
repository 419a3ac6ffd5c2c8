"""Operators that pick, put, count and order elements, against onnxruntime on random shapes, types and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto

import dagexec
from dagexec.errors import DagexecError
from dagexec.frontend.onnx import from_model_proto
from tests.frontend.test_onnx_operators import Case, Const, build

Array = np.ndarray
Draw = Callable[[np.random.Generator], Case]

TYPES = (np.float32, np.float64, np.int32, np.int64, np.bool_, np.uint8, np.float16)


def tensor(rng: np.random.Generator, rank: int | None = None, types: tuple[Any, ...] = TYPES) -> Array:
    """A tensor of 1 to 4 axes, of numbers in whole steps, so that some are equal and sums are exact."""
    shape = rng.integers(1, 5, rng.integers(1, 5) if rank is None else rank)
    return rng.integers(-9, 10, shape).astype(rng.choice(np.array(types, object)))


def axis_of(rng: np.random.Generator, x: Array) -> int:
    return int(rng.integers(-x.ndim, x.ndim))


def given(rng: np.random.Generator, value: Any) -> Any:
    """A constant of the model or an input of the run."""
    return Const(value) if rng.random() < 0.5 else value


def element_indices(rng: np.random.Generator, x: Array, axis: int, count: int) -> Array:
    shape = list(x.shape)
    shape[axis] = count
    return rng.integers(-x.shape[axis], x.shape[axis], shape)


def gather_elements(rng: np.random.Generator) -> Case:
    x = tensor(rng)
    axis = axis_of(rng, x)
    indices = element_indices(rng, x, axis, int(rng.integers(0, 6))).astype(rng.choice([np.int32, np.int64]))
    return Case("GatherElements", 13, (x, given(rng, indices)), {"axis": axis})


def scatter_elements(rng: np.random.Generator) -> Case:
    reduction = str(rng.choice(["none", "add", "mul", "max", "min"]))
    x = tensor(rng, None, TYPES if reduction == "none" else (np.float32, np.int32, np.int64))
    axis = axis_of(rng, x)
    indices = element_indices(rng, x, axis, int(rng.integers(1, 6)))
    if reduction == "none":  # which of several values stays, ONNX does not say
        indices = np.argsort(rng.random(x.shape), axis=axis)
    updates = rng.integers(-3, 4, indices.shape).astype(x.dtype)
    return Case("ScatterElements", 18, (x, indices, updates), {"axis": axis, "reduction": reduction})


def gather_nd(rng: np.random.Generator) -> Case:
    x = tensor(rng)
    batch = int(rng.integers(0, x.ndim))
    count = int(rng.integers(1, x.ndim - batch + 1))
    more = rng.integers(1, 4, rng.integers(0, 3))
    sizes = x.shape[batch : batch + count]
    vectors = [rng.integers(-size, size, (*x.shape[:batch], *more)) for size in sizes]
    return Case("GatherND", 13, (x, given(rng, np.stack(vectors, axis=-1))), {"batch_dims": batch})


def scatter_nd(rng: np.random.Generator) -> Case:
    reduction = str(rng.choice(["none", "add", "mul", "max", "min"]))
    x = tensor(rng, None, TYPES if reduction == "none" else (np.float32, np.int32, np.int64))
    count = int(rng.integers(1, x.ndim + 1))
    places = rng.permutation(int(np.prod(x.shape[:count])))[: rng.integers(1, 5)]
    if reduction != "none":
        places = np.concatenate([places, places])
    indices = np.stack(np.unravel_index(places, x.shape[:count]), axis=-1)
    indices = np.where(rng.random(indices.shape) < 0.3, indices - x.shape[:count], indices)
    updates = rng.integers(-3, 4, (len(places), *x.shape[count:])).astype(x.dtype)
    return Case("ScatterND", 18, (x, indices, updates), {"reduction": reduction})


def top_k(rng: np.random.Generator) -> Case:
    x = tensor(rng, None, (np.float32, np.float64, np.int32, np.int64, np.float16))
    if rng.random() < 0.5:  # long enough for a choice without sorting all
        x = rng.integers(-99, 100, (2, 2100)).astype(x.dtype)
    axis = axis_of(rng, x)
    k = rng.integers(1, min(8, x.shape[axis]) + 1, 1)
    attributes = {"axis": axis, "largest": int(rng.integers(0, 2)), "sorted": 1}
    return Case("TopK", 11, (x, given(rng, k)), attributes, outputs=2)


def one_hot(rng: np.random.Generator) -> Case:
    """onnxruntime has it for few types."""
    indices = tensor(rng, None, (np.int64,))
    values = rng.integers(-9, 9, 2).astype(rng.choice(np.array([np.float32, np.int64], object)))
    depth = given(rng, np.array(int(rng.integers(1, 7))))
    return Case(
        "OneHot", 11, (indices, depth, values), {"axis": int(rng.integers(-indices.ndim - 1, indices.ndim + 1))}
    )


def non_zero(rng: np.random.Generator) -> Case:
    return Case("NonZero", 13, (tensor(rng, None, (np.float32, np.int32, np.int64, np.bool_, np.uint8)) % 3,))


def compress(rng: np.random.Generator) -> Case:
    x = tensor(rng)
    axis = axis_of(rng, x)
    condition = rng.random(rng.integers(1, x.shape[axis] + 1)) < 0.5
    return Case("Compress", 11, (x, given(rng, condition)), {"axis": axis} if rng.random() < 0.7 else {})


def unique(rng: np.random.Generator) -> Case:
    x = tensor(rng, None, (np.float32, np.int64, np.int8, np.float64))
    x = np.concatenate([x, x % 2])
    attributes = {"sorted": int(rng.integers(0, 2))} | ({"axis": axis_of(rng, x)} if rng.random() < 0.7 else {})
    return Case("Unique", 11, (x,), attributes, outputs=4)


def cum_sum(rng: np.random.Generator) -> Case:
    x = tensor(rng, None, (np.float32, np.float64, np.int32, np.int64))
    axis = given(rng, np.array(axis_of(rng, x), np.int32))
    attributes = {name: int(rng.integers(0, 2)) for name in ("exclusive", "reverse")}
    return Case("CumSum", 14, (x, axis), attributes)


def trilu(rng: np.random.Generator) -> Case:
    x = tensor(rng, int(rng.integers(2, 5)), (np.float32, np.int64, np.float64, np.bool_))
    diagonal = given(rng, np.array(int(rng.integers(-6, 7))))
    return Case("Trilu", 14, (x, diagonal), {"upper": int(rng.integers(0, 2))})


def eye_like(rng: np.random.Generator) -> Case:
    dtype = {"dtype": int(rng.choice([TensorProto.DOUBLE, TensorProto.INT64]))} if rng.random() < 0.5 else {}
    x = tensor(rng, 2, (np.float32, np.int64, np.int32))
    return Case("EyeLike", 9, (x,), {"k": int(rng.integers(-5, 6)), **dtype})


DRAWS: list[Draw] = [
    gather_elements, scatter_elements, gather_nd, scatter_nd, top_k, one_hot, non_zero, compress, unique, cum_sum,
    trilu, eye_like,
]  # fmt: skip


def computed(proto: ModelProto, feeds: dict[str, Array]) -> list[Array]:
    with dagexec.compile(from_model_proto(proto), net_type="simple", optimize=False) as executor:
        return list(executor.run(feeds).values())


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_random_nodes_compute_what_onnxruntime_computes(draw: Draw) -> None:
    rng = np.random.default_rng(18)
    for _ in range(10):
        case = draw(rng)
        proto, feeds = build(case)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        expected = session.run(None, feeds)
        for ours, theirs in zip(computed(proto, feeds), expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), case
            np.testing.assert_array_equal(ours, theirs, str(case))


X = np.arange(12, dtype=np.float32).reshape(3, 4)
OUTSIDE = [
    (Case("GatherElements", 13, (X, np.array([[0, 3]]))), r"index 3 at place 1 must be in \[-3, 3\)"),
    (Case("ScatterElements", 18, (X, np.array([[0, -4]]), X[:1, :2])), r"index -4 at place 1 must be in \[-3, 3\)"),
    (Case("GatherND", 13, (X, np.array([[0, 1], [1, 4]]))), r"index 4 at place 1 must be in \[-4, 4\)"),
    (Case("ScatterND", 18, (X, np.array([[7]]), X[:1])), r"index 7 at place 0 must be in \[-3, 3\)"),
    (Case("GatherND", 13, (X, np.array([[0, 1, 2]]))), "last axis of INDICES must have 1 to 2 elements, found 3"),
    (Case("ScatterND", 18, (X, np.array([[1]]), X[:, :1])), r"must have shape \(1, 4\)"),
    (Case("GatherElements", 13, (X, np.zeros((1, 5), np.int64))), "at most of the sizes"),
    (Case("TopK", 11, (X, np.array([5])), {"axis": 1}, outputs=2), r"'k' must be one number in \[0, 4\]"),
    (Case("OneHot", 11, (X, np.array(-1), X[0, :2])), "the depth must be at least 0, found -1"),
    (Case("Compress", 11, (X, np.ones(4, bool)), {"axis": 0}), "the condition is true at place 3, and there are 3"),
    (Case("CumSum", 14, (X, np.array(2))), r"the axis must be in \[-2, 1\], found 2"),
    (Case("Trilu", 14, (X[0],)), "at least 2 axes"),
]


@pytest.mark.parametrize(("case", "message"), OUTSIDE, ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_what_is_out_of_bounds_is_an_error_that_names_operator_and_place(case: Case, message: str) -> None:
    """And nothing is read or written there."""
    with pytest.raises(DagexecError, match=rf"(?s)(OneHotAxis|{case.op}) 'out0'.*{message}"):
        computed(*build(case))
