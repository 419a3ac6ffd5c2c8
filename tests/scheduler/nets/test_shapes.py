"""Many input shapes: preparations are kept within a number of bytes, in one arena, as large as the largest needs."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core import dtypes, inferred_types
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.core.tensor import Tensor
from dagexec.executor.executor import Executor
from dagexec.scheduler.memory import BufferPatterns, Buffers, arena_memory, offsets, pattern
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan import preparation_cache
from dagexec.scheduler.plan.preparation_cache import PreparationCache, PreparationStatistics
from tests.held import doubled_model
from tests.nets import temporary_operator
from tests.ops.running import operator_def

PATIENCE = 30


def compiled(**options: Any) -> Executor:
    """An executor that prepares for every shape, as no run of one batch size may be made up of others."""
    return dagexec.compile(doubled_model(), batch_invariant=False, **options)


def net_of(executor: Executor) -> BaseNet:
    return executor._replicas.members[0].net


def statistics_of(executor: Executor) -> PreparationStatistics:
    (found,) = executor.statistics().preparations
    return found


def run(executor: Executor, count: int, value: float = 1) -> None:
    """Rows of `value`; the result is checked."""
    found = executor.run({"x": np.full((count, 3), value, np.float32)})["y"]
    np.testing.assert_array_equal(found, np.full((count, 3), 2 * max(value, 0), np.float32))


def preparation(nbytes: int) -> Any:
    return SimpleNamespace(nbytes=nbytes)


def test_the_least_recently_used_are_given_up_when_there_are_too_many_bytes() -> None:
    cache = PreparationCache(100)
    small, large = preparation(30), preparation(60)
    cache.add(("small",), small)
    cache.add(("large",), large)
    assert cache.take(("small",)) is small
    cache.put_back(("small",), small)
    cache.add(("new",), preparation(20))
    assert cache.take(("large",)) is None
    assert cache.statistics(7) == PreparationStatistics(
        made=3, reused=1, evicted=1, kept=2, kept_bytes=50, budget_bytes=100, arena_bytes=7
    )


def in_turn(cache: PreparationCache, shapes: int, rounds: int, nbytes: int) -> list[int]:
    """How many of the shapes were there in each round, each `nbytes` bytes."""
    found = []
    for _ in range(rounds):
        hits = 0
        for shape in range(shapes):
            known = cache.take((shape,))
            hits += known is not None
            if known is None:
                cache.add((shape,), preparation(nbytes))
            else:
                cache.put_back((shape,), known)
        found.append(hits)
    return found


@pytest.mark.parametrize(("shapes", "hits"), [(4, [0, 4, 4]), (64, [0, 64, 64]), (65, [0, 0, 0])])
def test_as_many_shapes_as_the_budget_allows_are_prepared_once(shapes: int, hits: list[int]) -> None:
    assert in_turn(PreparationCache(6400), shapes, 3, 100) == hits


def test_a_thousand_lengths_in_turn_are_prepared_once_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as large as one of four layers of BERT is; on a small machine as many as a 64th of its memory holds."""
    monkeypatch.setattr(preparation_cache, "physical_bytes", lambda: 32 << 30)
    assert in_turn(PreparationCache(None), 1000, 2, 256 << 10) == [0, 1000]
    monkeypatch.setattr(preparation_cache, "physical_bytes", lambda: 1 << 30)
    cache = PreparationCache(None)
    in_turn(cache, 1000, 1, 256 << 10)
    assert cache.statistics(0).kept == 64


def test_the_latest_is_kept_however_large_it_is() -> None:
    cache = PreparationCache(100)
    for size in (200, 300):
        cache.add((size,), preparation(size))
    assert (cache.statistics(0).kept, cache.statistics(0).kept_bytes) == (1, 300)
    cache.clear()
    assert (cache.statistics(0).kept, cache.statistics(0).kept_bytes) == (0, 0)


def test_shapes_that_come_back_are_known_and_take_no_more_memory_than_the_largest() -> None:
    with compiled() as largest, compiled() as executor:
        run(largest, 5000)
        for count in (*range(1, 12), 5000) * 2:
            run(executor, count)
        found = statistics_of(executor)
        assert (found.made, found.reused, found.kept, found.evicted) == (12, 12, 12, 0)
        assert 0 < found.kept_bytes <= found.budget_bytes
        assert found.arena_bytes == statistics_of(largest).arena_bytes > 0


