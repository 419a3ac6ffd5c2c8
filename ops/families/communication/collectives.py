"""Collectives over the messages of a CommonWorld: every rank of the group calls the same one, in the same order.

Sums are made in an order that only the ranks' numbers fix, so every run, and every rank, gets the same bytes.

The tree is binomial: in round k, rank r adds what rank r + 2^k has, where 2^(k+1) divides r. Four ranks give
(x0 + x1) + (x2 + x3). Each array crosses 2 log2(size) links, one after the other: good for short arrays.

The ring cuts an array into one chunk a rank. Chunk c goes around from rank c on and is summed on the way, then goes
around once more; every rank sends 2 (size - 1) / size of the array, whatever the size: good for long ones
(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.families.communication.common_world import CommonWorld, Tag

Array = npt.NDArray[Any]

ALGORITHMS = ("tree", "ring")


def all_reduce(world: CommonWorld, array: Array, *, algorithm: str = "tree", divisor: int = 1) -> None:
    """Replace `array` on every rank by the sum over all ranks, divided by `divisor`.

    Raises ArgumentError for an unknown algorithm, and what the messages raise.
    """
    if algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm must be one of {', '.join(ALGORITHMS)}, found {algorithm!r}")
    (all_reduce_tree if algorithm == "tree" else all_reduce_ring)(world, array, divisor=divisor)


def all_reduce_tree(world: CommonWorld, array: Array, *, divisor: int = 1) -> None:
    """Sum up the tree to rank 0, divide there, and send the result down the tree."""
    with world.collective("all-reduce by tree") as tag:
        _sum_up(world, array, tag)
        if world.rank == 0:
            divide(array, divisor)
        _send_down(world, array, 0, tag)


def all_reduce_ring(world: CommonWorld, array: Array, *, divisor: int = 1) -> None:
    """Sum the chunks on their way around the ring; each is divided by the rank that completes it."""
    size, rank = world.size, world.rank
    with world.collective("all-reduce by ring") as tag:
        chunks = _chunks(array, size)
        after, before = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            posted = world.post(chunks[(rank - step) % size], after, tag)
            world.receive_sum(chunks[(rank - step - 1) % size], before, tag)
            posted.wait()
        divide(chunks[(rank + 1) % size], divisor)
        for step in range(size - 1):
            outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
            world.exchange(outgoing, after, incoming, before, tag)


def reduce(world: CommonWorld, array: Array, root: int = 0, *, divisor: int = 1) -> None:
    """Replace `array` on rank `root` by the sum over all ranks, divided: the bytes of `all_reduce_tree`.

    What the arrays of other ranks hold afterwards is undefined.
    """
    _check_rank(world, root)
    with world.collective("reduce") as tag:
        _sum_up(world, array, tag)
        if root != 0 and world.rank == 0:
            world.send(array, root, tag)
        elif root != 0 and world.rank == root:
            world.receive(array, 0, tag)
        if world.rank == root:
            divide(array, divisor)


def reduce_scatter(world: CommonWorld, array: Array, out: Array, counts: Sequence[int]) -> None:
    """Put a part of the sum over all ranks in `out`, that of this rank: of `counts[r]` elements for rank r, in order.

    `array` is overwritten. The sum has the bytes of `all_reduce_tree`. Raises ShapeError for parts that do not fit.
    """
    with world.collective("reduce-scatter") as tag:
        if len(counts) != world.size or min(counts) < 0 or sum(counts) != array.size:
            raise ShapeError(f"the {array.size} elements must be divided among {world.size} ranks, found {counts}")
        _sum_up(world, array, tag)
        ends = [sum(counts[: rank + 1]) for rank in range(world.size)]
        parts = [array.reshape(-1)[end - count : end] for end, count in zip(ends, counts, strict=True)]
        if world.rank:
            world.receive(out.reshape(-1), 0, tag)
            return
        posted = [world.post(parts[rank], rank, tag) for rank in range(1, world.size)]
        np.copyto(out.reshape(-1), parts[0])
        for message in posted:
            message.wait()


def broadcast(world: CommonWorld, array: Array, root: int = 0) -> None:
    """Replace `array` on every rank by that of rank `root`, down a binomial tree."""
    _check_rank(world, root)
    with world.collective("broadcast") as tag:
        _send_down(world, array, root, tag)


def all_gather(world: CommonWorld, array: Array, out: Array) -> None:
    """Put the `array` of every rank r in `out[r]`, around the ring; all have one shape.

    Raises ShapeError unless `out` has the shape (size, *array.shape) and the dtype of `array`.
    """
    size, rank = world.size, world.rank
    with world.collective("all-gather") as tag:
        if out.shape != (size, *array.shape) or out.dtype != array.dtype:
            raise ShapeError(
                f"all-gather of {array.dtype} {array.shape} over {size} ranks needs an output of shape "
                f"{(size, *array.shape)}, found {out.dtype} {out.shape}"
            )
        np.copyto(out[rank], array)
        for step in range(size - 1):
            outgoing, incoming = out[(rank - step) % size], out[(rank - step - 1) % size]
            world.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size, tag)


def barrier(world: CommonWorld) -> None:
    """Return on no rank before every rank has called it."""
    nothing = np.empty(0, np.uint8)
    with world.collective("barrier") as tag:
        _sum_up(world, nothing, tag)
        _send_down(world, nothing, 0, tag)


def divide(array: Array, divisor: int) -> None:
    """Divide in place, each element rounded once. Raises ArgumentError for integers, which have no mean."""
    if divisor == 1:
        return
    if array.dtype.kind in "iub":
        raise ArgumentError(f"the mean of {array.dtype} is not {array.dtype}: only sums of integers are supported")
    np.divide(array, array.dtype.type(divisor), out=array)


def _sum_up(world: CommonWorld, array: Array, tag: Tag) -> None:
    """Add up to rank 0 along the binomial tree."""
    distance = 1
    while distance < world.size:
        if world.rank & distance:
            world.send(array, world.rank - distance, tag)
            return
        if world.rank + distance < world.size:
            world.receive_sum(array, world.rank + distance, tag)
        distance *= 2


def _send_down(world: CommonWorld, array: Array, root: int, tag: Tag) -> None:
    """From `root` to all, along the same tree with the ranks counted from `root`."""
    size = world.size
    place = (world.rank - root) % size
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        world.receive(array, (place - distance + root) % size, tag)
    posted = []
    while (distance := distance // 2) > 0:
        if place + distance < size:
            posted.append(world.post(array, (place + distance + root) % size, tag))
    for message in posted:
        message.wait()


def _chunks(array: Array, count: int) -> list[Array]:
    """`count` views of the elements in order, of sizes that differ by one at most."""
    if not array.flags.c_contiguous:
        raise ShapeError(f"only packed arrays can be reduced, found strides {array.strides} of shape {array.shape}")
    flat = array.reshape(-1)
    ends = [flat.size * number // count for number in range(count + 1)]
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def _check_rank(world: CommonWorld, root: int) -> None:
    if not 0 <= root < world.size:
        raise ArgumentError(f"root must be a rank from 0 to {world.size - 1}, found {root}")
