"""The simulation against the formulas of queueing theory, which share nothing with it.

Kleinrock, Queueing Systems I (1975): M/M/1, M/M/c (Erlang C), M/D/1 and M/G/1 (Pollaczek and Khinchine), M/M/1/K, and
machines with a repairman. Times are in units of the mean service time, so a rate is a utilization.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from dagexec.cluster.simulation import (
    ClosedLoop,
    Cluster,
    Constant,
    Empirical,
    Exponential,
    Load,
    Outcome,
    Poisson,
    simulate,
)

SEEDS, REQUESTS = 8, 10_000


def mean(outcome: Outcome) -> float:
    return float(outcome.latencies.mean())


@cache
def runs(cluster: Cluster, load: Load) -> list[Outcome]:
    return [simulate(cluster, load, REQUESTS, seed) for seed in range(SEEDS)]


def agree(cluster: Cluster, load: Load, statistic: Callable[[Outcome], float], expected: float) -> None:
    """The mean over independent runs is as close to `expected` as their spread lets it be, and that is not far."""
    found = np.array([statistic(outcome) for outcome in runs(cluster, load)])
    error = found.std(ddof=1) / SEEDS**0.5
    assert error < 0.04 * expected
    assert abs(found.mean() - expected) < 5.4 * error + 1e-3 * expected  # Student's t: one test in a thousand fails


def erlang_c(servers: int, load: float) -> float:
    """The probability of waiting with `load` = rate / (rate of one server)."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("rate", [0.3, pytest.param(0.7, marks=pytest.mark.slow)])
def test_one_exponential_replica_is_m_m_1(rate: float) -> None:
    cluster, load = Cluster(Exponential(1.0)), Poisson(rate)
    agree(cluster, load, mean, 1 / (1 - rate))
    for share in (0.5, 0.95, 0.99):
        agree(cluster, load, lambda outcome: outcome.latency(share), -math.log(1 - share) / (1 - rate))  # noqa: B023
    agree(cluster, load, lambda outcome: outcome.throughput, rate)
    agree(cluster, load, lambda outcome: outcome.replica_utilization, rate)


@pytest.mark.parametrize(
    ("servers", "rate"), [(2, 1.4), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(4, 3.2), (16, 13.5)])]
)
def test_replicas_with_one_request_each_and_a_queue_before_them_are_m_m_c(servers: int, rate: float) -> None:
    cluster = Cluster(Exponential(1.0), replicas=servers, max_outstanding=1)
    waits, slack = erlang_c(servers, rate), servers - rate
    agree(cluster, Poisson(rate), mean, 1 + waits / slack)
    # An exponential service, after a wait that is exponential with rate `slack`, or none: how many take longer.
    for time in (0.5, 1.0, 3.0):
        longer = (1 - waits) * math.exp(-time)
        longer += waits * (slack * math.exp(-time) - math.exp(-slack * time)) / (slack - 1)
        agree(cluster, Poisson(rate), lambda outcome: float((outcome.latencies > time).mean()), longer)  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_one_replica_of_constant_time_is_m_d_1(rate: float) -> None:
    agree(Cluster(Constant(1.0)), Poisson(rate), mean, 1 + rate / (2 * (1 - rate)))


@pytest.mark.slow
def test_measured_times_are_m_g_1() -> None:
    samples = np.random.default_rng(0).lognormal(0.0, 0.6, 200)
    rate = 0.7 / samples.mean()
    wait = rate * (samples**2).mean() / (2 * (1 - 0.7))
    agree(Cluster(Empirical(tuple(samples))), Poisson(rate), mean, samples.mean() + wait)


@pytest.mark.slow
def test_random_routing_is_an_m_m_1_for_each_replica() -> None:
    agree(Cluster(Exponential(1.0), replicas=8, routing="random"), Poisson(5.6), mean, 1 / (1 - 0.7))


@pytest.mark.slow
def test_the_fewest_outstanding_requests_are_better_than_turns_and_those_than_chance() -> None:
    least, turns, chance = (
        mean(simulate(Cluster(Exponential(1.0), replicas=8, routing=routing), Poisson(5.6), 4 * REQUESTS))
        for routing in ("least", "round_robin", "random")
    )
    assert 1 + erlang_c(8, 5.6) / (8 - 5.6) < least < 0.8 * turns < 0.8 * 0.9 * chance


