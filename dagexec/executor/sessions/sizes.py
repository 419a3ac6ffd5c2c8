"""What a run of a session tells of the sizes of the next one: how long caches are, and what grows with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dagexec.core.schema import TensorType
from dagexec.platform.records import dataclass

Types = Mapping[str, TensorType]
Growth = Mapping[str, tuple[int, int]]
"""Of blobs, the axis that is as long as the caches, and by how much it is longer."""

LEAST_BOUND = 1 << 10
"""Positions that nets of steps are made for at first. What grows beside caches, such as masks, takes little."""

MOST_AT_ONCE = 8
"""Positions that a step adds at most; for more of them, a prompt, the model as it is computes attention faster."""


@dataclass(frozen=True)
class StepSizes:
    """Of a run that puts positions into caches.

    Attributes:
        types: of what the caller feeds.
        length: how many positions there are before it.
        added: how many there are more after it.
        axes: of states that are caches, where positions are.
    """

    types: Types
    length: int
    added: int
    axes: Mapping[str, int]

    @property
    def end(self) -> int:
        """How many positions there are after it."""
        return self.length + self.added

    def following(self) -> StepSizes:
        """The run after this one, of inputs of the same types."""
        return StepSizes(self.types, self.end, self.added, self.axes)

    def next(self, types: Types, learned: Callable[[], StepSizes | None]) -> tuple[StepSizes, Growth, bool] | None:
        """The run after this one, for inputs of these types, which of them grow, and whether other sizes stay.

        Where they are those of this run but for what grows, it adds as many positions. Otherwise inference has
        `learned` its sizes, and what was as long as the caches in this run, and is again, grows. None for a run that
        cannot be a step.
        """
        growth = self._growth(types)
        if growth is not None:
            return StepSizes(types, self.end, self.added, self.axes), growth, True
        sizes = learned()
        if sizes is None or sizes.length != self.end or sizes.axes != self.axes:
            return None
        growth = {
            name: (axis, sizes.added)
            for name, kind in types.items()
            if name in self.types
            for axis, (old, new) in enumerate(zip(self.types[name].shape, kind.shape, strict=False))
            if (old, new) == (self.end, sizes.end)
        }
        return sizes, growth, False

    def _growth(self, types: Types) -> Growth | None:
        """What grows among inputs of another run of the same sizes; None where other sizes differ."""
        growth: dict[str, tuple[int, int]] = {}
        for name, kind in types.items():
            before = self.types.get(name)
            if before is None or before.meta is not kind.meta or len(before.shape) != len(kind.shape):
                return None
            pairs = enumerate(zip(before.shape, kind.shape, strict=True))
            for axis, old, new in [(axis, old, new) for axis, (old, new) in pairs if old != new]:
                if name in growth or new < self.end or new - self.end != old - self.length:
                    return None
                growth[name] = axis, new - self.end
        return growth if len(types) == len(self.types) else None


def longer(kind: TensorType, axis: int, more: int) -> TensorType:
    """A type with so many more along an axis."""
    return TensorType((*kind.shape[:axis], kind.shape[axis] + more, *kind.shape[axis + 1 :]), kind.meta)


def learned(types: Types, before: Types, after: Mapping[str, TensorType | None]) -> StepSizes | None:
    """What the types of states before and after a run tell of it; None where these do not grow together."""
    axes: dict[str, int] = {}
    sizes: set[tuple[int, int]] = set()
    for name, kind in before.items():
        result = after.get(name)
        if result is None or len(result.shape) != len(kind.shape):
            return None
        pairs = enumerate(zip(kind.shape, result.shape, strict=True))
        for axis, old, new in [(axis, old, new) for axis, (old, new) in pairs if old != new]:
            if name in axes:
                return None
            axes[name] = axis
            sizes.add((old, new - old))
    if len(sizes) != 1:
        return None
    length, added = sizes.pop()
    return StepSizes(types, length, added, axes) if added > 0 else None
