"""Results in tests know which engines computed them, and bytes of two engines cannot be compared."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import InputInfo, Model, NetDef, Workspace, op
from dagexec.core.dtypes import FLOAT32
from dagexec.devices.sim import simulated
from tests.engines import TwoEnginesError
from tests.pipelines.layers import dense

pytest.importorskip("cffi")  # oneDNN's engine is the other one

Array = npt.NDArray[Any]
X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def result(model: Model | None = None, **options: Any) -> Array:
    with dagexec.compile(model or dense("layer", 8, 16), **options) as executor:
        found: Array = executor.run({"x": X})["y"]
        return found


def in_workspace(engine: str) -> Array:
    layer, workspace = dense("layer", 8, 16), Workspace()
    for name, array in {"x": X, **layer.parameters}.items():
        workspace.feed_blob(name, array)
    net = NetDef(name="net", op=layer.net.op)
    for definition in net.op:
        definition.engine = engine
    workspace.run_net_once(net)
    return workspace.fetch_blob("y")


COMPARISONS = {
    "bytes": lambda one, other: one.tobytes() == other.tobytes(),
    "bytes that differ": lambda one, other: one.tobytes() != other.tobytes(),
    "dictionaries of bytes": lambda one, other: {"y": one.tobytes()} == {"y": other.tobytes()},
    "lists of bytes": lambda one, other: [one.tobytes()] == [other.tobytes()],
    "bytes of what NumPy computes from them": lambda one, other: (one[1:] * 2).tobytes() == other[1:].tobytes(),
    "array_equal": lambda one, other: np.array_equal(one, other),
    "assert_array_equal": lambda one, other: np.testing.assert_array_equal(one, other),
}


@pytest.mark.parametrize("compare", COMPARISONS.values(), ids=COMPARISONS)
def test_results_of_a_simulated_device_and_of_the_hosts_engine_cannot_be_compared_byte_for_byte(compare: Any) -> None:
    with simulated("sim:0"):
        one, other = result(device="sim:0"), result()
    with pytest.raises(TwoEnginesError, match=r"FusedFC by dagexec\.ops\.families\.product.*, and .*onednn"):
        compare(one, other)


def test_on_one_engine_they_can() -> None:
    with simulated("sim:0"):
        one, other = result(device="sim:0", optimize=False), result(optimize=False)
    assert one.tobytes() == other.tobytes()


def test_engines_of_one_device_are_told_apart_also_in_workspaces() -> None:
    assert in_workspace("").tobytes() == in_workspace("").tobytes()
    with pytest.raises(TwoEnginesError, match=r"and FC by dagexec\.ops\.families\.product"):
        assert in_workspace("ONEDNN").tobytes() == in_workspace("").tobytes()


@pytest.mark.exact
def test_a_test_that_is_marked_exact_may_compare_them() -> None:
    with simulated("sim:0"):
        assert len(result(device="sim:0").tobytes()) == len(result().tobytes())
        _ = result(device="sim:0").tobytes() == result().tobytes()


def test_numbers_and_what_numpy_computes_alone_can_always_be_compared() -> None:
    with simulated("sim:0"):
        one, other = result(device="sim:0"), result()
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert np.zeros(3).tobytes() == bytes(24)


def test_what_only_moves_elements_or_gives_integers_has_the_same_bytes_everywhere() -> None:
    info = {"x": InputInfo(FLOAT32, (6, 8))}
    moving = Model("moving", NetDef(name="moving", op=[op("Transpose", "x", "y")]), inputs=info, outputs=("y",))
    choosing = Model("choosing", NetDef(name="choosing", op=[op("ArgMax", "x", "y")]), inputs=info, outputs=("y",))
    with simulated("sim:0"):
        for model in (moving, choosing):
            assert result(model, device="sim:0").tobytes() == result(model).tobytes()


def test_results_go_to_other_processes_as_plain_arrays() -> None:
    found = result()
    assert type(pickle.loads(pickle.dumps(found))) is np.ndarray
    assert type(pickle.loads(pickle.dumps(found.tobytes()))) is bytes
