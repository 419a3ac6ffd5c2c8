"""Which implementation of oneDNN computes a problem: the one measured to be fastest, or one by rule.

Without a measurement it is what was chosen for the same geometry and another batch. Where there is none it is the
library's first, or one of Winograd's algorithms where that is estimated to be faster: from the arithmetic that it
saves, the weights that it makes larger, and copies into blocks of channels. They are as accurate (docs/onednn.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

from dagexec.core.choices import choices, choose, measuring
from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import WEIGHTS
from dagexec.ops.engines.onednn.measuring import fastest
from dagexec.ops.engines.onednn.problem import NEWEST, WINOGRAD, Asked, Candidate, Problem, own_layout
from dagexec.ops.kernels.sharing import products_seconds
from dagexec.platform.processor import processor_key

logger = logging.getLogger("dagexec")

_WINOGRAD = {"wino_2x3": (2, 1.8, 16 / 9), "wino_4x3": (4, 2.5, 36 / 9)}
"""By a part of the name: pixels a side of a tile, speed against sums over taps, growth of the weights."""

_MIN_CHANNELS = 32  # for F(4x4, 3x3): with fewer the transforms take longer than the products
_PRODUCTS, _STREAM, _COPY = 5.5e10, 2.5e10, 1e10  # a second: products, bytes of weights, bytes copied; one core's
_TRANSFORM = 1.5e9  # a second: bytes of a filter that Winograd's algorithms transform in every run, one core's
_NARROW = 128  # columns of a matrix: with fewer, a product for each group is slower in proportion
_PLAIN_CHANNELS = 4  # at most so many are read as planes by the others
_FEW_PLACES = 64  # of a result: with fewer, products of one tap gain from blocks of channels more than copies cost
_LONG = 60.0  # seconds: what a search that the caller asks for may take


def choose_implementation(problem: Problem, *, search: bool = False, given_only: bool = False) -> Candidate:
    """The candidate that computes `problem`; never the library's plain loops. Every choice of a convolution or product
    is made here: a name kept under a key of all that it depends on (`core.choices`, also from a file), else by rule.

    `search` measures without a budget; `given_only` uses no measured choice, but those of a file that the caller named.
    Raises UnsupportedFeatureError when there is no candidate.
    """
    key = _key(problem)
    if given_only:
        name = choices.find(key, given_only=True)
    elif search:
        with measuring(_LONG):
            name = choose(key, lambda seconds: _measured(problem, seconds))
    else:
        name = choose(key, lambda seconds: _measured(problem, seconds), weight=estimated_seconds(problem))
    chosen = name or choices.near(key) if not (given_only or search) else name
    found = problem.named(chosen) if chosen else None
    if found is None or found.is_reference:
        return rule(problem)
    return found


def _measured(problem: Problem, seconds: float) -> str | None:
    worthy = _worthy(list(problem.candidates()), problem)
    return fastest(problem, worthy, seconds) if len(worthy) > 1 or problem.open else worthy[0].name


def _worthy(candidates: list[Candidate], problem: Problem) -> list[Candidate]:
    """Those worth measuring: none for any geometry where there is one for this, and few for older instructions.

    AVX2 has vectors of 8: where channels do not fill 16, and in products of few rows, it was up to 0.6 of the time.

    Raises UnsupportedFeatureError when nothing is left.
    """
    if problem.open and not all(one.is_reference for one in candidates):
        return [one for one in candidates if not one.is_reference]
    special = [one for one in candidates if not one.is_general]
    newest = max((one.generation for one in special), default=0)
    oldest = min(newest, 2) if problem.ragged else newest
    kept = [one for one in special if one.generation >= oldest]
    if not all(one.has_own_layout for one in kept):
        return kept
    general = [one for one in candidates if one.is_general and not one.is_reference]
    if general or kept:
        return [*general[:1], *kept]
    what = "has only its reference implementation" if candidates else "has no implementation"
    raise UnsupportedFeatureError(f"{problem.label}: oneDNN {what}")


def rule(problem: Problem) -> Candidate:
    """The candidate where nothing was measured. Raises UnsupportedFeatureError when there is none.

    What is estimated to be fastest is asked for first, and what cannot be faster than what was found is not asked for:
    to describe a convolution takes the library up to 40 ms, and 20 MB, where rows are long.
    """
    best: tuple[float, int, Candidate] | None = None
    for least, place, find in sorted(_ways(problem), key=lambda way: way[:2]):
        if best is not None and best[:2] <= (least, place):
            break
        for one in find():
            seconds = estimated_seconds(problem, one)
            if best is None or (seconds, place) < best[:2]:
                best = seconds, place, one
    return _worthy(list(problem.candidates()), problem)[0] if best is None else best[2]


def _ways(problem: Problem) -> Iterator[tuple[float, int, Callable[[], Iterable[Candidate]]]]:
    """The least that candidates are estimated to take, their place among equals, and what asks the library for them."""
    yield estimated_seconds(problem), 0, partial(_usual, problem)
    if problem.open:
        return
    if WINOGRAD in problem.algorithms:
        own = own_layout(WINOGRAD) if problem.own_layouts else ""  # for images in blocks of channels alone
        likely = [one for one in (Candidate(own + name, None) for name in _WINOGRAD) if _has_channels(one, problem)]
        yield min(estimated_seconds(problem, one) for one in likely), 1, partial(_winograds, problem)
    for place, asked in enumerate(problem.all_composed(), 2):
        yield estimated_seconds(problem, asked.likely), place, partial(_existing, asked)


def _winograds(problem: Problem) -> list[Candidate]:
    """The library's implementations of Winograd's algorithms."""
    offered = replace(problem, composed=None).candidates(WINOGRAD)
    return [one for one in offered if _winograd(one) and _has_channels(one, problem)]


def _existing(asked: Candidate | Asked) -> list[Candidate]:
    found = asked.find()
    return [] if found is None else [found]


def _usual(problem: Problem) -> list[Candidate]:
    """What the library would compute it by without Winograd's algorithms; none where there is no good one.

    Copies into layouts of its own pay for an implementation when the alternative is a matrix product on unrolled
    windows, and these are of more than one tap, or of few pixels. Filters that are fed are copied in every run, and
    the layout that `brgconv` wants is reached the slowest: it goes last then.
    """
    problem = replace(problem, composed=None)
    first = _plain_choice(problem)
    if first is not None:
        return [first]
    others = [one for one in problem.candidates() if not _winograd(one)]
    if all(one.is_reference for one in others):
        return []
    worthy = _worthy(others, problem)
    special = [one for one in worthy if not one.is_general]
    if problem.open:
        return [worthy[0]]
    if _is_fed(problem):
        special.sort(key=lambda one: "brgconv" in one.name and not (one.has_own_layout and _is_padded(problem)))
    return [special[0] if special and (_pays_copies(problem) or not special[0].has_own_layout) else worthy[0]]


def _plain_choice(problem: Problem) -> Candidate | None:
    """The library's first implementation, where none after it but Winograd's can be the choice; else None.

    That spares asking for all others, which takes longer than to make one.
    """
    first = next(problem.candidates(), None)
    if first is None or first.is_reference or _winograd(first):
        return None
    newest = first.generation == NEWEST.get(problem.library.isa.lanes)
    certain = newest and not first.is_general and not first.has_own_layout and not _is_fed(problem)
    return first if problem.open or certain else None


def _is_fed(problem: Problem) -> bool:
    """True when the filter is read in every run and may have changed."""
    return WEIGHTS in problem.tensors and WEIGHTS not in problem.constant


def _is_padded(problem: Problem) -> bool:
    """True when blocks of 16 channels leave room, so that copies to NHWC, which `brgconv` reads, are faster."""
    return problem.ragged and problem.fan_in // max(1, problem.taps) > _PLAIN_CHANNELS


def _pays_copies(problem: Problem) -> bool:
    """True when copies into blocks of channels cost less than they gain over a matrix product."""
    return problem.taps > 1 or (_is_fed(problem) and prod(problem.places) < _FEW_PLACES)


def _winograd(candidate: Candidate) -> str | None:
    """The algorithm of Winograd's that it is."""
    return next((part for part in _WINOGRAD if part in candidate.name), None)


