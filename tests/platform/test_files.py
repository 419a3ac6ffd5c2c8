"""A pipe where a file is expected: whoever opens it would wait for somebody at the other end, for ever."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dagexec.core.choices import Choices
from dagexec.errors import DagexecError, ModelFormatError, StorageError
from dagexec.platform.disk import regular_only
from dagexec.platform.files import Unpublished
from dagexec.storage.database import Mode
from dagexec.storage.lmdb_database import _checksum_text, _write_checksum
from dagexec.storage.minidb import MiniDatabase

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
PATIENCE = 30


def at_once(call: Callable[[], object]) -> object:
    """What `call` returns or raises, on a thread that may be left behind. Raises AssertionError when it waits."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(call())
        except DagexecError as error:
            found.append(error)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it waits for the other end of the pipe"
    return found[0]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that nobody else has open."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND])
def test_what_is_no_regular_file_is_not_opened(pipe: Path, flags: int, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        for path in (pipe, tmp_path / "socket", tmp_path, Path("/dev/null")):
            assert isinstance(at_once(lambda path=path: regular_only(str(path), flags)), OSError)  # type: ignore[misc]


def test_a_regular_file_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "w", opener=regular_only) as file:
        file.write("text")
    with open(path, opener=regular_only) as file:
        assert file.read() == "text"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("elsewhere", path)])
def test_a_pipe_or_link_with_the_name_of_a_leftover_holds_nobody_up_and_stays(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    leftover = tmp_path / ".target.unfinished-0"
    make(leftover)
    new = at_once(lambda: Unpublished(tmp_path / "target"))
    assert isinstance(new, Unpublished)
    new.publish()
    assert (tmp_path / "target").is_file()
    assert os.path.lexists(leftover)


@pytest.mark.parametrize("mode", [Mode.READ, Mode.WRITE])
def test_a_pipe_is_no_database(pipe: Path, mode: Mode) -> None:
    found = at_once(lambda: MiniDatabase(pipe, mode))
    assert isinstance(found, StorageError)
    assert str(pipe) in str(found)


def test_a_pipe_is_no_file_of_choices(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGEXEC_CHOICES", str(pipe))
    assert at_once(lambda: Choices().find("key")) is None
    assert isinstance(at_once(lambda: Choices().load(pipe)), ModelFormatError)


def test_pipes_beside_an_lmdb_database_hold_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"pages")
    os.mkfifo(tmp_path / "data.crc32")
    assert at_once(lambda: _checksum_text(tmp_path)) == ""
    os.unlink(tmp_path / "data.crc32")
    os.mkfifo(tmp_path / "data.new")
    assert at_once(lambda: _write_checksum(tmp_path)) is None
    assert _checksum_text(tmp_path).endswith(" 5")
