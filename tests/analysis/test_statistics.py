"""Statistics of times that were measured in turns: against SciPy, and against noise that is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.analysis import statistics
from dagexec.analysis.rounds import Limits, measure
from dagexec.analysis.statistics import ALPHA, NOTABLE, Finding, spread, verdicts, warm_up

Floats = npt.NDArray[np.float64]
EXPERIMENTS = 200


def noise(kind: str, rounds: int, contenders: int, seed: int) -> Floats:
    """Seconds of contenders that are alike."""
    random = np.random.default_rng(seed)
    shape = rounds, contenders
    own = 0.03 * random.standard_normal(shape)
    if kind == "heavy tails":
        own = 0.03 * random.standard_t(2, shape)
    elif kind == "slow periods":
        own += 0.5 * (np.cumsum(random.random((rounds, 1)) < 0.1, axis=0) % 2)
    elif kind == "interrupted":
        own += (random.random(shape) < 0.15) * random.exponential(0.5, shape)
    elif kind == "two speeds":
        own += 0.3 * (random.random(shape) < 0.5)
    return np.exp(own)


KINDS = ("normal", "heavy tails", "slow periods", "interrupted", "two speeds")


def judged(times: Floats, seed: int = 0) -> list[statistics.Verdict]:
    """The verdicts of all contenders but the first, which is the base."""
    return list(verdicts({str(place): list(row) for place, row in enumerate(times.T)}, "0", seed).values())


@pytest.mark.slow
@pytest.mark.parametrize("contenders", [2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_contenders_that_are_alike_are_called_different_in_at_most_a_twentieth_of_experiments(
    kind: str, contenders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "NOTABLE", 0.0)  # so that it is the intervals alone which keep the promise
    wrong = [
        any(one.finding is not Finding.SAME for one in judged(noise(kind, 30, contenders, seed), seed))
        for seed in range(EXPERIMENTS)
    ]
    assert sum(wrong) <= ALPHA * EXPERIMENTS


@pytest.mark.parametrize("kind", ["normal", "slow periods", "interrupted"])
def test_a_tenth_more_time_is_seen_in_forty_rounds_and_said_with_its_size(kind: str) -> None:
    times = noise(kind, 40, 3, 0)
    times[:, 1] *= 1.1
    times[:, 2] /= 1.1
    slower, faster = judged(times)
    assert (slower.finding, faster.finding) == (Finding.SLOWER, Finding.FASTER)
    assert slower.ratio == pytest.approx(1.1, rel=0.02)
    assert faster.ratio == pytest.approx(1 / 1.1, rel=0.02)
    assert "times as slow" in slower.sentence
    assert "times as fast" in faster.sentence


def test_less_than_what_another_place_in_memory_makes_is_no_difference() -> None:
    times = np.exp(1e-4 * np.random.default_rng(0).standard_normal((30, 2)))
    times[:, 1] *= 1 + NOTABLE / 2
    (verdict,) = judged(times)
    assert verdict.finding is Finding.SAME
    assert NOTABLE <= verdict.visible < 1.1 * NOTABLE
    assert verdict.sentence == f"no measurable difference; one of {verdict.visible:.1%} would have been seen"


def test_intervals_of_independent_rounds_are_those_of_scipy() -> None:
    from scipy import stats  # takes a second, and all processes of `make test` collect this file

    differences = np.random.default_rng(3).standard_normal(80) / 10
    times = np.exp(np.column_stack([np.zeros(80), differences]))
    (verdict,) = judged(times)
    found = stats.bootstrap(
        (differences,),
        lambda values, axis: stats.trim_mean(values, 0.2, axis=axis),
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert verdict.ratio == pytest.approx(np.exp(stats.trim_mean(differences, 0.2)))
    width = np.log(verdict.high / verdict.low)
    assert found.high - found.low <= width <= 1.15 * (found.high - found.low)


def test_rounds_that_resemble_their_neighbors_say_less() -> None:
    random = np.random.default_rng(0)
    independent, alike = random.standard_normal(100), np.repeat(random.standard_normal(20), 5)
    widths = [
        one.high / one.low
        for values in (independent, alike)
        for one in judged(np.exp(np.column_stack([np.zeros(100), 0.1 * values / values.std()])))
    ]
    assert np.log(widths[1]) > 1.5 * np.log(widths[0])


def test_first_rounds_that_are_slower_do_not_count() -> None:
    times = noise("normal", 40, 2, 0)
    assert warm_up(times) <= 5
    times[:6] *= 1.5
    assert 6 <= warm_up(times) <= 10


def test_a_trend_is_told_and_chance_is_not() -> None:
    flat = noise("normal", 60, 1, 0)[:, 0]
    assert spread(list(flat)).remarks == ()
    rising = spread(list(flat * np.linspace(1, 1.2, 60)))
    assert rising.trend == pytest.approx(0.2, abs=0.04)
    assert rising.remarks[0].startswith("slower by ")


def test_two_speeds_are_told_apart_and_one_is_not_taken_for_two() -> None:
    assert all(spread(list(noise(kind, 60, 1, 1)[:, 0])).modes is None for kind in ("normal", "heavy tails"))
    random = np.random.default_rng(0)
    fast = random.random(60) < 0.4
    found = spread(list(np.where(fast, 15.2e-3, 20.5e-3) * np.exp(0.02 * random.standard_normal(60))))
    assert found.modes == pytest.approx((15.2e-3, 20.5e-3, fast.mean()), rel=0.02)
    assert found.remarks == (f"two speeds: 15.2 ms in {fast.mean():.0%} of the rounds, else 20.6 ms",)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 8 rounds for an interval, found 7"):
        verdicts({"a": [1.0] * 7, "b": [1.0] * 7}, "a")


def test_every_contender_runs_once_a_round_in_a_random_order() -> None:
    order: list[str] = []
    done: list[float] = []
    contenders = {name: (lambda name=name: order.append(name)) for name in "abc"}  # type: ignore[misc]
    found = measure(contenders, Limits(rounds=40), after_round=lambda: order.append("|"), progress=done.append)
    rounds = "".join(order).split("|")[:-1]
    assert [len(row) for row in found.seconds.values()] == [40, 40, 40]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) == 6
    assert done == pytest.approx([number / 40 for number in range(1, 41)])


def test_rounds_end_when_intervals_are_narrow_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    random = np.random.default_rng(0)

    def run(seconds: float, spread: float) -> None:
        nonlocal clock
        clock += seconds * np.exp(spread * random.standard_normal())

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    steady = {name: (lambda: run(1.0, 0.01)) for name in "ab"}
    assert len(measure(steady, Limits(seconds=1e6)).seconds["a"]) == 16
    unsteady = {name: (lambda: run(1.0, 0.5)) for name in "ab"}
    assert 50 <= len(measure(unsteady, Limits(seconds=120)).seconds["a"]) <= 60
    assert len(measure(unsteady, Limits(seconds=0)).seconds["a"]) == 8
