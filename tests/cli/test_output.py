"""What is written where there is no room: one error that names the file, nothing half-written, and what was before."""

from __future__ import annotations

import os
import resource
import select
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

import dagexec
from dagexec.analysis.plot import draw_graph, new_figure, save_figure
from dagexec.core.choices import Choices
from dagexec.errors import OutputError
from dagexec.executor.source.loading import load_model
from dagexec.export import onnx_model, save_onnx
from dagexec.platform.files import write_atomically
from dagexec.report.document import Report
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import Plan
from dagexec.storage.net_file import save_net
from tests.command_line import Cli

ROOM = 128
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def lenet() -> Iterator[dagexec.Executor]:
    with dagexec.compile("zoo:lenet", net_type="simple") as executor:
        executor.run({"data": np.zeros((1, 1, 28, 28), np.float32)})  # so that it has a plan
        yield executor


@contextmanager
def no_room() -> Iterator[None]:
    """Within it, the system lets files of this process grow to 128 bytes, as a full disk would.

    No fixture: pytest reports a test, maybe to a file, before it tears fixtures down. Modules that are imported in it
    are not compiled to files, which would be cut off and be found by later imports.
    """
    before, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def traced(executor: dagexec.Executor, path: Path) -> None:
    trace = Trace()
    executor.run({"data": np.zeros((1, 1, 28, 28), np.float32)}, trace=trace)
    trace.write(path)


def choices_to(path: Path) -> None:
    choices = Choices()
    for number in range(100):
        choices.keep(f"key {number}", "name")
    choices.save(path)


def plan_of(executor: dagexec.Executor) -> Plan:
    return executor.net().plan


WRITERS: dict[str, Callable[[dagexec.Executor, Path], object]] = {
    "net.pb": lambda executor, path: save_net(executor.model.net, path),
    "net.pbtxt": lambda executor, path: save_net(executor.model.net, path),
    "model.onnx": lambda _, path: save_onnx(load_model("zoo:lenet"), path),
    "trace.json": traced,
    "choices.json": lambda _, path: choices_to(path),
    "page.html": lambda _, path: Report("a page", "", []).write(path),
    "graph.dot": lambda executor, path: draw_graph(plan_of(executor), path),
    "graph.png": lambda executor, path: draw_graph(plan_of(executor), path),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_is_one_error_and_leaves_what_was(
    name: str, before: bool, lenet: dagexec.Executor, tmp_path: Path
) -> None:
    if name.endswith(".png"):
        pytest.importorskip("matplotlib")
    path = tmp_path / name
    if before:
        path.write_bytes(b"before")
    with no_room(), pytest.raises(OutputError, match=rf"{name}: cannot be written: File too large"):
        WRITERS[name](lenet, path)
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == ([b"before"] if before else [])


@pytest.mark.parametrize("option", ["--output", "--trace", "--report"])
def test_a_command_without_room_ends_with_status_2_and_nothing_half_written(
    option: str, cli: Cli, tmp_path: Path
) -> None:
    with no_room():
        status, _, err = cli("run", "zoo:lenet", "--repeat", "1", option, tmp_path / "file.html")
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert "dagexec: OutputError: " in err
    assert "file.html: cannot be written: File too large" in err


def test_a_model_of_two_files_without_room_leaves_neither(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx_model, "_MOST_IN_ONE_FILE", 1000)
    with no_room(), pytest.raises(OutputError, match=r"model\.onnx\.data: cannot be written: File too large"):
        save_onnx(load_model("zoo:lenet"), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_of_two_files_replaces_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx_model, "_MOST_IN_ONE_FILE", 1000)
    model = load_model("zoo:lenet")
    names = ["model.onnx.data", "model.onnx.1.data"]  # a new one, so that the old model has what it says to the end
    for name in names:
        save_onnx(model, tmp_path / "model.onnx")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model.onnx", name])
    read = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(tmp_path / "model.onnx").graph.initializer}
    whole = {one.name: onnx.numpy_helper.to_array(one) for one in onnx_model.to_onnx(model).graph.initializer}
    assert read.keys() == whole.keys()
    assert all(np.array_equal(read[name], whole[name]) for name in whole)
    assert (tmp_path / name).stat().st_size < 2 * sum(array.nbytes for array in whole.values())


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_device_is_written_to_and_not_replaced() -> None:
    with pytest.raises(OutputError, match="/dev/full: cannot be written: No space left on device"):
        write_atomically(FULL, b"content")
    assert stat.S_ISCHR(FULL.stat().st_mode)


@pytest.mark.slow
def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_figure(new_figure(1, 1)[0], tmp_path / "curve.SVG")
    assert b"<svg" in (tmp_path / "curve.SVG").read_bytes()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("file")
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "latest", content)
        assert (tmp_path / "file").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "latest"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes here")
def test_whoever_reads_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OutputError, match="pipe: cannot be written"):  # nobody reads it, and nobody is waited for
        write_atomically(path, b"lost")
    read: list[bytes] = []
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(handle, True)

    def read_all() -> None:
        select.select([handle], [], [])  # before somebody writes, a read says that it is over
        read.extend(iter(lambda: os.read(handle, 1 << 16), b""))

    thread = threading.Thread(target=read_all)
    thread.start()
    write_atomically(path, b"much" * (1 << 16))  # more than a pipe holds
    thread.join()
    os.close(handle)
    assert b"".join(read) == b"much" * (1 << 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--version"],  # print
        ["--help"],  # typer
        ["inspect", "zoo:lenet"],  # rich
        ["run", "zoo:missing"],  # standard error is the same pipe, as after 2>&1
    ],
)
def test_output_that_nobody_reads_ends_with_status_141(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "dagexec", *words], stdout=write, stderr=write, check=False)
    os.close(write)
    assert done.returncode == 141
