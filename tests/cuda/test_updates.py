"""Update operators on CUDA: what the tests of the host's operators, run there, do not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.device import CPU, Device
from dagexec.devices.cuda import kernels
from dagexec.errors import OperatorError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices
from tests.ops.running import assert_rounds_to, on_device, operator_def

Array = npt.NDArray[Any]

CUDA = Device("cuda", 0)
rng = np.random.default_rng(11)
RATE = np.array([-0.1], np.float32)


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with cuda_devices():
        yield


def blobs_of_sparse(width: int, count: int, rows: int) -> dict[str, Array]:
    return {
        "param": rng.normal(size=(rows, width)),
        "moment": rng.uniform(1, 2, size=(rows, width)),
        "indices": rng.integers(0, rows, count),
        "grad": rng.normal(size=(count, width)),
        "rate": RATE,
    }


@pytest.mark.parametrize("deduplicate", [0, 1])
@pytest.mark.parametrize("row_wise", [False, True])
def test_rows_of_equal_indices_are_applied_in_order_whatever_the_grid(
    deduplicate: int, row_wise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = blobs_of_sparse(200, 60, 7)
    if row_wise:
        blobs["moment"] = blobs["moment"][:, 0].copy()
    op_type = "RowWiseSparseAdagrad" if row_wise else "SparseAdagrad"
    definition = operator_def(op_type, list(blobs), ["param", "moment"], deduplicate=deduplicate)
    found = on_device(CUDA, definition, blobs)
    for one, other in zip(found, on_device(CPU, definition, blobs), strict=True):
        assert_rounds_to(one, other, op_type)
    monkeypatch.setattr(kernels, "_BLOCKS_PER_MULTIPROCESSOR", 1)
    for one, other in zip(found, on_device(CUDA, definition, blobs), strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_last_of_equal_indices_stays() -> None:
    blobs = {
        "data": np.zeros((3, 4), np.int16),
        "indices": np.array([2, 0, 2, 0, 2]),
        "slices": np.arange(20, dtype=np.int16).reshape(5, 4),
    }
    (found,) = on_device(CUDA, operator_def("ScatterAssign", list(blobs), ["data"]), blobs)
    np.testing.assert_array_equal(found, [blobs["slices"][3], np.zeros(4), blobs["slices"][4]])


def test_an_index_out_of_range_fails_the_run_and_changes_no_other_row() -> None:
    blobs = blobs_of_sparse(5, 3, 4)
    blobs["indices"] = np.array([1, 4, -1])
    definition = operator_def("SparseAdagrad", list(blobs), ["param", "moment"])
    definition.device_option.CopyFrom(CUDA.to_option())
    workspace = Workspace()
    for name, array in blobs.items():
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        with pytest.raises(OperatorError, match=r"index 4 at place 1 must be in \[0, 4\)"):
            net.run()
        blob = next(one for one in net.operators if one.schema.type == "SparseAdagrad").output(0)
    found = blob.fetch()
    np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(blobs["param"], 1, 0))
    assert not np.array_equal(found[1], blobs["param"][1])


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_weighted_sums_of_more_tensors_than_a_kernel_takes(count: int) -> None:
    blobs: dict[str, Array] = {}
    for k in range(count):
        blobs[f"x{k}"] = rng.normal(size=(3, 5))
        blobs[f"w{k}"] = rng.normal(size=1).astype(np.float32)
    expected = sum(blobs[f"x{k}"] * float(blobs[f"w{k}"][0]) for k in range(count))
    for output in ("y", "x0"):
        (found,) = on_device(CUDA, operator_def("WeightedSum", list(blobs), [output]), blobs)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_the_norm_of_more_tensors_than_a_kernel_takes() -> None:
    blobs = {f"x{k}": np.array([k + 0.5], np.float32) for k in range(35)}
    (found,) = on_device(CUDA, operator_def("GlobalNorm", list(blobs), ["norm"]), blobs)
    np.testing.assert_allclose(found, np.sqrt(sum(k + 0.5 for k in range(35))), rtol=1e-6)


def test_adam_reads_the_iteration_and_the_rate_of_every_run() -> None:
    blobs = {
        "param": rng.normal(size=700).astype(np.float32),
        "m1": np.zeros(700, np.float32),
        "m2": np.zeros(700, np.float32),
        "grad": rng.normal(size=700).astype(np.float32),
    }
    results = []
    for device in (CPU, CUDA):
        definition = operator_def("Adam", [*blobs, "rate", "iteration"], ["param", "m1", "m2"])
        definition.device_option.CopyFrom(device.to_option())
        workspace = Workspace()
        for name, array in blobs.items():
            workspace.feed_blob(name, array)
        workspace.feed_blob("rate", RATE)
        workspace.feed_blob("iteration", np.array([0]))
        with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
            for iteration in range(3):
                workspace.feed_blob("iteration", np.array([iteration]))
                workspace.feed_blob("rate", RATE / (iteration + 1))
                net.run()
        results.append([workspace.fetch_blob(name).copy() for name in ("param", "m1", "m2")])
    for one, other in zip(results[1], results[0], strict=True):
        assert_rounds_to(one, other, "Adam")
