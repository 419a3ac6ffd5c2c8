"""From a model to its first runs, what follows from a net or from the form of an operator is found out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core import graph, inferred_types
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef
from dagexec.core.schema import OpSchema
from dagexec.errors import ShapeError

LAYERS = 5


def layered(width: int | None) -> Model:
    """The same two layers again and again, which nothing fuses, on rows of so many numbers."""
    net, last = NetDef(name="layers"), "x"
    for number in range(LAYERS):
        net.op.add(type="Hardmax", input=[last], output=[f"s{number}"])
        net.op.add(type="Add", input=[f"s{number}", "c"], output=[f"y{number}"])
        last = f"y{number}"
    inputs = {name: InputInfo(FLOAT32, (2, width)) for name in ("x", "c")}
    return Model("layers", net, inputs=inputs, outputs=(last,))


def counted(function: Callable[..., Any], key: Callable[..., Hashable], into: Counter[Hashable]) -> Callable[..., Any]:
    """`function`, whose calls are counted by `key`."""

    def call(*args: Any, **keywords: Any) -> Any:
        into[key(*args)] += 1
        return function(*args, **keywords)

    return call


def run_twice(width: int, replicas: int = 2) -> None:
    with dagexec.compile(layered(width), replicas=replicas, warm_start=True) as executor:
        executor.run({name: np.ones((2, width), np.float32) for name in ("x", "c")})
        assert len(executor.graph) == 2 * LAYERS


def test_one_graph_is_derived_for_the_estimate_and_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: Counter[Hashable] = Counter()
    monkeypatch.setattr(graph, "flow_of", counted(graph.flow_of, lambda operators, _schemas: len(operators), derived))
    run_twice(8, replicas=3)
    assert derived == {2 * LAYERS: 1}


def test_operators_of_a_form_are_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: Counter[Hashable] = Counter()
    monkeypatch.setattr(OpSchema, "verify", counted(OpSchema.verify, lambda _schema, node: node.form, verified))
    run_twice(8)
    assert set(verified.values()) <= {1}  # none of a form that another test left


def test_operators_of_a_form_are_asked_once_about_inputs_of_some_types(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[Hashable] = Counter()
    ask = inferred_types._asked
    monkeypatch.setattr(
        inferred_types, "_asked", counted(ask, lambda call, _schema: (call.definition.form, call.inputs), asked)
    )
    run_twice(1237)  # of which no other test asks
    assert len(asked) == 3  # Softmax, Add, and Add in place
    assert set(asked.values()) == {1}


def test_what_was_answered_before_does_not_hide_what_is_wrong() -> None:
    run_twice(8)
    feeds = {"x": np.ones((2, 8), np.float32), "c": np.ones((2, 9), np.float32)}
    with dagexec.compile(layered(None)) as executor, pytest.raises(ShapeError, match=r"Add 'y0' .operator 1. of net"):
        executor.run(feeds)
