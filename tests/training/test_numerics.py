"""Stopping at the first NaN."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.errors import NonFiniteError, OperatorError
from dagexec.training.numerics import with_nan_checks
from tests.ops.running import operator_def, run_operator


def _net(device: str) -> NetDef:
    net = NetDef(
        name="numbers",
        op=[
            operator_def("Negative", ["x"], ["minus"]),
            operator_def("Sqrt", ["minus"], ["root"]),
            operator_def("Relu", ["root"], ["root"]),
            operator_def("Add", ["root", "x"], ["sum"]),
        ],
    )
    net.device_option.CopyFrom(Device.parse(device).to_option())
    return net


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_the_operator_that_made_the_first_nan_is_named_on_every_schedule(net_type: str, device: str) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([-1.0, 4.0, -9.0], np.float32))
    with workspace.create_net(with_nan_checks(_net(device)), net_type, 2) as net:  # type: ignore[attr-defined]
        with pytest.raises(
            OperatorError, match=r"Sqrt 'root'.*1 of 3 elements of blob 'root'.*at \[1\]: nan"
        ) as failed:
            net.run()
        assert isinstance(failed.value.__cause__, NonFiniteError)
        workspace.feed_blob("x", np.array([-1.0, -4.0, -9.0], np.float32))
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("sum"), [0, -2, -6])


def test_what_is_fed_is_checked_before_anything_reads_it() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([1.0, np.inf], np.float32))
    net = workspace.build_net(with_nan_checks(_net("cpu")))
    with pytest.raises(OperatorError, match=r"what fed blob 'x(@cuda:0)?'.*1 of 2"):
        net.run()


def test_integers_pass() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([1, 2], np.int64))
    workspace.run_net_once(with_nan_checks(NetDef(name="n", op=[operator_def("Copy", ["x"], ["y"])])))
    np.testing.assert_array_equal(workspace.fetch_blob("y"), [1, 2])


def test_a_check_of_several_tensors_is_of_the_first_and_names_the_others_that_are_bad() -> None:
    x, bad = np.ones(2, np.float32), np.array([1, np.nan], np.float32)
    np.testing.assert_array_equal(run_operator("NanCheck", [x, bad, np.arange(2)])[0], x)
    with pytest.raises(OperatorError, match=r"blob 'x0' NaN or infinite, the first at \[1\]: nan; other blobs .*'x2'"):
        run_operator("NanCheck", [bad, x, bad])
