"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: what is wrong, in words.
        file: where, from the root of the repository.
        before: text that is there exactly once.
        after: what stands in its place.
        tests: what should see it, as pytest takes it.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
