"""What operators touch: memory shared by views, by adopted arrays and by reuse; working memory; what only runs know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.blob import Blob
from dagexec.core.device import Device
from dagexec.core.graph import build_graph
from dagexec.devices.sim import simulated
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.families.communication import ThreadGroup
from dagexec.scheduler.hazards import Accesses, check_net, check_plan, named_accesses, prepared_accesses
from dagexec.scheduler.hazards.accesses import region_of
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.synchronization import synchronize
from tests.ops.running import operator_def

Array = npt.NDArray[Any]


def touched(accesses: Accesses, operator: int) -> tuple[set[str], set[str]]:
    """Names of what an operator reads and writes."""
    names = [resource.name for resource in accesses.resources]
    return {names[i] for i in accesses.reads[operator]}, {names[i] for i in accesses.writes[operator]}


def workspace_with(blobs: Mapping[str, Array]) -> Workspace:
    workspace = Workspace()
    for name, value in blobs.items():
        workspace.feed_blob(name, value)
    return workspace


def prepared(net: BaseNet) -> Accesses:
    return prepared_accesses(net.graph, net.operators, net.prepared().prepared)


VIEWED = NetDef(
    name="viewed",
    external_input=["x"],
    op=[
        operator_def("Relu", ["x"], ["a"]),
        operator_def("Flatten", ["a"], ["v"]),
        operator_def("Flatten", ["v"], ["vv"]),
        operator_def("Tanh", ["vv"], ["y"]),
    ],
)


def test_whoever_reads_a_view_reads_the_memory_of_what_it_views_and_the_view_itself_touches_nothing() -> None:
    with SimpleNet(VIEWED, workspace_with({"x": np.ones((2, 3, 4), np.float32)})) as net:
        accesses = prepared(net)
    memory = "memory of blobs 'a', 'v', 'vv'"
    assert touched(accesses, 0) == ({"blob 'x'"}, {memory})
    assert touched(accesses, 1) == touched(accesses, 2) == (set(), set())
    assert touched(accesses, 3) == ({memory}, {"blob 'y'"})


def test_unprepared_a_view_stands_for_itself_and_for_what_it_views() -> None:
    accesses = named_accesses(build_graph(VIEWED))
    assert touched(accesses, 0) == ({"blob 'x'"}, {"blob 'a'"})
    assert touched(accesses, 2) == ({"blob 'v'", "blob 'a'"}, {"blob 'vv'"})
    assert touched(accesses, 3) == ({"blob 'vv'", "blob 'v'", "blob 'a'"}, {"blob 'y'"})


def test_the_other_outputs_of_a_view_are_written_but_not_the_memory_that_it_views() -> None:
    net_def = NetDef(name="net", external_input=["x"], op=[operator_def("Reshape", ["x"], ["r", "old"], shape=[6])])
    with SimpleNet(net_def, workspace_with({"x": np.ones((2, 3), np.float32)})) as net:
        accesses = prepared(net)
    assert touched(accesses, 0) == ({"memory of blobs 'r', 'x'"}, {"blob 'old'"})


def branches(control: bool) -> NetDef:
    """Two branches of two operators over `t` and `u`, with an order between them or not."""
    net = NetDef(
        name="branches",
        external_input=["x"],
        op=[
            operator_def("Relu", ["x"], ["t"]),
            operator_def("Tanh", ["t"], ["y"]),
            operator_def("Negative", ["x"], ["u"]),
            operator_def("Tanh", ["u"], ["z"]),
        ],
    )
    if control:
        net.op[2].control_input.append("y")
    return net


@pytest.mark.parametrize("net_class", [DAGNet, AsyncDAGNet])
@pytest.mark.parametrize("control", [True, False])
def test_activations_that_have_one_memory_must_be_ordered(net_class: type[DAGNet], control: bool) -> None:
    """As a memory plan gives a blob the memory of another that nobody reads any more."""
    workspace = workspace_with({"x": np.ones((4, 5), np.float32)})
    memory = np.zeros((4, 5), np.float32)
    workspace.create_blob("t").tensor().adopt(memory, writable=True)
    workspace.create_blob("u").tensor().adopt(memory, writable=True)
    with net_class(branches(control), workspace, num_workers=2) as net:
        proof = check_net(net)
    assert proof.holds == control
    if not control:
        assert {found.resource for found in proof.unordered} == {"memory of blobs 't', 'u'"}
        assert {str(found.kind.name) for found in proof.unordered} == {"WAR", "WAW"}


def test_simple_net_needs_no_order_but_its_own() -> None:
    workspace = workspace_with({"x": np.ones((4, 5), np.float32)})
    memory = np.zeros((4, 5), np.float32)
    for name in ("t", "u"):
        workspace.create_blob(name).tensor().adopt(memory, writable=True)
    with SimpleNet(branches(False), workspace) as net:
        assert check_net(net).holds


def resources_of(arrays: Mapping[str, Array]) -> dict[str, set[str]]:
    """The resources of each blob of a net that copies blobs which have adopted `arrays`."""
    workspace = Workspace()
    net = NetDef(name="net", external_input=list(arrays))
    for name, array in arrays.items():
        workspace.create_blob(name).tensor().adopt_strided(array)
        net.op.append(operator_def("Copy", [name], [f"{name} copied"]))
    with SimpleNet(net, workspace) as running:
        accesses = prepared(running)
    return {name: touched(accesses, index)[0] for index, name in enumerate(arrays)}


def test_arrays_that_overlap_in_part_share_that_part_only() -> None:
    memory = np.zeros(30, np.float32)
    found = resources_of({"a": memory[:15], "b": memory[10:20], "c": memory[15:]})
    assert found["a"] & found["b"] == {"memory of blobs 'a', 'b'"}
    assert found["b"] & found["c"] == {"memory of blobs 'b', 'c'"}
    assert not found["a"] & found["c"]


def test_arrays_whose_elements_alternate_share_nothing() -> None:
    memory = np.zeros((6, 8), np.float32)
    found = resources_of({"even": memory[:, ::2], "odd": memory[:, 1::2], "row": memory[2]})
    assert not found["even"] & found["odd"]
    assert found["even"] & found["row"] == {"memory of blobs 'even', 'row'"}
    assert found["odd"] & found["row"] == {"memory of blobs 'odd', 'row'"}


def test_a_blob_whose_shape_only_a_run_can_tell_goes_by_its_name() -> None:
    net_def = NetDef(
        name="net",
        external_input=["x", "shape"],
        op=[
            operator_def("Copy", ["shape"], ["computed"]),
            operator_def("Reshape", ["x", "computed"], ["r", "old"]),
            operator_def("Relu", ["r"], ["y"]),
        ],
    )
    with SimpleNet(net_def, workspace_with({"x": np.ones(6, np.float32), "shape": np.array([2, 3], np.int64)})) as net:
        net.run()  # the tensors have memory now, which the next run may replace
        accesses = prepared(net)
        assert touched(accesses, 1) == ({"blob 'x'", "blob 'computed'"}, {"blob 'r'", "blob 'old'"})
        assert touched(accesses, 2) == ({"blob 'r'", "blob 'x'"}, {"blob 'y'"})


def conv_net(**arguments: int) -> NetDef:
    net = NetDef(name="conv", external_input=["x", "w"])
    for index in range(2):
        net.op.append(operator_def("Conv", ["x", "w"], [f"y{index}"], kernel=3, **arguments))
    return net


def conv_workspace(device: str = "cpu") -> Workspace:
    workspace = workspace_with({"x": np.ones((1, 4, 6, 6), np.float32), "w": np.ones((4, 4, 3, 3), np.float32)})
    dagexec.create_shared_buffer(workspace, device)
    return workspace


def test_working_memory_is_found_with_and_without_preparing() -> None:
    net_def = conv_net(shared_buffer=1)
    assert touched(named_accesses(build_graph(net_def)), 0)[1] == {"blob 'y0'", "shared buffer of cpu"}
    with DAGNet(net_def, conv_workspace(), num_workers=2) as net:
        accesses = prepared(net)
        proof = check_net(net)
    assert touched(accesses, 1)[1] == {"blob 'y1'", "shared buffer of cpu"}
    assert [resource.name for resource in accesses.resources if resource.exclusive] == ["shared buffer of cpu"]
    assert proof.holds
    assert proof.guards == {"shared buffer of cpu": 2}


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_a_convolution_by_onednn_does_not_take_turns_at_the_shared_buffer_until_numpy_serves_it() -> None:
    workspace = conv_workspace()
    definition = conv_net(shared_buffer=1)
    for convolution in definition.op:
        convolution.engine = "ONEDNN"
    with SimpleNet(definition, workspace) as net:
        for dtype, turns in ((np.float32, []), (np.float64, ["shared buffer of cpu"]), (np.float32, [])):
            for name in definition.op[0].input:
                workspace.feed_blob(name, workspace.fetch_blob(name).astype(dtype))
            net.run()
            assert {name for name in touched(prepared(net), 0)[1] if "buffer" in name} == set(turns)


def test_a_library_state_is_working_memory_of_its_users() -> None:
    net_def = conv_net()
    for definition in net_def.op:
        definition.engine = "CUDNN"
        definition.arg.add(name="cudnn_state", i=2)
        definition.device_option.CopyFrom(Device("sim").to_option())
    assert "library state 2 of sim:0" in touched(named_accesses(build_graph(net_def)), 0)[1]
    with simulated(), AsyncDAGNet(net_def, conv_workspace("sim:0"), num_workers=2) as net:
        assert "library state 2 of sim:0" in touched(prepared(net), len(net.operators) - 1)[1]
        proof = check_net(net)
    assert proof.holds
    assert proof.guards == {"library state 2 of sim:0": 2}


def test_memory_of_a_device_is_told_from_other_memory() -> None:
    with simulated():
        workspace = Workspace()
        workspace.feed_blob("a", np.ones(4, np.float32), device="sim:0")
        workspace.feed_blob("b", np.ones(4, np.float32), device="sim:0")
        workspace.create_blob("v").tensor().share(workspace.get_blob("a").tensor())
        regions = [region_of(workspace.get_blob(name)) for name in ("a", "b", "v")]
    assert None not in regions
    assert regions[0] is not None
    assert regions[2] is not None
    assert regions[0].low == regions[2].low != getattr(regions[1], "low", None)
    assert regions[0].high - regions[0].low == 16
    assert region_of(Blob("empty")) is None


def test_an_object_that_an_operator_changes_counts_as_written() -> None:
    """Two collectives of one world have nothing else in common, and must not be swapped."""
    net_def = NetDef(
        name="collectives",
        op=[operator_def("Broadcast", ["world", "a"], ["a"]), operator_def("Broadcast", ["world", "b"], ["b"])],
    )
    workspace = workspace_with({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    workspace.create_blob("world").value = ThreadGroup(1).join(0)
    with DAGNet(net_def, workspace, num_workers=2) as net:
        for accesses in (named_accesses(net.graph), prepared(net)):
            assert [touched(accesses, index)[1] for index in range(2)] == [
                {"blob 'world'", "blob 'a'"},
                {"blob 'world'", "blob 'b'"},
            ]
        assert check_net(net).holds
        assert len(net.plan.chains) == 1
        none: tuple[tuple[int, ...], ...] = ((), ())
        loose = replace(net.graph, parents=none, children=none, reduced_parents=none, reduced_children=none)
        plan = build_plan(loose, [1.0, 1.0], single_operator_chains(loose))
        unordered = check_plan(plan, synchronize(plan, [()] * 2), accesses).unordered
        assert ["'world'" in str(found) for found in unordered] == [True]
