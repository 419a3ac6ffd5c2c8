"""The simulation: what it conserves, what follows from the seed, failures of replicas, wrong descriptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.cluster.simulation import (
    ClosedLoop,
    Cluster,
    Constant,
    Empirical,
    Exponential,
    Failures,
    Load,
    Poisson,
    Trace,
    simulate,
)
from dagexec.errors import SettingError

CLUSTERS = st.builds(
    Cluster,
    st.sampled_from([Constant(1.0), Exponential(1.0), Empirical([0.5, 1.0, 4.0])]),
    replicas=st.integers(1, 5),
    threads=st.integers(1, 3),
    batch_costs=st.sampled_from([(1.0,), (1.0, 1.5)]),
    after_idle=st.sampled_from([(), ((0.0, 0.0), (1.0, 0.5))]),
    network=st.sampled_from([Constant(0.0), Exponential(0.2)]),
    send_seconds=st.sampled_from([0.0, 0.1]),
    receive_seconds=st.sampled_from([0.0, 0.05]),
    front_ends=st.integers(1, 3),
    routing=st.sampled_from(["least", "round_robin", "random"]),
    max_outstanding=st.sampled_from([None, 1, 2]),
    max_queued=st.sampled_from([None, 0, 3]),
    cores=st.sampled_from([None, 1, 2]),
    replicas_per_machine=st.sampled_from([None, 1, 2]),
    front_ends_share=st.booleans(),
    interference=st.sampled_from([(1.0,), (1.0, 0.9)]),
    failures=st.sampled_from([None, Failures(20.0, 3.0), Failures(2.0, 5.0)]),
)
LOADS = st.sampled_from([Poisson(2.0), Trace([0.0, 0.1, 0.1, 3.0]), ClosedLoop(1), ClosedLoop(7, Exponential(1.0))])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cluster=CLUSTERS, load=LOADS, seed=st.integers(0, 3))
def test_every_request_is_answered_refused_or_failed_after_the_time_that_it_takes(
    cluster: Cluster, load: Load, seed: int
) -> None:
    outcome = simulate(cluster, load, 60, seed)
    assert not np.isnan(outcome.arrived).any()
    answered = ~np.isnan(outcome.answered)
    assert np.count_nonzero(answered) + outcome.refused + outcome.failed == 60
    if cluster.failures is None:
        assert outcome.retried == outcome.failed == 0
    least = 0.5 if isinstance(cluster.service, Empirical) else 1.0 if isinstance(cluster.service, Constant) else 0.0
    least += cluster.send_seconds + cluster.receive_seconds
    assert ((outcome.answered - outcome.arrived)[answered] >= least - 1e-9).all()
    assert 0 <= outcome.replica_utilization <= 1 + 1e-9
    assert 0 <= outcome.front_end_utilization <= 1 + 1e-9
    again = simulate(cluster, load, 60, seed)
    assert np.array_equal(outcome.answered, again.answered, equal_nan=True)


def test_another_seed_draws_other_times() -> None:
    first, second = (simulate(Cluster(Exponential(1.0)), Poisson(0.5), 100, seed) for seed in (0, 1))
    assert not np.array_equal(first.answered, second.answered)


def test_without_contention_answers_come_when_arithmetic_says() -> None:
    cluster = Cluster(
        Constant(10.0), network=Constant(2.0), send_seconds=1.0, receive_seconds=0.5, max_outstanding=1, max_queued=1
    )
    outcome = simulate(cluster, Trace([0.0, 1.0, 3.0, 50.0]), 4)
    # 1 + 2 + 10 + 2 + 0.5; the second waits for that, and for all of its own; the third finds no place.
    assert outcome.answered.tolist()[:2] == [15.5, 31.0]
    assert np.isnan(outcome.answered[2])
    assert outcome.answered[3] == 65.5
    assert outcome.refused == 1


def test_a_run_after_idle_time_takes_longer() -> None:
    cluster = Cluster(Constant(10.0), after_idle=((0.0, 0.0), (10.0, 1.0), (30.0, 2.0)))
    outcome = simulate(cluster, Trace([0.0, 5.0, 30.0, 55.5, 200.0]), 5)
    # Idle for 0, 0 (it waited), 10, 14.5 and more than 30 seconds.
    assert outcome.answered.tolist() == [10.0, 20.0, 41.0, 55.5 + 10 + 1 + 4.5 / 20, 212.0]


def test_two_jobs_on_one_core_take_turns() -> None:
    cluster = Cluster(Constant(2.0), replicas=2, cores=1)
    assert simulate(cluster, Trace([0.0, 1.0]), 2).answered.tolist() == [3.0, 4.0]


def test_a_front_end_on_the_machine_of_the_replicas_takes_their_time() -> None:
    load = ClosedLoop(4)
    alone = Cluster(Constant(1.0), replicas=2, cores=2, send_seconds=0.25)
    assert simulate(alone, load, 2_000).throughput == pytest.approx(2.0, rel=0.01)
    shared = replace(alone, front_ends_share=True)
    assert simulate(shared, load, 2_000).throughput == pytest.approx(2 / 1.25, rel=0.01)


@pytest.mark.slow
def test_a_request_is_sent_to_another_replica_once_and_fails_with_that_one() -> None:
    cluster = Cluster(Constant(1.0), replicas=3, failures=Failures(5.0, 1.0))
    outcome = simulate(cluster, Poisson(1.0), 20_000, seed=1)
    # Alone, a run of 1 second ends before its replica does with probability exp(-1 / 5); queues make it worse.
    assert 1 - np.exp(-1 / 5) < outcome.retried / 20_000 < 0.35
    assert 0 < outcome.failed < outcome.retried
    rare = simulate(replace(cluster, failures=Failures(5_000.0, 1.0)), Poisson(1.0), 20_000, seed=1)
    assert 0 < rare.retried < 30
    assert rare.failed == 0


def test_dead_replicas_are_missed_while_they_are_replaced() -> None:
    cluster = Cluster(Constant(1.0), replicas=10, max_outstanding=1, failures=Failures(100.0, 25.0))
    outcome = simulate(cluster, ClosedLoop(10), 20_000)
    assert outcome.throughput == pytest.approx(10 * 100 / 125, rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicas": 0}, "replicas is at least 1"),
        ({"routing": "best"}, "routing is one of least, round_robin, random"),
        ({"max_queued": -1}, "max_queued is None or at least 0"),
        ({"interference": ()}, "interference is 1.0 and further"),
        ({"batch_costs": (2.0,)}, "batch_costs is 1.0 and further"),
        ({"after_idle": ((1.0, 0.1), (0.5, 0.1))}, "after_idle is pairs"),
        ({"send_seconds": -1.0}, "send_seconds is at least 0"),
    ],
)
def test_a_wrong_cluster_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Cluster(Constant(1.0), **wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-1.0),
        lambda: Exponential(0.0),
        lambda: Empirical([]),
        lambda: Empirical([1.0, -0.5]),
        lambda: Poisson(0.0),
        lambda: Trace([1.0]),
        lambda: Trace([1.0, 0.5]),
        lambda: ClosedLoop(0),
        lambda: simulate(Cluster(Constant(1.0)), Poisson(1.0), requests=1),
    ],
)
def test_wrong_times_and_loads_are_refused(make: Any) -> None:
    with pytest.raises(SettingError):
        make()
