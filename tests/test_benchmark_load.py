"""The loads of the benchmark of many callers: who calls how often, what counts, and what is reported."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the benchmark's script can be imported, as they can from the script."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_each_arrival_is_one_call_whoever_of_the_callers_makes_it() -> None:
    from load_generators import open_loop

    calls = itertools.count()
    assert open_loop(lambda: next(calls), [0.0] * 50, callers=4).requests == 50
    assert next(calls) == 50


def test_an_arrival_that_had_to_wait_for_others_counts_from_its_own_moment() -> None:
    from load_generators import open_loop

    pause = threading.Event()
    found = open_loop(lambda: pause.wait(0.02), [0.0, 0.0, 0.0], callers=1)
    assert found.p99 > 0.05  # the last one, behind two others, and not what its own call took


def test_callers_of_a_closed_loop_begin_together_and_call_again() -> None:
    from load_generators import closed_loop

    together = threading.Barrier(3)
    calls = itertools.count()

    def call() -> None:
        if next(calls) < 3:
            together.wait(5)

    found = closed_loop(call, 3, 0.0)
    assert found.latencies.requests == next(calls) - 3 >= 3  # the first call of each does not count


def test_what_a_call_raises_ends_the_load() -> None:
    from load_generators import closed_loop, open_loop

    def fails() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        closed_loop(fails, 2, 5.0)
    with pytest.raises(OSError, match="no"):
        open_loop(fails, [0.0], 2)


def test_arrivals_are_those_of_a_poisson_process_and_the_same_for_a_seed() -> None:
    from load_generators import arrivals

    moments = np.array(arrivals(1000.0, 10.0, seed=3))
    gaps = np.diff(moments)
    assert len(moments) == 10_000
    assert gaps.mean() == pytest.approx(1e-3, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential
    assert moments.tolist() == arrivals(1000.0, 10.0, seed=3)


def test_a_row_compares_with_the_best_peer_of_each_round() -> None:
    from load import _rate_rows

    row = _rate_rows({"dagexec": [10.0, 30.0, 8.0], "a": [20.0, 10.0, 1.0], "b": [5.0, 60.0, 2.0]})
    assert row["ratios"] == [0.5, 0.5, 4.0]
    assert row["ratio"] == 0.5
