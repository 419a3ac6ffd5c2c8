"""Element-wise operators on the types that ONNX lists, and attributes of their newest versions, against other code.

That is onnxruntime, or the reference implementation of the onnx package for what onnxruntime has not.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import dagexec
from dagexec.errors import DagexecError
from dagexec.frontend.onnx import from_model_proto
from tests.frontend.test_onnx_operators import Case, Const, build

Array = np.ndarray

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64)
FLOATS = (np.float16, np.float32, np.float64)
TEXTS = np.array(["b", "a", "", "b"], object)
RNG = np.random.default_rng(9)


def numbers(dtype: Any, *shape: int) -> Array:
    """Whole numbers, of both signs where the type has them."""
    found = RNG.integers(-9, 10, shape)
    return (np.abs(found) if np.dtype(dtype).kind == "u" else found).astype(dtype)


def pair(dtype: Any) -> tuple[Array, Array]:
    """Two operands that broadcast, the second without zeros."""
    divisor = numbers(dtype, 1, 4)
    return numbers(dtype, 3, 4), np.where(divisor == 0, 3, divisor).astype(dtype)


TIES = np.array([[2, 5, 5, 1], [7, 7, 7, 7], [0, -1, -1, 0]], np.float32)
LIMITS = np.array([np.inf, -np.inf, np.nan, 1, -0.0], np.float32)
LENGTHS = Const(np.array([2, 4, 1]))

BY_ONNXRUNTIME = [
    *(Case(op, 13, pair(kind)) for kind in (np.int32, np.int64, np.float64) for op in ("Div", "Equal", "Less", "Max")),
    *(Case("Mod", 13, pair(kind)) for kind in INTEGERS),
    *(Case("Mod", 13, pair(kind), {"fmod": 1}) for kind in (*INTEGERS, *FLOATS)),
    *(Case(op, 13, (numbers(kind, 5),)) for kind in (*INTEGERS, *FLOATS) for op in ("Sign", "Abs")),
    *(Case(op, 18, pair(kind)) for kind in INTEGERS for op in ("BitwiseAnd", "BitwiseXor")),
    *(Case("BitShift", 11, (pair(np.uint8)), {"direction": way}) for way in ("LEFT", "RIGHT")),
    *(Case("Pow", 15, (numbers(x, 4), abs(numbers(y, 4)))) for x in (np.int32, np.int64) for y in (x, np.float32)),
    Case("Pow", 15, (np.array([1, -1, 2, -3]), np.array([-2, -3, -1, -2]))),
    Case("Pow", 15, (np.array([2, 9, 3]), np.array([0.5, 0.5, 2.5], np.float32))),
    Case("Where", 16, (np.array([True, False, True, False]), TEXTS, TEXTS[::-1])),
    Case("Where", 16, (np.array([True, False, True, False]), *pair(np.uint8))),
    Case("Equal", 19, (TEXTS, TEXTS[::-1])),
    Case("Transpose", 13, (TEXTS.reshape(2, 2),)),
    Case("Gather", 13, (TEXTS, np.array([-1, 1]))),
    Case("Concat", 13, (TEXTS, TEXTS[:1]), {"axis": 0}),
    *(Case("IsInf", 10, (LIMITS,), {f"detect_{sign}": 0}) for sign in ("negative", "positive")),
    Case("IsInf", 20, (LIMITS,)),
    Case("IsInf", 20, (LIMITS,), {"detect_negative": 0, "detect_positive": 0}),
    *(Case(op, 13, (TIES,), {"axis": axis, "select_last_index": 1}) for op in ("ArgMax", "ArgMin") for axis in (0, 1)),
    Case("ArgMax", 13, (TIES.astype(np.int32),), {"axis": -1, "select_last_index": 1, "keepdims": 0}),
    Case("Hardmax", 13, (TIES,), {"axis": 0}),
    Case("Hardmax", 11, (numbers(np.float32, 2, 3, 2),), {"axis": 1}),
    Case("Det", 11, (numbers(np.float32, 2, 3, 3),)),
    *(Case("Shrink", 9, (numbers(kind, 9),), {"lambd": 2.5, "bias": 1.5}) for kind in (np.int32, np.float32)),
    Case("ReverseSequence", 10, (numbers(np.int64, 4, 3, 2), LENGTHS)),
    Case("ReverseSequence", 10, (numbers(np.float32, 3, 5), LENGTHS), {"time_axis": 1, "batch_axis": 0}),
    Case("CenterCropPad", 18, (numbers(np.float32, 5, 4, 3), Const(np.array([2, 7, 3])))),
    Case("CenterCropPad", 18, (numbers(np.float32, 5, 4), np.array([8])), {"axes": [-1]}),
]  # fmt: skip

WORDS = np.array(["Monday", "tuesday", "\u00c4RGER", "MONDAY", ""], object)
BY_ONNXRUNTIME += [
    Case("StringConcat", 20, (WORDS, WORDS[:1])),
    Case("StringConcat", 20, (np.array("a", object), np.array("b", object))),
    Case("StringSplit", 20, (np.array([["a b  c", " d "], ["", "e"]], object),), outputs=2),
    Case("StringSplit", 20, (np.array(["a,b,,c", ","], object),), {"delimiter": ",", "maxsplit": 2}, outputs=2),
    Case("StringNormalizer", 10, (WORDS[None],), {"stopwords": ["MONDAY"], "is_case_sensitive": 1}),
]

SHIFTS = np.array([1, 7, 8, 100, -1], np.int8)
SIGNED = np.array([[5], [-5], [127]], np.int8)
BY_THE_REFERENCE = [
    *(Case("Mod", 28, pair(kind)) for kind in FLOATS),
    *(Case("BitShift", 28, (SIGNED, SHIFTS), {"direction": way}) for way in ("LEFT", "RIGHT")),
    Case("Swish", 24, (numbers(np.float32, 9),), {"alpha": 0.5}),
    Case("Swish", 24, (numbers(np.float64, 9),), {"alpha": -2.0}),
    Case("SwiGLU", 28, (numbers(np.float32, 2, 3), numbers(np.float32, 2, 3)), {"alpha": 1.5}),
    Case("BitCast", 26, (numbers(np.float32, 2, 3),), {"to": TensorProto.INT32}),
    Case("BitCast", 26, (numbers(ml_dtypes.bfloat16, 3),), {"to": TensorProto.INT16}),
    Case("CumProd", 26, (numbers(np.float32, 3, 4), np.array(1, np.int32)), {"exclusive": 1, "reverse": 1}),
    Case("TensorScatter", 24, (numbers(np.float32, 2, 5, 3), numbers(np.float32, 2, 2, 3), np.array([3, 0]))),
    Case(
        "TensorScatter",
        24,
        (numbers(np.int64, 2, 3, 4), numbers(np.int64, 2, 3, 3), np.array([9, 0])),
        {"mode": "circular", "axis": 2},
    ),
]


def computed(case: Case) -> list[Any]:
    proto, feeds = build(case)
    with dagexec.compile(from_model_proto(proto), net_type="simple", optimize=False) as executor:
        return list(executor.run(feeds).values())


def check(case: Case, expected: list[Any]) -> None:
    for ours, theirs in zip(computed(case), expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if ours.dtype.kind == "f":
            np.testing.assert_allclose(ours, theirs, rtol=1e-3 if ours.dtype == np.float16 else 1e-6, atol=1e-6)
        else:
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("case", BY_ONNXRUNTIME, ids=lambda case: f"{case}-{case.inputs[0].dtype}")
def test_a_type_is_computed_as_onnxruntime_computes_it(case: Case) -> None:
    proto, feeds = build(case)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    check(case, session.run(None, feeds))


@pytest.mark.parametrize("case", BY_THE_REFERENCE, ids=lambda case: f"{case}-{case.inputs[0].dtype}")
def test_what_onnxruntime_has_not_is_computed_as_the_reference_says(case: Case) -> None:
    proto, feeds = build(case)
    check(case, ReferenceEvaluator(proto).run(None, feeds))


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"stopwords": ["monday"]}, ["tuesday", "\u00c4RGER", ""]),
        ({"stopwords": ["MONDAY", ""], "case_change_action": "LOWER"}, ["tuesday", "\u00e4rger"]),
        ({"case_change_action": "UPPER", "is_case_sensitive": 1}, ["MONDAY", "TUESDAY", "\u00c4RGER", "MONDAY", ""]),
        ({"stopwords": ["monday", "tuesday", "\u00e4rger", ""]}, [""]),
    ],
)
def test_words_are_left_out_and_change_their_case(attributes: dict[str, Any], expected: list[str]) -> None:
    """onnxruntime needs a locale for this, which a machine may not have."""
    [found] = computed(Case("StringNormalizer", 10, (WORDS,), attributes))
    assert found.tolist() == expected


REFUSED = [
    (Case("ReverseSequence", 10, (TIES.T, np.array([1, 5, 0]))), r"index 5 at place 1 must be in \[0, 5\)"),
    (Case("TensorScatter", 24, (TIES[None], TIES[None, :2], np.array([2]))), r"index 2 at place 0 must be in \[0, 2\)"),
    (Case("TensorScatter", 24, (TIES[None, :2], TIES[None])), "the update has 3 steps, and the cache 2"),
    (Case("CenterCropPad", 18, (TIES, np.array([1, -1]))), r"a size of at least 0 for each of 2 axes, found \[1, -1\]"),
    (Case("BitCast", 26, (TIES,), {"to": TensorProto.INT64}), "the bits of float32 are none of int64"),
    (Case("Det", 11, (TIES,)), "must be square matrices"),
    (Case("StringNormalizer", 10, (TEXTS.reshape(2, 2),)), "X must be a vector or have one row"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=lambda value: value.op if isinstance(value, Case) else "")
def test_what_makes_no_sense_is_an_error_that_names_operator_and_value(case: Case, message: str) -> None:
    with pytest.raises(DagexecError, match=rf"(?s){case.op} 'out0'.*{message}"):
        computed(case)
