"""Statistics of times that were measured in turns: is one contender faster than another, by how much, how certainly.

In each *round* every contender runs once, in a random order. A disturbance of the machine slows all runs of a round, so
contenders are compared round by round: the logarithm of the ratio of two times of one round is one observation, and the
ratio of the contenders is that of a trimmed mean of all. Its interval comes from a bootstrap of rounds, in blocks of
neighbors as those resemble each other (Kuensch 1989). With many contenders, Holm's procedure (1979) bounds the chance
of calling any of them different by mistake.

A few lines of NumPy suffice: `scipy.stats.bootstrap` draws no blocks, and SciPy would be the largest of the packages
that `import dagexec` needs. `tests/analysis/test_statistics.py` checks the intervals against SciPy's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from dagexec.platform.records import dataclass

Floats = npt.NDArray[np.float64]

ALPHA = 0.05
"""The chance that contenders are called different by mistake, over all of them."""

NOTABLE = 0.02
"""A part of the time. Two copies of one net differ as much by where they are in memory and which was made first
(`benchmarks/null_comparison.py`), so less is called nothing."""

RESAMPLES = 4000

FEWEST_ROUNDS = 8
"""The least for an interval."""

_TRIMMED = 0.2  # of the observations, at each end
_FEWEST_LEFT = 0.5  # of the rounds, after the warm-up
_TREND_P = 0.01
_TREND_CHANGE = 0.03
_MODES_APART = 3.0  # standard deviations; by 2 two normal distributions begin to have two peaks (Ashman 1994)
_SMALLEST_MODE = 0.15


class Finding(StrEnum):
    """The result for a contender."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no measurable difference"


@dataclass(frozen=True)
class Verdict:
    """One contender against the base.

    Attributes:
        ratio: of its time over the base's.
        low, high: an interval of that, at a level by which all verdicts together are wrong with chance `ALPHA`.
        finding: what follows from the interval.
        visible: the smallest difference, as a part of the time, that these rounds could have shown.
    """

    ratio: float
    low: float
    high: float
    finding: Finding
    visible: float

    @property
    def sentence(self) -> str:
        """The verdict in words, for "X is ..."."""
        if self.finding is Finding.SAME:
            return f"no measurable difference; one of {self.visible:.1%} would have been seen"
        if self.finding is Finding.FASTER:
            return f"{1 / self.ratio:.3g} times as fast ({1 / self.high:.3g} to {1 / self.low:.3g})"
        return f"{self.ratio:.3g} times as slow ({self.low:.3g} to {self.high:.3g})"


def warm_up(times: Floats) -> int:
    """The number of rounds at the beginning that are unlike the rest, in times [rounds, contenders]; at most half.

    By the marginal standard error rule (White 1997): those whose removal makes the error of the mean smallest.
    """
    rounds = np.log(times).mean(axis=1)
    limit = int(len(rounds) * (1 - _FEWEST_LEFT))
    errors = [rounds[start:].var() / (len(rounds) - start) for start in range(limit + 1)]
    return int(np.argmin(errors)) if errors else 0


def verdicts(times: Mapping[str, Sequence[float]], base: str, seed: int = 0) -> dict[str, Verdict]:
    """The verdict on each contender against `base`, from seconds of rounds in order, without the warm-up.

    Raises ValueError for fewer than 8 rounds.
    """
    others = [name for name in times if name != base]
    logs = {name: np.log(np.asarray(seconds, np.float64)) for name, seconds in times.items()}
    count = len(logs[base])
    if count < FEWEST_ROUNDS:
        raise ValueError(f"expected at least {FEWEST_ROUNDS} rounds for an interval, found {count}")
    random, differences = np.random.default_rng(seed), {name: logs[name] - logs[base] for name in others}
    centers = {name: _center(differences[name]) for name in others}
    draws = {name: _draws(differences[name], random) for name in others}
    chances = {name: _chance(draws[name]) for name in others}
    seconds: dict[str, Verdict] = {}
    rejects = True
    for place, name in enumerate(sorted(others, key=chances.__getitem__)):
        level = ALPHA / (len(others) - place)
        low, high = np.quantile(draws[name], (level / 2, 1 - level / 2))
        verdict = _verdict(float(centers[name]), float(low), float(high))
        rejects = rejects and verdict.finding is not Finding.SAME
        seconds[name] = verdict if rejects else _verdict(float(centers[name]), float(low), float(high), same=True)
    return {name: seconds[name] for name in others}


def half_width(times: Floats, base: Floats) -> float:
    """Of the interval of the ratio of two contenders, alone, as a part of it."""
    low, high = np.quantile(_draws(np.log(times) - np.log(base), np.random.default_rng(0)), (ALPHA / 2, 1 - ALPHA / 2))
    return float(math.expm1((high - low) / 2))


