"""Results never depend on the schedule: random nets of real operators give SimpleNet's bytes under every runtime."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.errors import DagexecError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def

SHAPE = (64, 65)  # large enough for NumPy to let go of the interpreter lock, so that workers really overlap
INPUTS = ("x0", "x1", "x2")


@st.composite
def arithmetic_nets(draw: st.DrawFn) -> NetDef:
    """Operators on few blobs: many writers a blob, in-place updates, views, control inputs."""
    names = [*INPUTS, *(f"b{index}" for index in range(draw(st.integers(1, 6))))]
    written = list(INPUTS)
    net = NetDef(name="random", external_input=INPUTS)
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["Add", "Sub", "Max", "Tanh", "Copy", "Flatten", "Negative"]))
        inputs = [draw(st.sampled_from(written)) for _ in range(2 if kind in ("Add", "Sub", "Max") else 1)]
        output = draw(st.sampled_from(names))
        if kind in ("Copy", "Flatten", "Max") and output in inputs:
            continue  # may not be done in place
        net.op.append(operator_def(kind, inputs, [output]))
        net.op[-1].control_input.extend(draw(st.lists(st.sampled_from(written), max_size=1)))
        written = list(dict.fromkeys([*written, output]))
    return net


def run_repeatedly(net_class: type[BaseNet], definition: NetDef, workers: int, times: int) -> list[dict[str, bytes]]:
    """What every blob holds after each of several runs; in-place updates of inputs carry over to the next run."""
    workspace = Workspace()
    random = np.random.default_rng(0)
    for name in INPUTS:
        workspace.feed_blob(name, random.standard_normal(SHAPE).astype(np.float32))
    options = {} if net_class is SimpleNet else {"num_workers": workers}
    found = []
    with net_class(definition, workspace, **options) as net:
        for _ in range(times):
            net.run()
            found.append({name: workspace.fetch_blob(name).tobytes() for name in workspace.blobs()})
    return found


@pytest.mark.slow
@given(arithmetic_nets(), st.sampled_from([DAGNet, AsyncDAGNet]), st.integers(1, 3))
@settings(max_examples=120, deadline=None)
def test_every_blob_has_the_bytes_of_a_run_in_list_order(
    definition: NetDef, net_class: type[BaseNet], workers: int
) -> None:
    try:
        expected = run_repeatedly(SimpleNet, definition, 1, 3)
    except DagexecError:
        return  # a net that SimpleNet refuses, for instance for shapes, says nothing about the others
    assert run_repeatedly(net_class, definition, workers, 3) == expected


def test_a_blob_read_before_it_becomes_a_view_has_the_value_of_the_run_before() -> None:
    net = NetDef(name="net", external_input=INPUTS)
    net.op.append(operator_def("Add", ["x0", "x2"], ["x0"]))
    net.op.append(operator_def("Flatten", ["x0"], ["x2"]))
    workspace = Workspace()
    for value, name in enumerate(INPUTS, 1):
        workspace.feed_blob(name, np.full((2, 2), value, np.float32))
    with SimpleNet(net, workspace) as running:
        for expected in (4, 8, 16):
            running.run()
            assert workspace.fetch_blob("x2").tolist() == [[expected] * 2] * 2
