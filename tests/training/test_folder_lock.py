"""One training at a time writes to a folder of checkpoints, and none begins anew unasked beside damaged ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dagexec.errors import OutputError, StorageError
from dagexec.training.checkpoint import checkpoints
from dagexec.training.folder_lock import NAME, FolderLock
from dagexec.training.trainer import Trainer
from tests.cli.test_cli_train import SCRIPT
from tests.command_line import Cli
from tests.training.small_task import make_task


def in_child(action: Callable[[], int]) -> int:
    """Run `action` in a forked child, which ends with what it returns as its status; the child's number."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = action()
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_second_training_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path) as first:
        message = f"another training is writing its checkpoints there: process {os.getpid()} on .* since 20"
        for resume in (False, True):
            with pytest.raises(StorageError, match=message):
                Trainer(make_task(0), checkpoints=tmp_path, resume=resume)
        first.train(1)
    with Trainer(make_task(0), checkpoints=tmp_path, resume=True) as second:
        assert second.step == first.step
    assert not (tmp_path / NAME).exists()


def test_a_refused_training_leaves_the_folder_to_others(tmp_path: Path) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path) as trainer:
        trainer.train(1)
    with pytest.raises(StorageError, match="holds checkpoints of an earlier training"):
        Trainer(make_task(0), checkpoints=tmp_path)
    FolderLock(tmp_path).close()


def test_a_killed_holder_leaves_the_folder_to_others(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold() -> int:
        lock = FolderLock(tmp_path)
        os.write(writer, b"held")
        signal.pause()
        lock.close()
        return 0

    child = in_child(hold)
    assert os.read(reader, 4) == b"held"
    with pytest.raises(StorageError, match=f"process {child} on "):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL
    FolderLock(tmp_path).close()
    for end in (reader, writer):
        os.close(end)


def test_a_forked_child_neither_holds_the_folder_nor_frees_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)

    def child_of_the_holder() -> int:
        lock.close()
        try:
            FolderLock(tmp_path)
        except StorageError:
            return 7
        return 0

    assert status_of(in_child(child_of_the_holder)) == 7
    with pytest.raises(StorageError):
        FolderLock(tmp_path)
    reader, writer = os.pipe()
    child = in_child(lambda: len(os.read(reader, 1)))  # outlives the lock
    lock.close()
    FolderLock(tmp_path).close()
    os.write(writer, b"x")
    assert status_of(child) == 1
    for end in (reader, writer):
        os.close(end)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_what_is_no_file_is_not_waited_for_and_no_link_is_followed(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "run"
    place.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    if kind == "fifo":
        os.mkfifo(place / NAME)
    elif kind == "folder":
        (place / NAME).mkdir()
    else:
        (place / NAME).symlink_to(precious)
    with pytest.raises(OutputError, match="checkpoints cannot be written there"):
        FolderLock(place)
    assert precious.read_text() == "mine"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder whose checkpoints are all cut short."""
    with Trainer(make_task(0), checkpoints=tmp_path) as trainer:
        trainer.train(2)
    for path in checkpoints(tmp_path):
        path.write_bytes(path.read_bytes()[:100])
    assert len(checkpoints(tmp_path)) == 2
    return tmp_path


def test_a_training_does_not_begin_anew_where_all_checkpoints_are_damaged(damaged: Path, cli: Cli) -> None:
    before = {path: path.read_bytes() for path in damaged.iterdir()}
    status, _, errors = cli("train", SCRIPT, "--checkpoint", damaged, "--resume")
    assert status == 2
    assert "none of its 2 checkpoint(s) is complete, the newest is step-000000000010.minidb" in errors
    assert {path: path.read_bytes() for path in damaged.iterdir()} == before


def test_it_does_so_when_told(damaged: Path, cli: Cli) -> None:
    status, out, _ = cli("train", SCRIPT, "--checkpoint", damaged, "--resume", "--ignore-damaged", "--epochs", 1)
    assert status == 0, out
    with Trainer(make_task(0), checkpoints=damaged, resume=True) as trainer:
        assert trainer.step == 5


def test_an_older_whole_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path) as trainer:
        trainer.train(2)
    newest, _older = checkpoints(tmp_path)
    newest.write_bytes(newest.read_bytes()[:100])
    with Trainer(make_task(0), checkpoints=tmp_path, resume=True) as trainer:
        assert trainer.step == 5


def test_an_empty_folder_is_begun_in(tmp_path: Path) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path / "new", resume=True) as trainer:
        assert trainer.step == 0
