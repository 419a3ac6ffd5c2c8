"""Loops whose values grow: equal to onnxruntime, to the byte what each size gives alone, and seldom prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import parser

import dagexec
from dagexec.core.operator import Operator
from dagexec.platform import host_memory

Array = npt.NDArray[Any]

WIDTH = 20

FLAT = f"float[N,{WIDTH}] x"
HEADS = "float[1,2,N,12] x"

BODIES = {
    "layer": (
        FLAT,
        """h = MatMul(x, w)
           r = Relu(h)
           last = Slice(r, minus_one, most, zero)
           y = Concat<axis = 0>(x, last)""",
    ),
    "rows of many kinds": (
        FLAT,
        """s = Softmax<axis = -1>(x)
           n = LayerNormalization(s, row)
           e = Erf(n)
           u = Unsqueeze(e, zero)
           p = Mul(u, row)
           q = Squeeze(p, zero)
           z = Sub(q, x)
           last = Slice(z, minus_two, most, zero)
           y = Concat<axis = 0>(x, last)""",
    ),
    "mixed rows": (
        FLAT,
        """m = ReduceMax<axes = [0], keepdims = 1>(x)
           c = CumSum(x, first)
           s = Softmax<axis = 0>(c)
           last = Add(m, row)
           y = Concat<axis = 0>(s, last)""",
    ),
    "heads": (
        HEADS,
        """t = Transpose<perm = [0, 1, 3, 2]>(x)
           new = Slice(x, zero, one, two)
           p = MatMul(new, t)
           d = Tanh(p)
           s = Softmax<axis = -1>(d)
           a = MatMul(s, x)
           y = Concat<axis = 2>(x, a)""",
    ),
    "indices": (
        FLAT,
        """shape = Shape(x)
           count = Gather(shape, first)
           places = Range(first, count, single)
           back = Sub(places, single)
           g = Gather<axis = 0>(x, back)
           last = Slice(g, zero, one, zero)
           y = Concat<axis = 0>(g, last)""",
    ),
    "indices in what does not grow": (
        FLAT,
        """shape = Shape(x)
           count = Gather(shape, first)
           outside = Shape(table)
           size = Gather(outside, first)
           start = Sub(size, single)
           end = Sub(start, count)
           back = Neg(single)
           places = Range(start, end, back)
           g = Gather<axis = 0>(table, places)
           column = Unsqueeze(g, one)
           rows = Mul(column, row)
           last = Slice(rows, minus_one, most, zero)
           y = Concat<axis = 0>(x, last)""",
    ),
    "shrinking": (
        FLAT,
        """r = Sigmoid(x)
           y = Slice(r, one, most, zero)""",
    ),
    "in one row": (
        "float[1,N,20] x",
        """a = Abs(x)
           b = Sqrt(a)
           last = Slice(b, zero, two, one)
           y = Concat<axis = 1>(b, last)""",
    ),
}  # fmt: skip


def model_of(name: str) -> onnx.ModelProto:
    """A loop of `times` iterations of a body, whose state is x."""
    state, body = BODIES[name]
    kind = state.split()[0]
    random = np.random.default_rng(1)

    def floats(array: Array) -> str:
        return ", ".join(map(str, array.reshape(-1).tolist()))

    w, row = random.standard_normal((WIDTH, WIDTH)) / 5, random.standard_normal(WIDTH)
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        agraph (int64 times, {kind} x0, float[M] table) => ({kind} result) <
            float[{WIDTH},{WIDTH}] w = {{{floats(w)}}}, float[{WIDTH}] row = {{{floats(row)}}},
            int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] minus_one = {{-1}},
            int64[1] minus_two = {{-2}}, int64[1] most = {{9223372036854775807}}, int64 first = {{0}},
            int64 single = {{1}}, bool go = {{1}}
        > {{
            result = Loop(times, go, x0) <body = body (int64 i, bool on, {kind} x) => (bool still, {kind} y) {{
                still = Identity(on)
                {body}
            }}>
        }}"""
    )


def start_of(name: str, rows: int, seed: int = 0) -> Array:
    kind = BODIES[name][0].split("[")[1].split("]")[0].split(",")
    shape = [rows if size == "N" else int(size) for size in kind]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def feeds(times: int, x: Array, size: int = 75) -> Mapping[str, Array]:
    return {"times": np.array(times), "x0": x, "table": np.arange(size, dtype=np.float32)}


def close(one: Array, other: Array) -> None:
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", BODIES)
def test_it_gives_what_onnxruntime_does(name: str) -> None:
    model = model_of(name)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with dagexec.compile(model, num_workers=1) as executor:
        for times, rows in ((25, 26), (3, 70), (25, 26), (40, 45), (0, 5), (12, 30)):
            given = feeds(times, start_of(name, rows, times), times + rows)
            close(executor.run(given)["result"], session.run(None, given)[0])


@pytest.mark.parametrize("name", BODIES)
def test_each_iteration_gives_the_bytes_of_its_size_alone(name: str) -> None:
    model = model_of(name)
    x = start_of(name, 25)
    with dagexec.compile(model, num_workers=1) as executor:
        results = [executor.run(feeds(times, x))["result"] for times in (20, 7, 13)]
    alone = {0: x}
    for times in range(20):
        with dagexec.compile(model, num_workers=1) as executor:
            alone[times + 1] = executor.run(feeds(1, alone[times]))["result"]
    for times, result in zip((20, 7, 13), results, strict=True):
        assert result.tobytes() == alone[times].tobytes()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of operators that were prepared."""
    found: list[str] = []
    bind = Operator.bind

    def noted(self: Operator, *given: Any, **named: Any) -> Any:
        found.append(self.definition.type)
        return bind(self, *given, **named)

    monkeypatch.setattr(Operator, "bind", noted)
    return found


@pytest.mark.parametrize("name", ["layer", "rows of many kinds", "in one row"])
def test_few_sizes_are_prepared_for(name: str, bound: list[str]) -> None:
    with dagexec.compile(model_of(name), num_workers=1) as executor:
        executor.run(feeds(100, start_of(name, 10)))
        operators = len(set(bound))
        assert len(bound) < 12 * operators
        bound.clear()
        executor.run(feeds(100, start_of(name, 11)))
        assert len(bound) <= operators


def test_values_that_are_no_numbers_stay_in_their_rows() -> None:
    model = model_of("layer")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = start_of("layer", 6)
    x[2, 3], x[4, 5] = np.nan, np.inf
    with dagexec.compile(model, num_workers=1) as executor:
        for rows in (6, 4, 6):
            given = feeds(30, x[:rows])
            close(executor.run(given)["result"], session.run(None, given)[0])


def test_there_need_not_be_addresses_to_grow_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "address_space_is_limited", lambda: True)
    model = model_of("layer")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    given = feeds(30, start_of("layer", 4))
    with dagexec.compile(model, num_workers=1) as executor:
        for _ in range(2):
            close(executor.run(given)["result"], session.run(None, given)[0])
