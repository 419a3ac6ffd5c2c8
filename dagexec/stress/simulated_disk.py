"""SimulatedDisk: the files below a folder, with calls that fail when told to, and with the states after a power loss.

It carries out every call on real files, which libraries may read and write as well, and notes what changed and what was
synchronized. Changes that were not may outlast a loss of power or not, each change of data and of names by itself; the
return of a call guarantees nothing, nor does the order of the changes. The model is that of POSIX, not of one file
system; see T. S. Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014) for how they differ.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from dagexec.platform.disk import Disk, StrPath, regular_only
from dagexec.platform.records import dataclass

SELF_SYNCHRONIZED = ("data.mdb",)
"""Files that a library writes and synchronizes; each change of one is taken to outlast everything."""

_IGNORED = ("lock.mdb",)  # what lmdb keeps there is of no use to another process
_SECTOR = 512
_MOST_IN_ALL_SUBSETS = 6

Tree = tuple[tuple[str, bytes | None], ...]
"""Files by their paths from the root, with their contents; None for folders."""


@dataclass(frozen=True)
class DiskCall:
    """A call: the name of the method, and the file."""

    kind: str
    path: Path


@dataclass(frozen=True)
class Failure:
    """How a call goes wrong.

    Attributes:
        error: what it raises; None for a write that takes half of what it is given, which is no error.
        late: it was carried out all the same; a write with an error has always taken half.
    """

    error: BaseException | None
    late: bool = False


Faults = Callable[[DiskCall], Failure | None]


@dataclass(eq=False)
class _Node:
    """A file or a folder, whatever its name is.

    Attributes:
        content: of a file, as it is now; `first`: when the simulation began.
        names: of a folder, as they are now; `first_names`: when the simulation began.
    """

    content: bytes = b""
    names: dict[str, _Node] | None = None
    first: bytes = b""
    first_names: dict[str, _Node] = field(default_factory=dict)


@dataclass(eq=False)
class _Change:
    """A change of a file's data, or of names in a folder.

    Attributes:
        node: has to be synchronized for it.
        made, kept: after how many calls it was made and was synchronized.
        offset, data: what was written; without data, the file has this size from now on.
        names: the new names in each folder.
        lost: a call to synchronize it has failed: no later one helps (as on Linux, which drops the data).
    """

    node: _Node
    made: int
    offset: int = 0
    data: bytes | None = None
    names: tuple[tuple[_Node, str, _Node | None], ...] = ()
    kept: int | None = None
    lost: bool = False


class SimulatedDisk(Disk):
    """The files below `root`; other files are the system's.

    Attributes:
        calls: so far.
    """

    def __init__(self, root: Path, faults: Faults = lambda _call: None) -> None:
        self.calls: list[DiskCall] = []
        self._root = root
        self._faults = faults
        self._top = _Node(names={})
        self._changes: list[_Change] = []
        self._notice()
        for node in self._nodes(self._top):
            node.first, node.first_names = node.content, dict(node.names or {})
        self._changes.clear()

    def open(self, path: StrPath, mode: str, *, regular: bool = True) -> io.FileIO:
        place = Path(path)
        if not self._has(place):
            return super().open(path, mode, regular=regular)
        with self.call("open", place) as failure:
            if failure is not None:
                raise failure.error or system_error(errno.EINTR)
            opened = SimulatedFile(self, place, mode)
        if opened.writable():
            self._notice()  # of its name
        return opened

    def make_folder(self, path: Path) -> None:
        with self.call("make_folder", path):
            super().make_folder(path)
        self._notice()

    def replace(self, source: Path, target: Path) -> None:
        with self.call("replace", source):
            super().replace(source, target)
        if not self._has(source):
            return
        old, folder = self._node(source.parent), self._node(target.parent)
        node = self._names(old).pop(source.name)
        self._names(folder)[target.name] = node
        edits = ((folder, target.name, node), (old, source.name, None))
        self._changes.append(_Change(folder, len(self.calls), names=edits))

    def unlink(self, path: Path) -> None:
        with self.call("unlink", path):
            super().unlink(path)
        self._notice()

    def remove_folder(self, path: Path) -> None:
        with self.call("remove_folder", path):
            super().remove_folder(path)
        self._notice()

    def synchronize(self, path: Path) -> None:
        if not self._has(path):
            return
        self._notice()
        node = self._node(path)
        pending = [change for change in self._changes if change.node is node and change.kept is None]
        try:
            with self.call("synchronize", path):
                pass
        except BaseException:
            for change in pending:
                change.lost = True
            raise
        for change in pending:
            if not change.lost:
                change.kept = len(self.calls)

    def after_power_loss(self, calls: int | None = None) -> set[Tree]:
        """The possible states after a loss of power when `end` calls had ended; None: all.

        Of the changes that were not synchronized: none, all, each prefix, each without one and each alone (of few, all
        subsets), and each prefix with half of its last write.
        """
        self._notice()
        end = len(self.calls) if calls is None else calls
        made = [change for change in self._changes if change.made <= end]
        pending = [change for change in made if change.kept is None or change.kept > end]
        sure = [change for change in made if change.kept is not None and change.kept <= end]
        trees = {self._tree({*sure, *subset}) for subset in _subsets(pending)}
        for count, last in enumerate(pending):
            if last.data:
                half = len(last.data) // 2
                for size in {half, half // _SECTOR * _SECTOR}:
                    trees.add(self._tree({*sure, *pending[: count + 1]}, last, size))
        return trees

    def call(self, kind: str, path: Path) -> _Call:
        """A call, which is carried out within the block, or fails."""
        return _Call(self, DiskCall(kind, path))

    def begun(self, call: DiskCall) -> Failure | None:
        """How a call is to fail; it is noted."""
        if not self._has(call.path):
            return None
        self._notice()
        self.calls.append(call)
        return self._faults(call)

    def written(self, path: Path, offset: int, data: bytes | None) -> None:
        """Data was written to a file; None: it was cut to `offset` bytes."""
        if not self._has(path):
            return
        node = self._node(path)
        change = _Change(node, len(self.calls), offset, data)
        node.content = _applied(node.content, change, None)
        self._changes.append(change)

    def _has(self, path: Path) -> bool:
        return self._root in path.parents or path == self._root

    def _node(self, path: Path) -> _Node:
        node = self._top
        for name in path.relative_to(self._root).parts:
            node = self._names(node)[name]
        return node

    @staticmethod
    def _names(node: _Node) -> dict[str, _Node]:
        assert node.names is not None
        return node.names

    def _nodes(self, node: _Node) -> Iterator[_Node]:
        yield node
        for inside in (node.names or {}).values():
            yield from self._nodes(inside)

    def _notice(self) -> None:
        """Note all differences: names by calls of this disk, and all changes by libraries."""
        self._notice_in(self._top, self._root)

    def _notice_in(self, folder: _Node, path: Path) -> None:
        names, now = self._names(folder), len(self.calls)
        there = {one.name: one for one in os.scandir(path) if one.name not in _IGNORED}
        for name in [name for name in names if name not in there]:
            del names[name]
            self._changes.append(_Change(folder, now, names=((folder, name, None),)))
        for name, entry in there.items():
            if name not in names:
                names[name] = _Node(names={} if entry.is_dir() else None)
                self._changes.append(_Change(folder, now, names=((folder, name, names[name]),)))
            node = names[name]
            if entry.is_dir():
                self._notice_in(node, path / name)
                continue
            content = (path / name).read_bytes()
            if content != node.content:
                kept = now if name in SELF_SYNCHRONIZED else None
                self._changes += [
                    _Change(node, now, 0, content, kept=kept),
                    _Change(node, now, len(content), kept=kept),
                ]
                node.content = content

    def _tree(self, kept: set[_Change], torn: _Change | None = None, size: int = 0) -> Tree:
        """The files, when these changes outlast; of the data of `torn`, the first `size` bytes."""
        contents = {id(node): node.first for node in self._all_nodes()}
        names = {id(node): dict(node.first_names) for node in self._all_nodes()}
        for change in self._changes:
            if change in kept:
                for folder, name, node in change.names:
                    names[id(folder)].pop(name, None)
                    if node is not None:
                        names[id(folder)][name] = node
                if not change.names:
                    content = contents[id(change.node)]
                    contents[id(change.node)] = _applied(content, change, size if change is torn else None)
        return tuple(sorted(self._listed(self._top, "", contents, names)))

    def _all_nodes(self) -> set[_Node]:
        nodes = set(self._nodes(self._top)) | {one.node for one in self._changes}
        for change in self._changes:
            nodes.update(node for _, _, node in change.names if node is not None)
        return nodes | {inside for node in nodes for inside in node.first_names.values()}

    def _listed(
        self, folder: _Node, prefix: str, contents: dict[int, bytes], names: dict[int, dict[str, _Node]]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, node in names[id(folder)].items():
            path = f"{prefix}{name}"
            if node.names is None:
                yield path, contents[id(node)]
            else:
                yield path, None
                yield from self._listed(node, f"{path}/", contents, names)


class _Call:
    """The block of one call: a failure comes before its content, or after it."""

    def __init__(self, disk: SimulatedDisk, call: DiskCall) -> None:
        self.failure = disk.begun(call)

    def __enter__(self) -> Failure | None:
        if self.failure is not None and self.failure.error is not None and not self.failure.late:
            raise self.failure.error
        return self.failure

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None and self.failure is not None and self.failure.error is not None:
            raise self.failure.error


class SimulatedFile(io.FileIO):
    """A file of a `SimulatedDisk`."""

    def __init__(self, disk: SimulatedDisk, path: Path, mode: str) -> None:
        super().__init__(path, mode, opener=regular_only)
        self._disk = disk
        self._path = path

    def write(self, data: Any, /) -> int:
        """Take all, or half where that is how it fails."""
        whole = bytes(data)
        failure = self._disk.begun(DiskCall("write", self._path))
        offset = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
        taken = whole if failure is None else whole[: (len(whole) + 1) // 2]
        count = super().write(taken)
        assert count is not None
        self._disk.written(self._path, offset, taken[:count])
        if failure is not None and failure.error is not None:
            raise failure.error
        return count

    def readinto(self, buffer: Any, /) -> int:
        """Read, unless that fails."""
        with self._disk.call("read", self._path):
            count = super().readinto(buffer)
            assert count is not None
            return count

    def readall(self) -> bytes:
        """Read, unless that fails."""
        with self._disk.call("read", self._path):
            content = super().readall()
            assert content is not None
            return content

    def truncate(self, size: int | None = None, /) -> int:
        """Cut it, unless that fails."""
        with self._disk.call("truncate", self._path):
            cut = super().truncate(size)
        self._disk.written(self._path, cut, None)
        return cut

    def close(self) -> None:
        """Close it; when that fails, it is closed all the same."""
        if not self.closed:
            super().close()
            with self._disk.call("close", self._path):
                pass


def write_tree(tree: Tree, folder: Path) -> None:
    """Make the files of a state of `SimulatedDisk.after_power_loss`."""
    for name, content in tree:
        path = folder / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)


def system_error(number: int) -> OSError:
    """What the system raises for a number of `errno`."""
    return OSError(number, os.strerror(number))


def no_room() -> Failure:
    """The disk is full."""
    return Failure(system_error(errno.ENOSPC))


def broken() -> Failure:
    """The device does not do what it is told."""
    return Failure(system_error(errno.EIO))


def _applied(content: bytes, change: _Change, size: int | None) -> bytes:
    """A file after a change, of whose data the first `size` bytes count."""
    if change.data is None:
        return content[: change.offset].ljust(change.offset, b"\0")
    data = change.data if size is None else change.data[:size]
    return content[: change.offset].ljust(change.offset, b"\0") + data + content[change.offset + len(data) :]


def _subsets(changes: Sequence[_Change]) -> Iterator[Sequence[_Change]]:
    count = len(changes)
    if count <= _MOST_IN_ALL_SUBSETS:
        yield from chain.from_iterable(combinations(changes, size) for size in range(count + 1))
        return
    yield from (changes[:size] for size in range(count + 1))
    for number in range(count):
        yield changes[number : number + 1]
        yield [*changes[:number], *changes[number + 1 :]]
