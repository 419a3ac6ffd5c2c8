"""Runs that are fed caches: steps at every length, with the peer's values and bytes that no history changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec.errors import FeedError, OperatorError, RunTimeoutError
from dagexec.executor.executor import Executor
from dagexec.executor.sessions import fed as fed_module
from dagexec.executor.sessions import steps
from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, WIDTH, WORDS, Peer, decoder

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

pytest.importorskip("onnxruntime")


@pytest.fixture
def executor() -> Iterator[Executor]:
    with dagexec.compile(decoder(), num_workers=1) as executor:
        yield executor


def feeds(length: int, *, count: int = 1, batch: int = 1, masked: bool = False) -> dict[str, Array]:
    random = np.random.default_rng(length)
    found: dict[str, Array] = {"ids": random.integers(0, WORDS, (batch, count))}
    found |= {name: random.standard_normal((batch, KEY_HEADS, length, ELEMENTS), np.float32) for name in CACHES}
    if masked:
        found["attention_mask"] = np.ones((batch, length + count), np.int64)
        found["attention_mask"][-1, :2] = 0
    return found


def as_bytes(results: Feeds) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in results.items()}


def preparations(executor: Executor) -> int:
    return executor.net().preparation_statistics().made


@pytest.mark.parametrize("options", [{}, {"batch": 2}, {"count": 3}, {"batch": 2, "masked": True}], ids=str)
def test_values_are_the_peers_and_no_length_is_prepared(options: dict[str, Any]) -> None:
    model = decoder(2, masked=True) if options.get("masked") else decoder()
    peer = Peer(model)
    with dagexec.compile(model, num_workers=1) as executor:
        for length in (7, 8, 9, 31, 64, 100, 65, 9):
            fed = feeds(length, **options)
            peer.caches = {name: fed[name] for name in CACHES}
            expected = peer.run({name: array for name, array in fed.items() if name not in CACHES})
            results = executor.run(fed)
            assert list(results) == list(executor.outputs)
            for name, array in results.items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)
        assert preparations(executor) == 0
        assert executor.statistics().completed == 8


def test_bytes_depend_on_the_sizes_alone(executor: Executor) -> None:
    lengths = [40, 12, 41, 12, 12, 400, 40]
    alone = {}
    for length in set(lengths):
        with dagexec.compile(decoder(), num_workers=1) as fresh:
            alone[length] = as_bytes(fresh.run(feeds(length)))
    for length in lengths:
        assert as_bytes(executor.run(feeds(length))) == alone[length]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda length: as_bytes(executor.run(feeds(length))), lengths))
    assert together == [alone[length] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_bytes_depend_on_the_sizes_alone_where_another_input_is_as_long_by_chance(masked: bool) -> None:
    context = np.random.default_rng(1).standard_normal((1, 24, WIDTH), np.float32)
    model = decoder(masked=masked, context=True)

    def run(executor: Executor, length: int) -> dict[str, bytes]:
        return as_bytes(executor.run({**feeds(length, masked=masked), "context": context}))

    lengths = [30, 23, 31, 22, 23]  # there are 24 positions after a run behind 23
    with dagexec.compile(model, num_workers=1) as executor:
        together = [run(executor, length) for length in lengths]
        again = [run(executor, length) for length in lengths[::-1]][::-1]
    assert together == again
    for length, expected in zip(lengths, together, strict=True):
        with dagexec.compile(model, num_workers=1) as fresh:
            assert run(fresh, length) == expected


@pytest.mark.parametrize("way", ["option", "call"])
def test_a_step_may_be_warmed_up_for_sessions(way: str) -> None:
    shapes = {name: array.shape for name, array in feeds(15).items()}
    with dagexec.compile(decoder(), num_workers=1, warm_start=shapes if way == "option" else False) as executor:
        if way == "call":
            executor.warm_up(feeds(15))
        (step,) = executor._beside.members
        before = step.net().preparation_statistics().made
        with executor.session() as session:
            session.run({"ids": np.array([[1]])})
        assert executor._beside.members == [step]
        assert step.net().preparation_statistics().made == before == 1


@pytest.mark.slow
def test_nets_that_were_let_go_of_are_made_again_and_what_they_ran_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A log that is kept holds no net: its records have texts, not the errors, whose tracebacks hold frames."""
    caplog.set_level(logging.INFO, "dagexec")
    monkeypatch.setattr(steps, "_MOST", 1)
    monkeypatch.setattr(fed_module, "_MOST_KINDS", 1)
    sizes = [(20, 1), (21, 2), (22, 1), (23, 2), (24, 3)]
    with dagexec.compile(decoder(), num_workers=1) as executor:
        few = [as_bytes(executor.run(feeds(length, batch=batch))) for length, batch in sizes]
        assert len(executor._beside.members) <= 2
        assert caplog.records
        assert executor.statistics().completed == len(sizes)
        assert preparations(executor) == 0
    monkeypatch.undo()
    with dagexec.compile(decoder(), num_workers=1) as executor:
        assert few == [as_bytes(executor.run(feeds(length, batch=batch))) for length, batch in sizes]