def test_arrays_of_all_shapes_lie_in_the_same_memory() -> None:
    with compiled(optimize=False, keep=()) as executor:
        net = net_of(executor)
        addresses = set()
        for count in (1, 9, 70, 5):
            run(executor, count)
            value = net.workspace.get_blob("x").value
            assert isinstance(value, Tensor)
            addresses.add(value.array.ctypes.data)
        assert len(addresses) == 1


def test_a_budget_too_small_for_two_keeps_the_latest_and_frees_the_others() -> None:
    with compiled(preparation_bytes=0) as executor:
        run(executor, 1)
        first = net_of(executor).prepared()
        held = [weakref.ref(first), *(weakref.ref(step) for step in first.steps)]
        del first
        gc.disable()  # nothing of a preparation may hold on to itself
        try:
            run(executor, 2)
            assert [one() for one in held] == [None] * len(held)
        finally:
            gc.enable()
        run(executor, 1)
        found = statistics_of(executor)
        assert (found.made, found.reused, found.kept, found.evicted) == (3, 0, 1, 2)


def test_a_larger_arena_takes_the_place_of_one_that_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "reserve", lambda _nbytes: None)
    with compiled() as executor:
        for count, kept in ((100, 1), (1, 2), (1000, 1), (100, 2), (1, 3), (1000, 3)):
            run(executor, count)
            assert statistics_of(executor).kept == kept, count


def test_new_sizes_are_inferred_once_and_placed_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, calls = [], []
    search, new_call = offsets._searched, Operator._new_call
    monkeypatch.setattr(offsets, "_searched", lambda *given: searches.append(given) or search(*given))
    monkeypatch.setattr(Operator, "_new_call", lambda self, types: calls.append(self) or new_call(self, types))
    with (
        compiled(optimize=False, keep=()) as unplanned,
        compiled() as planned,
    ):
        run(planned, 1000)
        for executor in (unplanned, planned):
            run(executor, 7)
            operators = net_of(executor).operators
            searches.clear()
            calls.clear()
            run(executor, 500)
            assert (len(calls), searches) == (len(operators), []), executor


def test_results_of_one_shape_stay_when_another_runs() -> None:
    with compiled() as executor:
        first = executor.run({"x": np.full((4000, 3), 1, np.float32)})["y"]
        executor.run({"x": np.full((4001, 3), 5, np.float32)})
        np.testing.assert_array_equal(first, np.full((4000, 3), 2, np.float32))


def test_runs_at_one_time_have_arenas_of_their_own() -> None:
    """Each run waits, with a tensor in its arena, until the other is as far."""
    inside = threading.Barrier(2)

    def meet(operator: Operator) -> None:
        operator.y(0)[...] = 2
        inside.wait(PATIENCE)

    net = NetDef(
        name="meeting",
        op=[
            operator_def("Relu", ["x"], ["h"]),
            operator_def("Meeting", ["h"], ["two"]),
            operator_def("Mul", ["h", "two"], ["y"]),
        ],
        external_input=["x"],
        external_output=["y"],
    )
    model = Model("meeting", net, inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3))}, outputs=("y",))
    with (
        temporary_operator("Meeting", meet),
        dagexec.compile(model, replicas=2, num_workers=2, net_type="dag") as executor,
        ThreadPoolExecutor(2) as callers,
    ):
        for counts in ((1, 40), (40, 1), (7, 40), (40, 7)):
            feeds = [{"x": np.full((count, 3), count, np.float32)} for count in counts]
            for count, results in zip(counts, callers.map(executor.run, feeds), strict=True):
                np.testing.assert_array_equal(results["y"], np.full((count, 3), 2 * count, np.float32))
        assert all(found.made for found in executor.statistics().preparations), "both ran, whichever had which shapes"


