from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dagexec.platform.speed import arithmetic_speed


@pytest.fixture
def measured_anew() -> Iterator[None]:
    arithmetic_speed.cache_clear()
    yield
    arithmetic_speed.cache_clear()


@pytest.mark.usefixtures("measured_anew")
def test_the_speed_is_what_the_shortest_of_its_products_took(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [moment for run in range(40) for moment in (run, run + (1e-6 if run == 7 else 2e-6))]
    monkeypatch.setattr(time, "perf_counter", lambda: moments.pop(0))
    flops = 2 * 64**3
    assert arithmetic_speed() == pytest.approx(flops / 1e-6 / 85e9)
    assert not moments


@pytest.mark.usefixtures("measured_anew")
def test_it_is_measured_once_and_any_machine_has_one() -> None:
    assert 0.01 < arithmetic_speed() < 100
    assert arithmetic_speed() == arithmetic_speed()
