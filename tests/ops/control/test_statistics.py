"""Statistics by name and timers."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.errors import OperatorError
from dagexec.ops.families.control.statistics import PROCESS
from tests.ops.running import operator_def, run_net


def exported(workspace: Workspace, *registry: str) -> dict[str, int]:
    """What StatRegistryExport gives, with the times checked."""
    run_net(workspace, operator_def("StatRegistryExport", list(registry), ["k", "v", "t"]))
    keys, values, times = map(workspace.fetch_blob, ("k", "v", "t"))
    assert len(times) == len(keys)
    assert (times > 1e18).all()
    return {key.decode(): value for key, value in zip(keys, values.tolist(), strict=True)}


def test_puts_count_under_their_names() -> None:
    workspace = Workspace()
    exported(workspace)
    for value in (1.5, 4.0):
        workspace.feed_blob("x", np.array([value], np.float32))
        for kind, name in (("Average", "a"), ("StdDev", "s"), ("Increment", "i")):
            run_net(workspace, operator_def(f"{kind}Put", ["x"], [], stat_name=name, magnitude_expand=2))
    found = exported(workspace)
    expected = {
        "a/stat_value/sum": 11, "a/stat_value/count": 2, "i/stat_value": 11,
        "s/stat_value/sum": 11, "s/stat_value/count": 2, "s/stat_value/sumoffset": 5, "s/stat_value/sumsqoffset": 25,
    }  # fmt: skip
    assert {key: value for key, value in found.items() if value} == expected
    assert not any(exported(workspace).values())


def test_values_that_do_not_fit_are_errors_unless_bound() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([np.nan], np.float32))
    workspace.feed_blob("none", np.empty(0, np.int64))
    with pytest.raises(OperatorError, match="nan is too large to count"):
        run_net(workspace, operator_def("AveragePut", ["x"], [], stat_name="n"))
    with pytest.raises(OperatorError, match="no argument 'default_value'"):
        run_net(workspace, operator_def("IncrementPut", ["none"], [], stat_name="n"))
    exported(workspace)
    run_net(workspace, operator_def("IncrementPut", ["x"], [], stat_name="n", bound=1, default_value=3.0))
    run_net(workspace, operator_def("IncrementPut", ["none"], [], stat_name="n", default_value=4.0))
    assert exported(workspace)["n/stat_value"] == 7


def test_a_registry_of_its_own_and_a_timer() -> None:
    workspace = Workspace()
    run_net(workspace, operator_def("StatRegistryCreate", [], ["registry"]))
    workspace.feed_blob("keys", np.array([b"a", b"b", b"a"], object))
    workspace.feed_blob("values", np.array([1, 2, 3]))
    run_net(workspace, operator_def("StatRegistryUpdate", ["keys", "values", "registry"], []))
    assert exported(workspace, "registry") == {"a": 4, "b": 2}
    begin, get = (
        operator_def("TimerBegin", [], ["timer"], counter_name="t"),
        operator_def("TimerGet", ["timer"], ["ns"]),
    )
    run_net(workspace, begin, get, operator_def("TimerGetAndEnd", ["timer"], ["all"]))
    assert 0 < workspace.fetch_blob("ns") <= workspace.fetch_blob("all")
    counts = dict(PROCESS.read(reset=True))
    assert counts["t/time_ns/count"] == 1
    assert counts["t/time_ns/sum"] >= workspace.fetch_blob("all")