async def test_tasks_get_the_bytes_of_threads(executor: Executor) -> None:
    for length in (20, 21, 20):
        found = as_bytes(await executor.run_async(feeds(length)))
        assert found == as_bytes(executor.run(feeds(length)))


def test_results_are_the_callers(executor: Executor) -> None:
    fed = feeds(20)
    before = {name: array.copy() for name, array in fed.items()}
    first = executor.run(fed)
    kept = as_bytes(first)
    executor.run(feeds(21))
    assert as_bytes(first) == kept
    for array in first.values():
        array[...] = 0
    for name, array in fed.items():
        np.testing.assert_array_equal(array, before[name])
    assert as_bytes(executor.run(fed)) == kept


@pytest.mark.parametrize("names", [["scores"], ["present_key.1", "scores"], ["present_value.0"]], ids=str)
def test_outputs_are_those_that_are_asked_for(executor: Executor, names: Sequence[str]) -> None:
    whole, part = executor.run(feeds(20)), executor.run(feeds(20), outputs=names)
    assert list(part) == list(names)
    assert as_bytes(part) == {name: whole[name].tobytes() for name in names}


def test_results_go_to_given_arrays(executor: Executor) -> None:
    whole = executor.run(feeds(20))
    out = {name: np.zeros_like(array) for name, array in whole.items() if name != "present_value.0"}
    results = executor.run(feeds(20), out=out)
    assert all(results[name] is array for name, array in out.items())
    assert as_bytes(results) == as_bytes(whole)
    with pytest.raises(FeedError, match=r"present_key\.0"):
        executor.run(feeds(21), out=out)
    assert preparations(executor) == 0


def test_few_positions_and_many_new_ones_are_run_as_the_model_is(executor: Executor) -> None:
    peer = Peer(decoder())
    for number, fed in enumerate([feeds(3), feeds(20, count=12)]):
        peer.caches = {name: fed[name] for name in CACHES}
        expected = peer.run({"ids": fed["ids"]})["scores"]
        np.testing.assert_allclose(executor.run(fed)["scores"], expected, rtol=1e-4, atol=1e-5)
        assert preparations(executor) == number + 1


def test_failures_are_named_and_leave_the_executor(executor: Executor) -> None:
    fed = feeds(20)
    expected = as_bytes(executor.run(fed))
    with pytest.raises(OperatorError, match="index"):
        executor.run({**fed, "ids": fed["ids"] + WORDS})
    with pytest.raises(FeedError, match=r"'past_key\.0' must be float32"):
        executor.run({**fed, "past_key.0": fed["past_key.0"].astype(np.float64)})
    with pytest.raises(dagexec.errors.DagexecError, match="do not broadcast together"):
        executor.run({**fed, "past_key.1": feeds(19)["past_key.1"]})
    with pytest.raises(RunTimeoutError):
        executor.run(fed, timeout=0.0)
    assert as_bytes(executor.run(fed)) == expected


def test_a_net_that_does_more_with_its_caches_is_run_as_it_is() -> None:
    model = decoder(mixed=True)
    peer = Peer(model)
    with dagexec.compile(model, num_workers=1) as executor:
        for length in (20, 21, 22, 23, 24):
            fed = feeds(length)
            peer.caches = {name: fed[name] for name in CACHES}
            expected = peer.run({"ids": fed["ids"]})
            for name, array in executor.run(fed).items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5)
        assert preparations(executor) == 5
