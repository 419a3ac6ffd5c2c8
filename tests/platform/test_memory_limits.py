"""Nets whose inputs, results or working memory do not fit: refused by name before anything is taken."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import OperatorDef
from dagexec.errors import OperatorError, ResourceError
from dagexec.platform import host_memory
from dagexec.platform.host_memory import CommittedMemory, Limit
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import leave
from tests.ops.running import operator_def

MIB = 1 << 20


def one_input(shape: tuple[int | None, ...], *operators: OperatorDef) -> Model:
    """A model "n" from x to y."""
    return Model("n", NetDef(name="n", op=operators), None, {}, {"x": InputInfo(FLOAT32, shape)}, ("y",))


def relu(source: str = "x", target: str = "y") -> OperatorDef:
    return operator_def("Relu", [source], [target])


def of_no_memory(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Zeros that are one element, repeated."""
    return np.broadcast_to(np.float32(0), shape)


HUGE = (1, 3, 1 << 16, 1 << 16)  # 48 GiB
LARGE = (3, 1 << 13, 1 << 13)  # 768 MiB


@pytest.mark.parametrize("shape", [LARGE, HUGE, (1 << 31,), (1 << 40,)], ids=str)
@pytest.mark.parametrize("optimize", [True, False])
def test_compilation_takes_no_memory_for_inputs_and_a_run_that_cannot_names_its_input(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], optimize: bool
) -> None:
    leave(monkeypatch, 64 * MIB)
    with dagexec.compile(one_input(shape, relu()), optimize=optimize, num_workers=1) as executor:
        refused = (
            r"net 'n': input 'x': a float32 tensor of shape .* needs [\d,]{11,} bytes; this machine has 67,108,864 "
        )
        with pytest.raises(ResourceError, match=refused):
            executor.run({"x": of_no_memory(*shape)})


def test_an_input_with_more_elements_than_an_array_can_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"net 'n': input 'x' of shape \(4611686018427387904,\)"):
        dagexec.compile(one_input((1 << 62,), relu()))


@pytest.mark.slow
def test_what_cannot_be_fed_is_not_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    leave(monkeypatch, 64 * MIB)
    with dagexec.compile(one_input(LARGE, relu()), tuning_seconds=5.0):
        assert "net 'n': input 'x' of shape (3, 8192, 8192) needs 805,306,368 bytes" in caplog.text


def test_a_warm_start_that_does_not_fit_names_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 64 * MIB)
    with pytest.raises(ResourceError, match=r"net 'n': warm start: input 'x' of shape .* needs 805,306,368 bytes"):
        dagexec.compile(one_input(LARGE, relu()), warm_start=True)


CASES: dict[str, Callable[[], OperatorDef]] = {
    "Tile": lambda: operator_def("Tile", ["x"], ["y"], tiles=1 << 12, axis=1),
    "Expand": lambda: operator_def("Expand", ["x", "shape"], ["y"]),
    "ResizeNearest": lambda: operator_def("ResizeNearest", ["x"], ["y"], width_scale=64.0, height_scale=64.0),
    "Pad": lambda: operator_def("PadImage", ["x"], ["y"], pad=2000),
    "ConstantFill": lambda: operator_def("ConstantFill", ["x"], ["y"], extra_shape=[1 << 14]),
    "GivenTensorFill": lambda: operator_def("GaussianFill", ["x"], ["y"], extra_shape=[1 << 14]),
    "Concat": lambda: operator_def("Concat", ["x"] * 4096, ["y", "sizes"], axis=1),
    "Im2Col": lambda: operator_def("Im2Col", ["x"], ["y"], kernel=16, pad=64),
}


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_result_that_does_not_fit_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, optimize: bool
) -> None:
    model = one_input((1, 4, 32, 32), CASES[name]())
    feeds: dict[str, Any] = {"x": np.ones((1, 4, 32, 32), np.float32)}
    if name == "Expand":  # its result's shape is a value of the run
        model = replace(model, inputs={**model.inputs, "shape": InputInfo(INT64, (4,))})
        feeds["shape"] = np.array([4096, 4, 32, 32])
    with dagexec.compile(model, optimize=optimize, num_workers=1, intra_op_threads=1) as executor:
        leave(monkeypatch, 8 * MIB)
        with pytest.raises(
            (ResourceError, OperatorError), match=r"'y'.*needs [\d,]+ bytes; this machine has 8,"
        ) as error:
            executor.run(feeds)
        assert isinstance(error.value, ResourceError) == (name != "Expand")  # refused before anything runs


