"""Operators whose shapes a run decides: preparations that come back, and those that must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.core.operator import Operator
from dagexec.core.tensor import Tensor
from dagexec.scheduler.plan import dynamic

Array = npt.NDArray[Any]

OPERATORS = [
    op("NonZero", ["x"], ["places"]),
    op("Reshape", ["places"], ["numbers"], shape=[-1]),
    op("Gather", ["x", "numbers"], ["picked"]),
    op("CumSum", ["picked"], ["sums"], axis=0),
    op("Sub", ["sums", "picked"], ["sums"]),
    op("Concat", ["sums", "picked"], ["y", "sizes"], axis=0),
]


def expected(x: Array) -> Array:
    picked = x[x != 0]
    return np.concatenate([np.cumsum(picked, dtype=np.float32) - picked, picked])


def with_numbers(count: int, seed: int, size: int = 40) -> Array:
    random = np.random.default_rng(seed)
    x = np.zeros(size, np.float32)
    x[random.permutation(size)[:count]] = random.integers(1, 9, count)
    return x


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


def run_all(arrays: Sequence[Array], operators: Sequence[Any] = OPERATORS) -> Workspace:
    workspace = Workspace()
    workspace.feed_blob("x", arrays[0])
    net = workspace.create_net(NetDef(name="net", op=operators, external_input=["x"]))
    for x in arrays:
        workspace.feed_blob("x", x)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), expected(x))
    return workspace


def test_others_see_no_more_rows_while_an_operator_is_prepared_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may read the same tensor at that moment."""
    workspace = Workspace()
    seen: list[tuple[int, int]] = []
    bind = Operator.bind

    def noted(self: Operator, *given: Any, **named: Any) -> Any:
        if self.definition.type == "Relu":
            seen.append((self.input(0).shape[0], workspace.get_blob("picked").get(Tensor).shape[0]))
        return bind(self, *given, **named)

    monkeypatch.setattr(Operator, "bind", noted)
    workspace.feed_blob("x", with_numbers(3, 0))
    operators = [*OPERATORS[:3], op("Relu", ["picked"], ["y"])]
    net = workspace.create_net(NetDef(name="net", op=operators, external_input=["x"]))
    counts = [30, 5, 11, 20, 3]
    for count in counts:
        x = with_numbers(count, count)
        workspace.feed_blob("x", x)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), x[x != 0])
    assert {there for _, there in seen} <= set(counts)
    assert any(own > there for own, there in seen)


def test_sizes_that_come_back_are_not_prepared_for_again(bound: list[str]) -> None:
    sizes = (30, 7, 0, 19)
    first = [with_numbers(count, 0) for count in sizes]
    run_all(first)
    once = len(bound)
    bound.clear()
    run_all([*first, *(with_numbers(count, seed) for seed in (1, 2, 3) for count in sizes)])
    assert len(bound) == once


def test_more_sizes_than_a_few_come_back_as_a_loop_that_grows_has_them(bound: list[str]) -> None:
    arrays = [with_numbers(count, count, size=200) for count in range(199, 0, -1)]
    run_all(arrays)
    once = len(bound)
    bound.clear()
    run_all([*arrays, *arrays])
    assert len(bound) == once


def test_what_was_prepared_for_less_memory_is_let_go_of(bound: list[str]) -> None:
    sizes = (7, 30, 7, 30, 7)
    run_all([with_numbers(count, seed) for seed, count in enumerate(sizes)])
    assert 3 <= bound.count("Gather") < len(sizes)


def test_a_few_preparations_of_few_bytes_are_kept(bound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "_MOST_KEPT", 3)
    arrays = [with_numbers(count, count) for count in (30, 5, 6, 7, 8)]
    run_all([*arrays, arrays[4], arrays[1]])
    assert bound.count("Gather") == len(arrays) + 1
    bound.clear()
    monkeypatch.setattr(dynamic, "_MOST_KEPT_BYTES", 64)
    run_all([*arrays, *arrays])
    assert bound.count("Gather") == 2 * len(arrays)
