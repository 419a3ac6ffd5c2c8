"""Offsets of many buffers: one walk over the operators in list order, in which memory is taken and given back.

A buffer takes a free block at its first operator, and gives it back after its last. Where operators may run at the same
time, only operators that come after all its users in every schedule may take a block: the walk knows the ancestors of
each operator among the users of free blocks (`AncestorBits`). Buffers are not compared in pairs, so time and memory
grow with the number of operators and the width of the graph; the result is not always as small as where they are
compared (`offsets`), which is for nets of usual size.

Working memory is given in strips: each operator has one, which it shares with no operator that may run beside it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from dagexec.core.graph import AncestorBits, Graph
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.lifetime import Order
from dagexec.scheduler.memory.offsets import Integers, aligned

_MAX_LOOKED_AT = 64  # free blocks, those that are free for longest first
_MAX_USERS = 8  # of a merged block
_MAX_STRIPS_LOOKED_AT = 32  # the least recently used


@dataclass(frozen=True)
class ListOrderOffsets:
    """Offsets of the buffers, the bytes up to the end of the last, and the strip of each operator."""

    offsets: Integers
    extent: int
    strips: tuple[int, ...]


def place_in_list_order(
    sizes: Sequence[int], users: Sequence[Sequence[int]], kept: Sequence[bool], order: Order
) -> ListOrderOffsets:
    """Place buffers of `sizes` bytes.

    `users` are the operators that touch each, ascending; those that are `kept` are never free again. Without
    `order.graph` operators run in list order.
    """
    walk = _Walk(order, users, kept)
    room = [aligned(size) for size in sizes]
    offsets = np.zeros(len(room), np.int64)
    beginning: list[list[int]] = [[] for _ in range(order.count)]
    ending: list[list[int]] = [[] for _ in range(order.count)]
    for buffer, row in enumerate(users):
        beginning[row[0]].append(buffer)
        if not kept[buffer]:
            ending[row[-1]].append(buffer)
    for operator in range(order.count):
        walk.go_to(operator)
        for buffer in beginning[operator]:
            offsets[buffer] = walk.take(room[buffer], buffer)
        walk.give_strip(operator)
        for buffer in ending[operator]:
            walk.give_back(int(offsets[buffer]), room[buffer], buffer)
    return ListOrderOffsets(offsets, walk.end, tuple(walk.strips))


@dataclass(slots=True)
class _Block:
    """Free bytes, and the last operators that used them; also as a set, if it is known which operators follow them."""

    start: int
    end: int
    users: tuple[int, ...]
    mask: int | None


class _Walk:
    """The state at one operator.

    Attributes:
        end: of all bytes taken so far.
        strips: of the operators so far.
    """

    def __init__(self, order: Order, users: Sequence[Sequence[int]], kept: Sequence[bool]) -> None:
        self.end = 0
        self.strips: list[int] = []
        self._graph = order.graph
        self._users = users
        self._bits = AncestorBits()
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by start, those to be tried first in front
        self._ends: dict[int, _Block] = {}
        self._asked = [0] * order.count  # how many blocks, buffers and strips will still ask for each operator
        self._last_users: list[tuple[int, ...]] = []
        self._strip_of: OrderedDict[int, int] = OrderedDict()  # by the operator that had it last
        self._ancestors = 0
        for row, stays in zip(users, kept, strict=True):
            last = () if stays or order.graph is None else _last_of(order.graph, row)
            self._last_users.append(last)
            for operator in last:
                self._asked[operator] += 1

    def go_to(self, operator: int) -> None:
        """Begin the next operator."""
        self._ancestors = 0
        for parent in () if self._graph is None else self._graph.reduced_parents[operator]:
            self._ancestors |= self._bits.with_ancestors(parent)

    def give_strip(self, operator: int) -> None:
        """Give the operator a strip, once it has taken its buffers; others may follow in it."""
        graph, bits = self._graph, self._bits
        if graph is None:
            self.strips.append(0)
            return
        before = next((parent for parent in graph.reduced_parents[operator] if parent in self._strip_of), None)
        if before is None:
            for other in list(itertools.islice(self._strip_of, _MAX_STRIPS_LOOKED_AT)):
                if bits.has(self._ancestors, other):
                    before = other
                    break
                self._strip_of.move_to_end(other)
        strip = len(self._strip_of) if before is None else self._strip_of.pop(before)
        self.strips.append(strip)
        self._strip_of[operator] = strip
        self._asked[operator] += 1
        if graph.reduced_children[operator]:
            bits.enter(operator, self._ancestors)
            bits.assign(operator)
        if before is not None:
            self._release(before)
        for parent in graph.reduced_parents[operator]:
            if graph.reduced_children[parent][-1] == operator:
                bits.forget(parent)

    def take(self, size: int, buffer: int) -> int:
        """The offset of `size` bytes for a buffer: in the smallest free block that takes it, of some, or at the end."""
        best: _Block | None = None
        if self._graph is None or _begins_with_first(self._graph, self._users[buffer]):  # else who does is not certain
            ancestors, blocks = self._ancestors, self._blocks
            for block in list(itertools.islice(blocks.values(), _MAX_LOOKED_AT)):
                mask, start = block.mask, block.start
                if blocks.get(start) is not block:
                    continue  # it is part of another now
                if mask is None or ancestors & mask != mask:
                    blocks.move_to_end(start)
                    continue
                self._extend(block, size)
                if best is not None and self._blocks.get(best.start) is not best:
                    best = None  # it is part of this one now
                room = block.end - block.start
                if room >= size and (best is None or room < best.end - best.start):
                    best = block
                    if room == size:
                        break
        if best is None:
            self.end += size
            return self.end - size
        start = best.start
        del self._blocks[start]
        if best.end > start + size:
            best.start += size
            self._blocks[best.start] = best
            self._blocks.move_to_end(best.start, last=False)
        else:
            del self._ends[best.end]
            for user in best.users:
                self._release(user)
        return start

    def _is_usable(self, block: _Block) -> bool:
        """True when all users of a block are done before the operator begins."""
        return block.mask is not None and self._ancestors & block.mask == block.mask

    def _extend(self, block: _Block, size: int) -> None:
        """Merge a usable block with usable ones after it, until it has `size` bytes."""
        while block.end - block.start < size:
            other = self._blocks.get(block.end)
            if other is None or not self._is_usable(other):
                return
            users = tuple(dict.fromkeys((*block.users, *other.users)))
            if len(users) > _MAX_USERS and len(users) > max(len(block.users), len(other.users)):
                return
            self._append(block, other, users)

    def _append(self, block: _Block, other: _Block, users: tuple[int, ...]) -> None:
        """Merge two neighboring blocks; `users` stand for the users of both."""
        for user in users:
            self._asked[user] += 1
        for user in (*block.users, *other.users):
            self._release(user)
        del self._ends[block.end], self._blocks[other.start]
        block.end, block.users, block.mask = other.end, users, self._bits.mask(users)
        self._ends[block.end] = block

    def give_back(self, start: int, size: int, buffer: int) -> None:
        """Free the bytes of a buffer for the operators after its last users."""
        users = self._last_users[buffer]
        if self._graph is not None and not all(self._graph.reduced_children[user] for user in users):
            return  # nothing comes after them
        block = self._blocks[start] = self._ends[start + size] = _Block(
            start, start + size, users, self._bits.mask(users)
        )
        left, right = self._ends.get(start), self._blocks.get(start + size)
        if right is not None and right.users == users:
            self._append(block, right, users)
        if left is not None and left.users == users:
            self._append(left, block, users)

    def _release(self, operator: int) -> None:
        """Drop one use of an operator by a block, buffer or strip."""
        self._asked[operator] -= 1
        if self._asked[operator] == 0:
            self._bits.release(operator)


def _begins_with_first(graph: Graph, users: Sequence[int]) -> bool:
    """True when all users of a buffer come after the first of them: each has another one as a parent."""
    members: set[int] | None = None
    for place in range(1, len(users)):
        parents = graph.parents[users[place]]
        if _contains(parents, users[0]) or _contains(parents, users[place - 1]):
            continue
        members = members or set(users)
        if members.isdisjoint(parents):
            return False
    return True


def _last_of(graph: Graph, users: Sequence[int]) -> tuple[int, ...]:
    """The users of a buffer that have no other user as a child."""
    members = set(users)

    def is_last(place: int) -> bool:
        children = graph.children[users[place]]
        if len(children) <= len(users):
            return members.isdisjoint(children)
        return not any(_contains(children, other) for other in users[place + 1 :])

    return tuple(users[place] for place in range(len(users)) if is_last(place))


def _contains(row: Sequence[int], number: int) -> bool:
    """True when `number` is in an ascending row."""
    place = bisect_left(row, number)
    return place < len(row) and row[place] == number
