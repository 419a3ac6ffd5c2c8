"""Which implementation of oneDNN computes a problem: the one measured to be fastest, or one by rule.

Without a measurement it is the library's first, with one exception: Winograd's F(2x2, 3x3) goes before sums over taps
where the library has it, with copies into blocks of channels if need be. It took 0.5 to 0.9 of their time in all that
was measured, and is as accurate. F(4x4, 3x3) is faster still for large images of few channels, but must be measured.
"""

from __future__ import annotations

import logging

from dagexec.core.choices import choices, choose, measuring, processor_key
from dagexec.core.errors import UnsupportedFeatureError
from dagexec.ops.onednn.measuring import fastest
from dagexec.ops.onednn.problem import WINOGRAD, Candidate, Problem

logger = logging.getLogger("dagexec")

_SAFE_WINOGRAD = f"{WINOGRAD} jit_fp32_wino_2x3"
_LONG = 60.0  # seconds: what a search that the caller asks for may take


def choose_implementation(
    problem: Problem, *, reference: bool, search: bool = False, given_only: bool = False
) -> Candidate:
    """The candidate that computes `problem`.

    `reference` allows the library's plain loops, when there is nothing else. `search` measures without a budget;
    `given_only` uses no measured choice, but those of a file that the caller named. Raises UnsupportedFeatureError
    when there is no candidate.
    """
    key = _key(problem)
    if given_only:
        name = choices.find(key, given_only=True)
    elif search:
        with measuring(_LONG):
            name = choose(key, lambda seconds: _measured(problem, reference, seconds))
    else:
        name = choose(key, lambda seconds: _measured(problem, reference, seconds))
    found = problem.named(name, problem.threads) if name else None
    return found or _by_rule(problem, reference)


def _measured(problem: Problem, reference: bool, seconds: float) -> str:
    worthy = _worthy(list(problem.candidates()), problem, reference)
    return fastest(problem, worthy, seconds) if len(worthy) > 1 else worthy[0].name


def _worthy(candidates: list[Candidate], problem: Problem, reference: bool) -> list[Candidate]:
    """Those worth measuring: none for older instructions, and none for any geometry where there is one for this.

    Raises UnsupportedFeatureError when nothing is left.
    """
    special = [one for one in candidates if not one.is_general]
    newest = max((one.generation for one in special), default=0)
    kept = [one for one in special if one.generation == newest]
    if not all(one.has_own_layout for one in kept):
        return kept
    general = [one for one in candidates if one.is_general and not one.is_reference]
    if general or kept:
        return [*general[:1], *kept]
    if candidates and reference:
        return candidates[:1]
    what = "has only its reference implementation" if candidates else "has no implementation"
    raise UnsupportedFeatureError(f"{problem.label}: oneDNN {what}")


def _by_rule(problem: Problem, reference: bool) -> Candidate:
    """The candidate where nothing was measured.

    Copies into layouts of its own pay for an implementation when the alternative is a matrix product on unrolled
    windows, and these are of more than one tap.
    """
    candidates = list(problem.candidates())
    safe = [one for one in candidates if _SAFE_WINOGRAD in one.name]
    if safe:
        return safe[0]
    worthy = _worthy(candidates, problem, reference)
    special = [one for one in worthy if not one.is_general]
    return special[0] if special and (problem.taps > 1 or not special[0].has_own_layout) else worthy[0]


def _key(problem: Problem) -> str:
    """What a choice depends on, as text."""
    library = problem.library
    parts = [
        f"oneDNN {'.'.join(map(str, library.version))} isa {library.isa}",
        processor_key(),
        f"{problem.threads} thread(s)",
        problem.key,
        f"limit {problem.limit}",
        "cold weights" if problem.cold else "warm weights",
    ]
    return " | ".join(parts)
