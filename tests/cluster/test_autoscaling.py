"""How many replicas are wanted: on a clock of the test's."""

from __future__ import annotations

import random

import pytest

from dagexec.cluster.autoscaling import Autoscaler, Autoscaling
from dagexec.errors import SettingError


def test_more_replicas_are_wanted_at_once_and_within_the_bounds() -> None:
    scaler = Autoscaler(Autoscaling(min_replicas=2, max_replicas=5, target_outstanding=2, downscale_seconds=10))
    assert [scaler.replicas(outstanding, 0.0) for outstanding in (0, 4, 5, 9, 100)] == [2, 2, 3, 5, 5]


def test_fewer_are_wanted_once_they_have_sufficed_for_long_enough() -> None:
    scaler = Autoscaler(Autoscaling(min_replicas=1, max_replicas=8, target_outstanding=1, downscale_seconds=10))
    assert scaler.replicas(8, 0.0) == 8
    assert scaler.replicas(0, 1.0) == 8
    assert scaler.replicas(3, 6.0) == 8
    assert scaler.next_change() == 10.0
    assert scaler.replicas(0, 9.9) == 8
    assert scaler.replicas(0, 10.0) == 3  # what was wanted at 6 seconds
    assert scaler.next_change() == 16.0
    assert scaler.replicas(0, 16.0) == 1
    assert scaler.next_change() is None


def test_a_load_that_comes_again_within_the_time_ends_no_replica() -> None:
    scaler = Autoscaler(Autoscaling(min_replicas=1, max_replicas=8, target_outstanding=1, downscale_seconds=10))
    for start in range(0, 100, 9):
        assert scaler.replicas(8, float(start)) == 8
        assert scaler.replicas(0, start + 8.5) == 8


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_most_that_was_wanted_lately(seed: int) -> None:
    chance = random.Random(seed)
    bounds = Autoscaling(min_replicas=1, max_replicas=9, target_outstanding=1.5, downscale_seconds=chance.uniform(0, 5))
    scaler, now = Autoscaler(bounds), 0.0
    seen: list[tuple[float, int]] = []
    for _ in range(200):
        now += chance.expovariate(2)
        outstanding = chance.randrange(15)
        seen.append((now, bounds.wanted(outstanding)))
        lately = [wanted for then, wanted in seen[:-1] if then + bounds.downscale_seconds > now]
        assert scaler.replicas(outstanding, now) == max([*lately, seen[-1][1]])


@pytest.mark.parametrize(
    "bad",
    [
        {"min_replicas": 0, "max_replicas": 1},
        {"min_replicas": 2, "max_replicas": 1},
        {"min_replicas": 1.5, "max_replicas": 2},
        {"min_replicas": 1, "max_replicas": 2, "target_outstanding": 0},
        {"min_replicas": 1, "max_replicas": 2, "downscale_seconds": -1},
        {"min_replicas": 1, "max_replicas": 2, "downscale_seconds": float("inf")},
    ],
)
def test_bounds_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="autoscaling"):
        Autoscaling(**bad)
