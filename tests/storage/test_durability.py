"""What is written outlasts a loss of power: content is on the disk before its name, and that when a call returns.

Seen by what is asked of the system, in order: `fsync` and `replace`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dagexec import InputInfo, Model, NetDef, Workspace
from dagexec.analysis.plot import draw_graph
from dagexec.core.choices import Choices
from dagexec.core.dtypes import FLOAT32
from dagexec.core.graph import build_graph
from dagexec.core.operator_def import op
from dagexec.devices.cuda import compilation
from dagexec.export import onnx_model
from dagexec.platform.files import written_atomically
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.observe.trace_file import write_trace
from dagexec.scheduler.plan.plan import build_plan
from dagexec.storage import Mode, open_database
from dagexec.storage.net_file import save_net
from dagexec.training.checkpoint import save_checkpoint
from dagexec.training.safetensors_file import export_safetensors

NET = NetDef(name="net", op=[op("FC", ["x", "w", "b"], ["y"])], external_input=["x", "w", "b"], external_output=["y"])


@dataclass(frozen=True)
class State:
    """Of a file or a folder: which it is, and what changes when somebody writes to it."""

    inode: int
    nbytes: int
    modified: int

    @classmethod
    def of(cls, place: int | str | os.PathLike[str]) -> State:
        found = os.stat(place)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Placed:
    """What took a place.

    Attributes:
        target: the place.
        folder: the inode of the folder of that.
        states: of it and, if it is a folder, of the files in it but for those that lmdb itself synchronizes.
        before: how many were synchronized until then.
    """

    target: Path
    folder: int
    states: tuple[State, ...]
    before: int


class Asked:
    """Files and folders in the order in which they were synchronized, and those that took a place."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synchronized: list[State] = []
        self.placed: list[Placed] = []
        fsync, replace = os.fsync, os.replace

        def noted_fsync(handle: int) -> None:
            fsync(handle)
            self.synchronized.append(State.of(handle))

        def noted_replace(source: Path, target: Path) -> None:
            files = [path for path in source.rglob("*") if path.name not in ("data.mdb", "lock.mdb")]
            states = tuple(map(State.of, (source, *files)))
            self.placed.append(Placed(target, os.stat(target.parent).st_ino, states, len(self.synchronized)))
            replace(source, target)

        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "replace", noted_replace)

    def check(self) -> None:
        """Raise AssertionError unless all that took a place was on the disk before, and its name is afterwards."""
        for one in self.placed:
            before, after = self.synchronized[: one.before], self.synchronized[one.before :]
            assert all(state in before for state in one.states), f"{one.target}: its content may be lost"
            assert one.folder in [state.inode for state in after], f"{one.target}: its name may be lost"


def workspace() -> Workspace:
    found = Workspace()
    found.feed_blob("w", np.ones((3, 4), np.float32))
    return found


def model() -> Model:
    parameters = {"w": np.ones((300, 4), np.float32), "b": np.ones(300, np.float32)}
    return Model("net", NET, parameters=parameters, inputs={"x": InputInfo(FLOAT32, (1, 4))}, outputs=("y",))


def save_results(path: Path) -> None:
    with written_atomically(path) as file:
        np.savez(file, y=np.ones(3))


def save_in_two_files(path: Path) -> None:
    onnx_model._save_in_two(onnx_model.to_onnx(model()), path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "net.pb": lambda path: save_net(NET, path),
    "choices.json": lambda path: Choices().save(path),
    "trace.json": lambda path: write_trace(Trace(), path),
    "graph.dot": lambda path: draw_graph(build_plan(build_graph(NET), [1.0]), path),
    "results.npz": save_results,
    "kernel": lambda path: compilation._keep(path, b"machine code"),
    "model.onnx": lambda path: onnx_model.save_onnx(model(), path),
    "in_two.onnx": save_in_two_files,
    "step-000000000007.minidb": lambda path: save_checkpoint(workspace(), ["w"], path.parent, 7, db_type="minidb"),
    "step-000000000007.lmdb": lambda path: save_checkpoint(workspace(), ["w"], path.parent, 7, db_type="lmdb"),
    "weights.safetensors": lambda path: export_safetensors(workspace(), ["w"], path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_content_is_on_the_disk_before_its_name_and_that_at_the_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # to a new place, and to one that is taken
        with monkeypatch.context() as patched:
            asked = Asked(patched)
            WRITERS[name](tmp_path / name)
        asked.check()
        assert tmp_path / name in [one.target for one in asked.placed] or name.endswith("lmdb")
    assert (tmp_path / name).exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_records_that_are_added_are_on_the_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.minidb"
    for mode in (Mode.NEW, Mode.WRITE):
        asked = Asked(monkeypatch)
        with open_database("minidb", path, mode) as database, database.transaction() as transaction:
            transaction.put(b"key", b"value")
        assert State.of(path) in asked.synchronized
        asked.check()
