"""A longer cache: operators that are where they were are not prepared again, and the bytes are those of a fresh net."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec import Executor
from dagexec.core.choices import choices
from dagexec.core.operator import MemorySource, Operator
from dagexec.options import CompileOptions
from dagexec.scheduler.memory import MemoryPlan
from dagexec.scheduler.plan.preparation import Preparation
from tests.executor.test_decoder_loop import CACHES, ELEMENTS, HEADS, WIDTH, Array, Feeds, Writer, language_model
from tests.ops.onednn.engine import needs_onednn

OPTIONS = CompileOptions(num_workers=1)


def feeds_of(length: int) -> Feeds:
    random_numbers = np.random.default_rng(length)
    token: Feeds = {"token": np.array([[length % 7]])}
    return token | {name: random_numbers.standard_normal((1, HEADS, length, ELEMENTS), np.float32) for name in CACHES}


def prepared(executor: Executor, length: int) -> Preparation:
    """What the executor's net is prepared as, after a run at `length`."""
    executor.run(feeds_of(length))
    return executor.net().prepared()


def reused(before: Preparation, after: Preparation) -> list[int]:
    """The operators that both have as one object, but those with nothing to do."""
    pairs = enumerate(zip(before.prepared, after.prepared, strict=True))
    return [index for index, (one, other) in pairs if one is other]


@pytest.fixture(scope="module")
def model() -> Any:
    return language_model()


@pytest.fixture(autouse=True)
def _no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nets are prepared anew for each length, as those are whose caches go elsewhere, too."""
    monkeypatch.setattr("dagexec.executor.executor.caches_by_name", lambda _inputs, _outputs: {})


@needs_onednn
def test_products_are_prepared_once_for_many_lengths(model: Any) -> None:
    with dagexec.compile(model, OPTIONS) as executor:
        steps = [prepared(executor, length) for length in range(100, 112)]
        kinds = [operator.definition.type for operator in executor.net().operators]
    most = [
        all(index in found for index, kind in enumerate(kinds) if kind in ("FusedFC", "LayerNorm", "Transpose"))
        for found in map(reused, steps[1:], steps[2:])
    ]
    assert most.count(True) == 9, "what is at 101 has room up to 107, so that all moves once more at 108"


@needs_onednn
def test_operators_at_the_callers_arrays_are_prepared_at_each_length() -> None:
    """Such arrays may be elsewhere in a run: what reads or writes them follows them there."""
    w = Writer()
    w.node("Tanh", [w.layer("x", "first", WIDTH, WIDTH)], "bent")
    w.node("Tanh", [w.layer("bent", "second", WIDTH, WIDTH)], "inner")
    w.node("MatMul", ["inner", w.random("last", WIDTH, WIDTH)], "y")
    w.node("Concat", ["past", "y"], "grown", axis=0)
    shapes = {"x": [1, WIDTH], "past": ["length", WIDTH], "y": [1, WIDTH], "grown": ["longer", WIDTH]}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    weights = [numpy_helper.from_array(array, name) for name, array in w.weights.items()]
    graph = helper.make_graph(w.nodes, "rows", [infos["x"], infos["past"]], [infos["y"], infos["grown"]], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.ones((1, WIDTH), np.float32)
    with dagexec.compile(model, OPTIONS) as executor:
        found, net = [], executor.net()
        net.keep = frozenset({"y", "grown"})  # the inputs are the caller's though no run has to leave them
        for length in (200, 201, 202):
            executor.run({"x": x, "past": np.ones((length, WIDTH), np.float32)})
            found.append(net.prepared())
    inner = {index for index, operator in enumerate(net.operators) if "inner" in operator.definition.output}
    assert set(reused(found[1], found[2])) == inner


@needs_onednn
def test_working_memory_that_is_elsewhere_has_its_operators_prepared_again(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()
    given: list[Array] = []

    def elsewhere(plan: MemoryPlan, index: int, operator: Operator) -> MemorySource:
        def give(nbytes: int) -> Array:
            asked[index] += 1
            given.append(np.empty(nbytes, np.uint8))
            return given[-1]

        return give

    monkeypatch.setattr(MemoryPlan, "working_memory", elsewhere)
    with dagexec.compile(model, OPTIONS) as executor:
        first, second = [prepared(executor, length) for length in (100, 101, 102)][1:]
    needing = {index for index, one in enumerate(second.prepared) if one.working_memory}
    assert needing.isdisjoint(reused(first, second))
    assert all(asked[index] == 3 * len(second.prepared[index].working_memory) for index in needing)
    assert {id(array) for index in needing for array in second.prepared[index].working_memory} <= set(map(id, given))


@needs_onednn
def test_another_choice_has_everything_prepared_again(model: Any) -> None:
    with dagexec.compile(model, OPTIONS) as executor:
        steps = [prepared(executor, length) for length in (100, 101, 102)]
        assert reused(steps[1], steps[2])
        choices.generation += 1
        assert not reused(steps[2], prepared(executor, 103))


@pytest.mark.slow
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
@pytest.mark.parametrize("kept", ["", "layer0/attended"])
def test_lengths_in_any_order_give_the_bytes_of_a_fresh_executor(model: Any, net_type: str, kept: str) -> None:
    """Also where results go to arrays of the caller, and where something in between is kept for him."""
    chance = random.Random(net_type)
    lengths = [*range(60, 72), *chance.choices(range(40, 90), k=12), *range(64, 70)]
    options = CompileOptions(
        num_workers=1 if net_type == "simple" else 2, net_type=net_type, keep=[kept] if kept else []
    )
    names = ["scores", *(f"new_{name}" for name in CACHES), *options.keep]
    with dagexec.compile(model, options) as executor:
        given = []
        for length in lengths:
            out = executor.run(feeds_of(length), outputs=names)
            if chance.random() < 0.5:
                out = {name: np.full_like(array, np.nan) for name, array in out.items()}
                executor.run(feeds_of(length), outputs=names, out=out)
            given.append((length, out))
    fresh = {length: fresh_results(model, options, length, names) for length in set(lengths)}
    for length, results in given:
        for name in names:
            np.testing.assert_array_equal(results[name], fresh[length][name], err_msg=f"{name} at {length}")


def fresh_results(model: Any, options: CompileOptions, length: int, names: Iterable[str]) -> Feeds:
    with dagexec.compile(model, options) as executor:
        return executor.run(feeds_of(length), outputs=list(names))


@pytest.mark.slow
@needs_onednn
def test_hundreds_of_lengths_leave_no_more_than_the_longest_takes(model: Any) -> None:
    alive: weakref.WeakSet[Preparation] = weakref.WeakSet()
    with dagexec.compile(model, replace(OPTIONS, preparation_bytes=8 << 20)) as executor:
        for length in range(20, 320):
            alive.add(prepared(executor, length))
        gc.collect()
        grown = executor.net().preparation_statistics()
        count = len(alive)
    with dagexec.compile(model, OPTIONS) as executor:
        prepared(executor, 319)
        fresh = executor.net().preparation_statistics()
    assert grown.made == 300
    assert count == grown.kept < 100
    assert grown.kept_bytes <= grown.budget_bytes
    assert fresh.arena_bytes <= grown.arena_bytes <= 1.1 * fresh.arena_bytes