def _verdict(center: float, low: float, high: float, *, same: bool = False) -> Verdict:
    """Of logarithms of ratios."""
    margin = math.log1p(NOTABLE)
    finding = Finding.SAME
    if not same and high < -margin:
        finding = Finding.FASTER
    elif not same and low > margin:
        finding = Finding.SLOWER
    visible = math.expm1((high - low) / 2 + margin)
    return Verdict(math.exp(center), math.exp(low), math.exp(high), finding, visible)


def _draws(values: Floats, random: np.random.Generator) -> Floats:
    """Centers of resamples of blocks of neighbors, around the end, widened as few observations ask for.

    The length of blocks is the best for a process of their autocorrelation (Buehlmann and Kuensch 1999). Percentiles of
    few observations are too narrow by what Student's distribution is wider than the normal one.
    """
    count, around = len(values), values - _center(values)
    alike = float(np.clip(np.dot(around[:-1], around[1:]) / max(np.dot(around, around), 1e-300), 0.0, 0.9))
    best = (math.sqrt(6) * alike / (1 - alike**2)) ** (2 / 3) * count ** (1 / 3)
    length = int(min(max(1, round(best)), max(1, count // 4)))
    starts = random.integers(0, count, (RESAMPLES, -(-count // length)))
    places = (starts[:, :, np.newaxis] + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    center = _center(values)
    freedom = max(2.0, (1 - 2 * _TRIMMED) * count / length - 1)
    student = 1 + 1.21 / freedom + 1.44 / freedom**2  # over the normal 97.5% point (Abramowitz and Stegun 26.7.5)
    wider = math.sqrt(1 + 1 / freedom) * student
    draws: Floats = center + wider * (_center(values[places]) - center)
    return draws


def _center(values: Floats) -> Floats:
    """The trimmed mean along the last axis."""
    ordered = np.sort(values, axis=-1)
    cut = int(_TRIMMED * values.shape[-1])
    mean: Floats = ordered[..., cut : values.shape[-1] - cut].mean(axis=-1)
    return mean


def _chance(draws: Floats) -> float:
    """Twice the share of resamples on the less frequent side of 0."""
    below = float(np.mean(draws <= 0))
    return 2 * min(below, 1 - below) + 1 / len(draws)


@dataclass(frozen=True)
class Spread:
    """The distribution of one contender's times.

    Attributes:
        median, low, high: in seconds, with the quartiles.
        trend: the change from the first round to the last, as a part of the time; 0 where it may be chance.
        modes: seconds of two speeds that it switches between, and the share of rounds at the first; None for one speed.
    """

    median: float
    low: float
    high: float
    trend: float
    modes: tuple[float, float, float] | None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for a reader."""
        remarks = []
        if self.trend:
            way = "slower" if self.trend > 0 else "faster"
            remarks.append(f"{way} by {abs(self.trend):.0%} from the first to the last round")
        if self.modes is not None:
            first, second, share = self.modes
            remarks.append(f"two speeds: {first * 1e3:.3g} ms in {share:.0%} of the rounds, else {second * 1e3:.3g} ms")
        return tuple(remarks)


def spread(seconds: Sequence[float]) -> Spread:
    """The distribution of these times, of rounds in order."""
    times = np.asarray(seconds, np.float64)
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high), _trend(times), _modes(times))


def _trend(times: Floats) -> float:
    """Theil's slope over all rounds, as a part of the median; 0 where Kendall's test sees none, or it is small."""
    count = len(times)
    if count < FEWEST_ROUNDS:
        return 0.0
    first, second = np.triu_indices(count, 1)
    differences = times[second] - times[first]
    score = float(np.sign(differences).sum())
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    chance = math.erfc(max(0.0, abs(score) - 1) / deviation / math.sqrt(2))
    change = float(np.median(differences / (second - first))) * (count - 1) / float(np.median(times))
    return change if chance < _TREND_P and abs(change) > _TREND_CHANGE else 0.0


def _modes(times: Floats) -> tuple[float, float, float] | None:
    """Two groups of times, split where their variances are least (Otsu 1979), if they lie apart (Ashman's D)."""
    ordered = np.sort(times)
    count = len(ordered)
    smallest = max(3, math.ceil(_SMALLEST_MODE * count))
    if count < 2 * smallest:
        return None
    places = range(smallest, count - smallest + 1)
    cut = min(places, key=lambda place: place * ordered[:place].var() + (count - place) * ordered[place:].var())
    first, second = ordered[:cut], ordered[cut:]
    width = math.sqrt((first.var() + second.var()) / 2)
    apart = float(second.mean() - first.mean())
    if apart <= _MODES_APART * width or apart < 2 * NOTABLE * float(first.mean()):
        return None
    return float(np.median(first)), float(np.median(second)), cut / count
