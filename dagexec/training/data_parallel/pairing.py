"""Pairs of devices that form a tree, and the order in which the gradients of micro-batches are added.

Both follow one rule: neighbors first, then neighboring sums. So a tree over N devices, and one device that goes
through N micro-batches, add the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from dagexec.platform.records import dataclass

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class DevicePair:
    """A device, by its number, and the one it gets parameters from and gives gradients to."""

    parent: int
    device: int


def device_pairs(count: int, close: Callable[[int, int], bool] | None = None) -> tuple[DevicePair, ...]:
    """A tree over the devices 0 to `count` - 1: the root, whose parent is NO_PARENT, and a pair for every other one.

    Devices that are `close`, such as GPUs that reach each other's memory, are paired first, in as many rounds as a
    tree of all devices has levels; then neighbors among those that are left, round by round, until one is left: the
    root. A device without a neighbor, where their number is odd, continues to the next round.
    """
    unpaired = list(range(count))
    pairs: list[DevicePair] = []
    if close is not None:
        for _ in range((count - 1).bit_length()):
            place = 0
            while place < len(unpaired):
                partner = next((other for other in unpaired[place + 1 :] if close(unpaired[place], other)), None)
                if partner is not None:
                    pairs.append(DevicePair(unpaired[place], partner))
                    unpaired.remove(partner)
                place += 1
    while len(unpaired) > 1:
        pairs += [DevicePair(unpaired[place], unpaired[place + 1]) for place in range(0, len(unpaired) - 1, 2)]
        unpaired = unpaired[::2]
    return (DevicePair(NO_PARENT, unpaired[0]), *pairs)


@dataclass(frozen=True, slots=True)
class Merges:
    """What is done with the gradients of one micro-batch.

    Attributes:
        levels: the sums kept before that are added to it, in order, each then free again.
        keep: the level under which the result is kept; None when it is the sum of all.
    """

    levels: tuple[int, ...]
    keep: int | None


def merges_of(micro_batch: int, count: int) -> Merges:
    """What to do with micro-batch number `micro_batch` of `count`, from 0.

    Level l keeps the sum of 2^l micro-batches, like the digits of a binary counter, so `count` of them need no more
    than log2(count) + 1 kept sums (Higham 1993, "The accuracy of floating point summation", on pairwise summation).
    """
    levels = [level for level in range(micro_batch.bit_length()) if micro_batch >> level & 1]
    if micro_batch == count - 1:
        return Merges(tuple(levels), None)
    full = next(level for level in range(micro_batch.bit_length() + 1) if not micro_batch >> level & 1)
    return Merges(tuple(range(full)), full)
