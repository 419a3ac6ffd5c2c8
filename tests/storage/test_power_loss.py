"""A loss of power at each point of each writer: the old version is there or the new one; at the end, the new one.

`SimulatedDisk` tells what may be left of what was not synchronized.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from dagexec.platform.disk import Disk, installed
from dagexec.stress.simulated_disk import SimulatedDisk, Tree, write_tree
from tests.storage.writers import NOTHING, WRITERS, Writer

BEFORE = {"nothing": NOTHING, "an old version": 1}


class Careless(SimulatedDisk):
    """One whose user forgets to synchronize files, or folders."""

    def __init__(self, root: Path, forgets: str) -> None:
        super().__init__(root)
        self._forgets = forgets

    def synchronize(self, path: Path) -> None:
        if path.is_dir() != (self._forgets == "folders"):
            super().synchronize(path)


class Unsynchronized(Disk):
    """The system's, for files that nobody needs for long."""

    def synchronize(self, path: Path) -> None:
        """That takes time."""


def written(writer: Writer, folder: Path, before: int) -> Path:
    """A folder with the version `before`."""
    folder.mkdir()
    with installed(Unsynchronized()):
        if before:
            writer.write(folder, before)
        assert writer.read(folder) == before
    return folder


def version_in(writer: Writer, tree: Tree, folder: Path) -> int | str:
    """Which is left, or what a reader says; whoever writes the next one afterwards succeeds and leaves nothing else."""
    folder.mkdir()
    write_tree(tree, folder)
    with installed(Unsynchronized()):
        try:
            found: int | str = writer.read(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        writer.write(folder, 3)
        assert writer.read(folder) == 3
    return found


def states_by_call(disk: SimulatedDisk) -> dict[Tree, int]:
    """All that a loss of power may leave, with the last call after which it may."""
    return {tree: calls for calls in range(len(disk.calls) + 1) for tree in disk.after_power_loss(calls)}


@pytest.mark.slow
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", WRITERS)
def test_a_loss_of_power_leaves_the_old_version_or_the_new_one_whole(name: str, before: str, tmp_path: Path) -> None:
    writer, old = WRITERS[name], BEFORE[before]
    folder = written(writer, tmp_path / "folder", old)
    disk = SimulatedDisk(folder)
    with installed(disk):
        writer.write(folder, old + 1)
    numbers = count()
    states = states_by_call(disk)
    assert len(states) > len(disk.calls) // 4
    for tree, calls in states.items():
        found = version_in(writer, tree, tmp_path / f"left {next(numbers)}")
        allowed = (old + 1,) if calls == len(disk.calls) else (old, old + 1)
        assert found in allowed, f"after call {calls} of {len(disk.calls)}, {disk.calls[calls - 1 : calls]}"


@pytest.mark.parametrize("forgets", ["files", "folders"])
@pytest.mark.parametrize("name", ["net", "ONNX in two files", "checkpoint", "records", "cache of choices"])
def test_a_writer_that_forgets_to_synchronize_is_found(name: str, forgets: str, tmp_path: Path) -> None:
    writer = WRITERS[name]
    folder = written(writer, tmp_path / "folder", NOTHING if name == "cache of choices" else 1)
    disk = Careless(folder, forgets)
    with installed(disk):
        writer.write(folder, 2)
    found = {
        version_in(writer, tree, tmp_path / f"left {number}") for number, tree in enumerate(disk.after_power_loss())
    }
    assert found - {2}