@pytest.mark.parametrize("net_type", ["simple", "dag"])
def test_buffers_that_follow_from_a_pattern_are_those_that_a_search_finds(
    net_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views, writes in place, what is settled, and no rows at all."""
    find, searched = BufferPatterns.find, []

    def compared(self: BufferPatterns, *given: Any) -> Buffers:
        searches.clear()
        found = find(self, *given)
        searched.append(len(searches))
        expected = search(*given)
        assert (found.buffers, found.places, found.own_bytes) == (
            expected.buffers, expected.places, expected.own_bytes
        )  # fmt: skip
        return found

    searches: list[object] = []
    search = pattern.find_buffers
    monkeypatch.setattr(pattern, "find_buffers", lambda *given: searches.append(1) or search(*given))
    monkeypatch.setattr(BufferPatterns, "find", compared)
    net = NetDef(
        name="n",
        op=[
            operator_def("Relu", ["x"], ["h"]),
            operator_def("Flatten", ["h"], ["f"], axis=1),
            operator_def("Sigmoid", ["f"], ["f"]),
            operator_def("Shape", ["x"], ["s"]),
            operator_def("ConstantFill", ["s"], ["c"], input_as_shape=1, value=1.0),
            operator_def("Add", ["h", "c"], ["y"]),
            operator_def("Add", ["f", "f"], ["z"]),
        ],
        external_input=["x"],
        external_output=["y", "z"],
    )
    model = Model("n", net, inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3, 2))}, outputs=("y", "z"))
    with dagexec.compile(model, net_type=net_type, batch_invariant=False) as executor:
        for count in (5, 9, 3, 0, 4, 2000):
            x = np.full((count, 3, 2), -1, np.float32)
            found = executor.run({"x": x})
            np.testing.assert_array_equal(found["y"], np.ones_like(x))
            np.testing.assert_array_equal(found["z"], np.ones((count, 6), np.float32))
    assert searched == [1, 0, 0, 1, 0, 0]


def test_operators_of_one_form_are_asked_once_for_the_types_of_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another argument, other input types, or other blobs that are the same, make another form."""
    asked: list[str] = []
    ask = inferred_types._asked
    monkeypatch.setattr(inferred_types, "_asked", lambda call, schema: asked.append(call.label) or ask(call, schema))
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((37, 41), np.float32))  # sizes of which no other test asks
    workspace.feed_blob("v", np.ones((41, 41), np.float32))
    net = NetDef(
        name="n",
        op=[
            operator_def("MatMul", ["x", "v"], ["a"]),
            operator_def("MatMul", ["a", "v"], ["b"]),
            operator_def("MatMul", ["v", "v"], ["c"]),
            operator_def("MatMul", ["a", "v"], ["d"], trans_b=1),
            operator_def("MatMul", ["v", "c"], ["e"]),
        ],
    )
    with SimpleNet(net, workspace) as layers:
        layers.run()
        assert len(asked) == 4
        np.testing.assert_array_equal(workspace.fetch_blob("b"), np.full((37, 41), 1681))
        np.testing.assert_array_equal(workspace.fetch_blob("e"), np.full((41, 41), 1681))


@pytest.mark.slow
def test_every_length_gives_the_bytes_that_a_fresh_executor_gives() -> None:
    """Two layers of an encoder, in which the second follows the first, with lengths in an order by chance."""
    rng = np.random.default_rng(0)
    parameters: dict[str, Any] = {}
    operators = []
    x = "x"
    for layer in "ab":
        for name, shape in (("w", (64, 64)), ("b", (64,)), ("u", (64, 64)), ("c", (64,)), ("scale", (64,))):
            parameters[name + layer] = rng.standard_normal(shape, np.float32) / 8
        operators += [
            operator_def("FC", [x, "w" + layer, "b" + layer], ["k" + layer], axis=2),
            operator_def("BatchMatMul", [x, "k" + layer], ["s" + layer], trans_b=1),
            operator_def("Softmax", ["s" + layer], ["p" + layer], axis=2),
            operator_def("BatchMatMul", ["p" + layer, "k" + layer], ["m" + layer]),
            operator_def("FC", ["m" + layer, "u" + layer, "c" + layer], ["f" + layer], axis=2),
            operator_def("Gelu", ["f" + layer], ["g" + layer]),
            operator_def("Add", ["g" + layer, x], ["r" + layer]),
        ]
        x = "r" + layer
    net = NetDef(name="encoder", op=operators, external_input=["x"], external_output=[x])
    model = Model(
        "encoder", net, parameters=parameters, inputs={"x": InputInfo(dtypes.FLOAT32, (None, None, 64))}, outputs=(x,)
    )
    shapes = [(2, 9), (1, 33), (2, 1), (1, 9), (3, 17), (2, 9), (1, 2), (3, 33), (1, 33)]
    with dagexec.compile(model) as executor:
        for shape in shapes:
            feeds = {"x": rng.standard_normal((*shape, 64), np.float32)}
            with dagexec.compile(model) as fresh:
                assert executor.run(feeds)[x].tobytes() == fresh.run(feeds)[x].tobytes(), shape