def _has_channels(candidate: Candidate, problem: Problem) -> bool:
    """True when the geometry has enough channels for it: the taps of a window are no use to tell by."""
    filters = next(iter(problem.plain))
    descriptor, meta = problem.tensors[filters]
    channels = problem.fan_in // max(1, problem.taps)
    written = descriptor.nbytes // meta.itemsize // max(1, problem.fan_in)
    return "wino_4x3" not in candidate.name or (meta is FLOAT32 and min(channels, written) >= _MIN_CHANNELS)


def estimated_seconds(problem: Problem, candidate: Candidate | None = None) -> float:
    """An estimate of what a run takes on one core; without a candidate, by sums over taps."""
    if candidate is not None and candidate.seconds is not None:
        return candidate.seconds
    algorithm = None if candidate is None else _winograd(candidate)
    tile, speed, growth = (1, 1.0, 1.0) if algorithm is None else _WINOGRAD[algorithm]
    found = problem.products(tile) / speed / _PRODUCTS
    if candidate is not None and candidate.products:
        found *= candidate.products
    elif candidate is not None and candidate.is_general and problem.groups > 1:
        found *= max(1.0, _NARROW / problem.fan_in)
    filters = next(iter(problem.plain))
    if algorithm is not None and filters not in problem.constant:
        found += problem.tensors[filters][0].nbytes / _TRANSFORM
    elif problem.cold:
        found += problem.weights_nbytes * growth / _STREAM
    if candidate is not None and candidate.has_own_layout:
        copied = sum(tensor.nbytes for number, (tensor, _) in problem.tensors.items() if number != WEIGHTS)
        found += 2 * copied / _COPY
    return found


def shared_seconds(problem: Problem, candidate: Candidate) -> float:
    """The same for work that is to be shared; the estimate above, which compares implementations, is of the best case.

    It is no less than what convolutions of the zoo take, except by tiles of Winograd's.
    """
    found = estimated_seconds(problem, candidate)
    if candidate.seconds is not None or _winograd(candidate) is not None:
        return found
    return max(found, products_seconds(problem.products(1), problem.library.isa.lanes))


def _key(problem: Problem) -> str:
    """What a choice depends on, as text."""
    library = problem.library
    parts = [
        f"oneDNN {library.described()}",
        processor_key(),
        f"limit {problem.limit}",
        "cold weights" if problem.cold else "warm weights",
        problem.key,
    ]
    return " | ".join(parts)