@pytest.mark.parametrize("room", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_full_queue_refuses_as_in_m_m_1_k(room: int) -> None:
    rate, places = 0.9, room + 1
    blocked = (1 - rate) * rate**places / (1 - rate ** (places + 1))
    cluster = Cluster(Exponential(1.0), max_outstanding=1, max_queued=room)
    agree(cluster, Poisson(rate), lambda outcome: outcome.refused / REQUESTS, blocked)


@pytest.mark.slow
def test_clients_that_think_are_machines_with_a_repairman() -> None:
    clients, think = 6, 4.0
    states = [math.factorial(clients) / math.factorial(clients - k) / think**k for k in range(clients + 1)]
    throughput = 1 - states[0] / sum(states)
    load = ClosedLoop(clients, Exponential(think))
    agree(Cluster(Exponential(1.0)), load, lambda outcome: outcome.throughput, throughput)
    agree(Cluster(Exponential(1.0)), load, mean, clients / throughput - think)


@pytest.mark.slow
@pytest.mark.parametrize("service", [Constant(1.0), Exponential(1.0)])
def test_replicas_that_share_a_core_are_processor_sharing_whatever_the_times(service: Constant | Exponential) -> None:
    # M/G/1-PS: 1 / (1 - rate) for any distribution (Kleinrock II, 4.4); there are always enough replicas.
    agree(Cluster(service, replicas=60, cores=1), Poisson(0.7), mean, 1 / (1 - 0.7))


@pytest.mark.slow
def test_two_cores_under_many_replicas_give_the_mean_of_m_m_2() -> None:
    # With exponential times, sharing two cores has the states of M/M/2, and so its mean.
    agree(Cluster(Exponential(1.0), replicas=80, cores=2), Poisson(1.4), mean, 1 + erlang_c(2, 1.4) / (2 - 1.4))


@pytest.mark.parametrize(
    ("replicas", "cores", "threads", "interference", "rate"),
    [
        (1, 2, 1, (1.0, 0.8), 1.0),
        (2, 2, 1, (1.0, 0.8), 1.6),
        (4, 2, 1, (1.0, 0.8), 1.6),
        (4, 4, 2, (1.0, 1.0, 1.0, 0.9), 1.8),
        (6, 2, 1, (1.0,), 2.0),
    ],
)
def test_busy_cores_give_what_they_can(
    replicas: int, cores: int, threads: int, interference: tuple[float, ...], rate: float
) -> None:
    cluster = Cluster(Constant(1.0), replicas=replicas, cores=cores, threads=threads, interference=interference)
    outcome = simulate(cluster, ClosedLoop(4 * replicas), 4_000)
    assert outcome.throughput == pytest.approx(rate, rel=0.02)


@pytest.mark.slow
def test_a_front_end_is_an_m_d_1_of_its_own_before_very_many_replicas() -> None:
    cluster = Cluster(
        Constant(5.0), replicas=1000, network=Constant(2.0), send_seconds=0.5, receive_seconds=0.0, max_outstanding=1
    )
    agree(cluster, Poisson(1.6), mean, 0.5 + 0.8 * 0.5 / (2 * (1 - 0.8)) + 2 + 5 + 2)
    agree(cluster, Poisson(1.6), lambda outcome: outcome.front_end_utilization, 0.8)


def test_a_front_end_bounds_the_throughput_of_any_number_of_replicas() -> None:
    cluster = Cluster(Constant(5.0), replicas=500, send_seconds=0.3, receive_seconds=0.2)
    assert simulate(cluster, ClosedLoop(900), 10_000).throughput == pytest.approx(2.0, rel=0.02)
    several = Cluster(Constant(5.0), replicas=500, send_seconds=0.3, receive_seconds=0.2, front_ends=4)
    assert simulate(several, ClosedLoop(900), 10_000).throughput == pytest.approx(8.0, rel=0.02)


def test_joined_requests_cost_what_a_run_of_them_costs() -> None:
    cluster = Cluster(Constant(1.0), batch_costs=(1.0, 1.2, 1.4, 1.6))
    assert simulate(cluster, ClosedLoop(8), 4_000).throughput == pytest.approx(4 / 1.6, rel=0.01)
