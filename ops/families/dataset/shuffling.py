"""Orders that Caffe2's binaries shuffle to: the C++ standard's minimal generator, drawn as GNU's library draws it.

Caffe2 shuffles with a generator of a fixed seed, so that its order is the same in every run, and is kept here.
"""

from __future__ import annotations

from dagexec.ops.base.blocks import Array

_MODULUS, _FACTOR = 2**31 - 1, 16807
_RANGE = _MODULUS - 2
"""Between the least number, 1, and the largest."""


class MinimalStandard:
    """Lehmer's generator with 16807 modulo 2^31 - 1 (Park and Miller, 1988), from 1."""

    def __init__(self) -> None:
        """One that has given nothing yet."""
        self._state = 1

    def below(self, bound: int) -> int:
        """The next number from 0 to `bound` - 1, each as likely, by division and rejection."""
        scale = _RANGE // bound
        while True:
            self._state = self._state * _FACTOR % _MODULUS
            number = (self._state - 1) // scale
            if number < bound:
                return number


def shuffle(values: Array, generator: MinimalStandard) -> None:
    """Fisher and Yates's shuffle in place; two exchanges take one number where the generator's range allows it."""
    count = len(values)
    if count * count > _RANGE:
        for place in range(1, count):
            _exchange(values, place, generator.below(place + 1))
        return
    place = 1
    if count and count % 2 == 0:
        _exchange(values, 1, generator.below(2))
        place = 2
    while place < count:
        first, second = divmod(generator.below((place + 1) * (place + 2)), place + 2)
        _exchange(values, place, first)
        _exchange(values, place + 1, second)
        place += 2


def _exchange(values: Array, a: int, b: int) -> None:
    values[a], values[b] = values[b].copy(), values[a].copy()