@pytest.mark.parametrize("optimize", [True, False])
def test_results_between_operators_count(monkeypatch: pytest.MonkeyPatch, optimize: bool) -> None:
    middle = operator_def("Tile", ["x"], ["t"], tiles=1 << 12, axis=1)
    model = one_input((1, 1024), middle, operator_def("ReduceMax", ["t"], ["y"], axes=[1]))
    with dagexec.compile(model, optimize=optimize, num_workers=1, intra_op_threads=1) as executor:
        leave(monkeypatch, 8 * MIB)
        with pytest.raises(ResourceError, match=r"Tile 't' \(operator 0\) of net 'n'.*needs 16,777,216 bytes"):
            executor.run({"x": np.ones((1, 1024), np.float32)})


def test_working_memory_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a convolution by im2col: 2,048,000 bytes a block, where the result takes 1 MiB."""
    conv = operator_def("Conv", ["x", "w"], ["y"], kernel=5, pad=2)
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((1, 16, 128, 128), np.float32))
    workspace.feed_blob("w", np.ones((16, 16, 5, 5), np.float32))
    with SimpleNet(NetDef(name="n", op=[conv]), workspace) as net:
        leave(monkeypatch, 3 * MIB // 2)
        with pytest.raises(ResourceError, match=r"Conv 'y' \(operator 0\) of net 'n'.*needs [\d,]+ bytes"):
            net.run()
        monkeypatch.undo()
        net.run()


def leave_beside_what_is_held(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let the process take `nbytes` beside what it has now."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    most = resident() + nbytes
    monkeypatch.setattr(host_memory, "limits", lambda: iter([Limit(max(0, most - resident()), "this machine")]))
    monkeypatch.setattr(host_memory, "_committed_memory", CommittedMemory())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("keep", "room"), [(frozenset({"y"}), 64), (None, 96)], ids=["one plan", "memory of their own"]
)
def test_memory_of_other_shapes_is_let_go_of_where_both_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, keep: frozenset[str] | None, room: int
) -> None:
    leave_beside_what_is_held(monkeypatch, room * MIB)
    workspace = Workspace()
    definition = NetDef(name="n", op=[relu("x", "a"), operator_def("Tile", ["a"], ["y"], tiles=8, axis=0)])
    workspace.feed_blob("x", np.ones(1, np.float32))
    with SimpleNet(definition, workspace, keep=keep) as net:
        for size in (MIB, MIB + 64, MIB - 64, MIB):  # y takes 32 MiB
            workspace.feed_blob("x", np.ones(size, np.float32))
            net.run()
            assert workspace.get_blob("y").tensor().array.sum() == 8 * size


@pytest.mark.parametrize("shape", [(1, 1 << 16), (1, 1 << 20)], ids=["copied", "computed into place"])
def test_results_are_copied_only_where_memory_suffices(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    tile = operator_def("Tile", ["x"], ["y"], tiles=16, axis=0)
    with dagexec.compile(one_input(shape, tile), num_workers=1, intra_op_threads=1) as executor:
        feeds = {"x": np.ones(shape, np.float32)}
        executor.run(feeds)
        leave(monkeypatch, MIB)
        with pytest.raises(ResourceError, match=r"net 'n': result 'y' of shape .*, for the caller needs [\d,]+ bytes"):
            executor.run(feeds)
        monkeypatch.undo()
        assert executor.run(feeds)["y"].shape == (16, shape[1])
