"""The pages of an lmdb file, checked before lmdb maps them: it trusts them, and a damaged one ends the process.

A file is pages of one size. Pages 0 and 1 are metas, of which the one with the later transaction counts: it has the
root pages of two B-trees, of free pages and of records. A page of a tree has a header of 16 bytes, offsets of its nodes
from the front and the nodes from the back; a long value is in overflow pages of its own. Only the structure is checked:
nothing points outside a page, outside the file or to a page twice. Keys and values are not.
Reference: the structures in lmdb's mdb.c, version 0.9, of a little-endian machine with 64 bits.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO

from dagexec.errors import StorageError
from dagexec.platform.disk import reading
from dagexec.platform.records import dataclass

_HEADER = struct.Struct("<QHHHH")  # number, unused, kind, end of the places, begin of the nodes
_NODE = struct.Struct("<HHHH")  # size of the value or number of the child: low, high; flags; size of the key
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_TREE = struct.Struct("<IHHQQQQQ")  # size of a page, flags, depth, three counts of pages, entries, root
_LAST = struct.Struct("<QQ")  # the last page, the transaction
_NUMBER = struct.Struct("<Q")

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _META_PAGE, _DIRTY = 0x01, 0x02, 0x08, 0x10
_BIG, _DUPLICATES = 0x01, 0x04
_SIMPLE_TREE = 0x02 | 0x08  # flags of a tree with one value a key: keys compared from the back, or as integers
_NOWHERE = (1 << 64) - 1
_DEEPEST = 32
_ATTEMPTS = 5


class _DamagedError(Exception):
    """What is wrong with a page.

    Attributes:
        is_passing: there was a commit since, so the page may have changed during the check.
    """

    is_passing = False


@dataclass(frozen=True)
class _Tree:
    depth: int
    root: int
    is_simple: bool


@dataclass(frozen=True)
class _Meta:
    page_size: int
    last: int
    transaction: int
    trees: tuple[_Tree, _Tree]


def check_pages(file: Path) -> None:
    """Raise StorageError, naming the page, when lmdb could not read the file safely; OSError when it cannot be opened.

    A process that commits meanwhile may reuse pages under check; then they are checked again, and accepted when that
    happens again and again.
    """
    with reading(file) as opened:
        for _ in range(_ATTEMPTS):
            problem = _problem(opened)
            if problem is None:
                return
            if not problem.is_passing:
                raise StorageError(f"{file}: damaged: {problem}")


def _problem(opened: BinaryIO) -> _DamagedError | None:
    """What is wrong with the pages as they are now."""
    if not os.fstat(opened.fileno()).st_size:
        return _DamagedError("it is empty")
    with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        meta: _Meta | None = None
        try:
            meta = _newest_meta(content)
            _Pages(content, meta).check()
        except _DamagedError as error:
            error.is_passing = meta is not None and _committed_since(content, meta.transaction)
            return error
    return None


def _committed_since(content: mmap.mmap, transaction: int) -> bool:
    try:
        return _newest_meta(content).transaction != transaction
    except _DamagedError:
        return False


def _newest_meta(content: mmap.mmap) -> _Meta:
    first = _meta(content, 0)
    second = _meta(content, first.page_size)
    if second.page_size != first.page_size:
        raise _DamagedError(f"pages of {first.page_size} and of {second.page_size} bytes")
    return max(second, first, key=lambda meta: meta.transaction)


def _meta(content: mmap.mmap, place: int) -> _Meta:
    what = "meta page 1" if place else "meta page 0"
    begin = place + _HEADER.size
    if begin + _META.size + 2 * _TREE.size + _LAST.size > len(content):
        raise _DamagedError(f"{what}: the file ends at byte {len(content):,}")
    kind = _HEADER.unpack_from(content, place)[2]
    magic, version, _, _ = _META.unpack_from(content, begin)
    if (magic, version, kind & ~_DIRTY) != (_MAGIC, _VERSION, _META_PAGE):
        raise _DamagedError(f"{what}: not of an lmdb database of version {_VERSION}")
    begin += _META.size
    trees = [_TREE.unpack_from(content, begin + number * _TREE.size) for number in range(2)]
    page_size = trees[0][0]
    if not 256 <= page_size <= 1 << 16 or page_size & (page_size - 1):
        raise _DamagedError(f"{what}: a page of {page_size} bytes")
    last, transaction = _LAST.unpack_from(content, begin + 2 * _TREE.size)
    if (last + 1) * page_size > len(content):
        raise _DamagedError(
            f"{what}: the file is truncated: its pages take {(last + 1) * page_size:,} bytes, found {len(content):,}"
        )
    free, records = (_Tree(depth, root, flags & ~_SIMPLE_TREE == 0) for _, flags, depth, *_, root in trees)
    return _Meta(page_size, last, transaction, (free, records))


class _Pages:
    """The pages that one meta leads to."""

    def __init__(self, content: mmap.mmap, meta: _Meta) -> None:
        self._content = content
        self._meta = meta
        self._seen: set[int] = set()

    def check(self) -> None:
        """Walk both trees. Raises _DamagedError."""
        for tree, what in zip(self._meta.trees, ("the tree of free pages", "the tree of records"), strict=True):
            if not tree.is_simple:
                raise _DamagedError(f"{what}: several values per key, or unknown flags; expected one value per key")
            if tree.root == _NOWHERE:
                continue
            if not 0 < tree.depth <= _DEEPEST:
                raise _DamagedError(f"{what}: a depth of {tree.depth}")
            level = [tree.root]
            for above in range(tree.depth - 1, -1, -1):
                level = [child for number in level for child in self._children(number, is_leaf=above == 0)]
                if above == 0 and tree is self._meta.trees[0]:
                    self._check_free_lists(level)

    def _children(self, number: int, *, is_leaf: bool) -> list[int]:
        """The pages below a branch; of a leaf of the tree of free pages, the places of values."""
        begin = self._page(number, 1)
        page, _, kind, lower, upper = _HEADER.unpack_from(self._content, begin)
        size = self._meta.page_size
        expected = _LEAF if is_leaf else _BRANCH
        if page != number or kind & ~_DIRTY != expected:
            raise _DamagedError(f"page {number}: the header is of page {page}, kind {kind:#x}; expected {expected:#x}")
        if not _HEADER.size <= lower <= upper <= size or lower % 2:
            raise _DamagedError(f"page {number}: places end at {lower} and nodes begin at {upper} of {size} bytes")
        count = (lower - _HEADER.size) // 2
        if count < (1 if is_leaf else 2):
            raise _DamagedError(f"page {number}: {count} nodes")
        places: list[int] = []
        for place in struct.unpack_from(f"<{count}H", self._content, begin + _HEADER.size):
            if not upper <= place <= size - _NODE.size:
                raise _DamagedError(f"page {number}: a node at {place} of {size} bytes")
            low, high, flags, key = _NODE.unpack_from(self._content, begin + place)
            end = place + _NODE.size + key
            if not is_leaf:
                places.append(low | high << 16 | flags << 32)
            else:
                end += self._value(number, begin + end, low | high << 16, flags, size - end)
            if end > size:
                raise _DamagedError(f"page {number}: a node at {place} ends at {end} of {size} bytes")
            if is_leaf:
                places.append(begin + place)
        return places

    def _value(self, number: int, place: int, length: int, flags: int, room: int) -> int:
        """The bytes that a value takes in its leaf."""
        if flags & _DUPLICATES:
            raise _DamagedError(f"page {number}: several values per key")
        if not flags & _BIG:
            return length
        if room >= _NUMBER.size:
            [first] = _NUMBER.unpack_from(self._content, place)
            self._page(first, -(-(_HEADER.size + length) // self._meta.page_size))
        return _NUMBER.size

    def _page(self, number: int, count: int) -> int:
        """The places of pages, which must be new and in the file."""
        if number < 2 or number + count - 1 > self._meta.last:
            raise _DamagedError(f"pages {number} to {number + count - 1} are not among pages 2 to {self._meta.last}")
        if number in self._seen:
            raise _DamagedError(f"page {number} has two references")
        self._seen.add(number)
        return number * self._meta.page_size

    def _check_free_lists(self, nodes: list[int]) -> None:
        """Check that each value is a count and that many numbers of pages."""
        for node in nodes:
            low, high, flags, key = _NODE.unpack_from(self._content, node)
            length, place = low | high << 16, node + _NODE.size + key
            if flags & _BIG:
                place = _NUMBER.unpack_from(self._content, place)[0] * self._meta.page_size + _HEADER.size
            count = _NUMBER.unpack_from(self._content, place)[0] if length >= _NUMBER.size else _NOWHERE
            if (count + 1) * _NUMBER.size > length:
                raise _DamagedError(f"a list of {count:,} free pages in {length:,} bytes")
            for number in struct.unpack_from(f"<{count}Q", self._content, place + _NUMBER.size):
                if not 2 <= number <= self._meta.last:
                    raise _DamagedError(f"page {number} is free, and not among pages 2 to {self._meta.last}")
