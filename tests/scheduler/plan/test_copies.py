"""Copies across devices, as a change of the net: what is copied, when, and how often."""

from __future__ import annotations

import pytest

from dagexec.core.device import CPU, Device
from dagexec.core.graph import build_graph
from dagexec.core.program import Program, program_of
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import SchemaError
from dagexec.scheduler.plan.copies import insert_copies

SIM, OTHER = Device("sim", 0), Device("sim", 1)


def operator(kind: str, inputs: str, outputs: str, device: Device = CPU) -> OperatorDef:
    return OperatorDef(type=kind, input=inputs.split(), output=outputs.split(), device_option=device.to_option())


def net_of(*operators: OperatorDef, inputs: str = "") -> NetDef:
    return NetDef(name="net", op=operators, external_input=inputs.split())


def lines(net: NetDef | Program) -> list[str]:
    """One text an operator: `device: type inputs -> outputs`."""
    return [f"{op.device}: {op.type} {' '.join(op.input)} -> {' '.join(op.output)}" for op in program_of(net).op]


def test_a_net_on_one_device_is_left_as_it_is() -> None:
    net = net_of(operator("Relu", "x", "y"), operator("Relu", "y", "z"))
    placed = insert_copies(net)
    assert lines(placed.net) == lines(net)
    assert not placed.constants.op


def test_inputs_go_to_the_device_once_and_results_come_back_when_the_host_reads_them() -> None:
    net = net_of(
        operator("Relu", "x", "a", SIM), operator("Tanh", "x", "b", SIM), operator("Sum", "a b", "c"), inputs="x"
    )
    assert lines(insert_copies(net).net) == [
        "sim:0: CopyFromCPUInput x -> x@sim:0",
        "sim:0: Relu x@sim:0 -> a",
        "sim:0: Tanh x@sim:0 -> b",
        "sim:0: EnsureCPUOutput a -> a@cpu",
        "sim:0: EnsureCPUOutput b -> b@cpu",
        "cpu: Sum a@cpu b@cpu -> c",
    ]


def test_between_two_devices_of_a_kind_there_is_one_copy() -> None:
    net = net_of(operator("Relu", "x", "a", SIM), operator("Relu", "a", "b", OTHER))
    placed = insert_copies(net, lambda name: SIM if name == "x" else None)
    assert lines(placed.net) == ["sim:0: Relu x -> a", "sim:1: Copy a -> a@sim:1", "sim:1: Relu a@sim:1 -> b"]


def test_a_blob_written_again_is_copied_again() -> None:
    net = net_of(
        operator("Relu", "x", "a"),
        operator("Relu", "a", "b", SIM),
        operator("Tanh", "x", "a"),
        operator("Relu", "a", "c", SIM),
    )
    assert lines(insert_copies(net).net) == [
        "cpu: Relu x -> a",
        "sim:0: CopyFromCPUInput a -> a@sim:0",
        "sim:0: Relu a@sim:0 -> b",
        "cpu: Tanh x -> a",
        "sim:0: CopyFromCPUInput a -> a@sim:0",
        "sim:0: Relu a@sim:0 -> c",
    ]


def test_a_blob_changed_in_place_elsewhere_comes_home_at_once() -> None:
    net = net_of(operator("Relu", "x", "a"), operator("Tanh", "a", "a", SIM), operator("Relu", "a", "b"))
    assert lines(insert_copies(net).net) == [
        "cpu: Relu x -> a",
        "sim:0: CopyFromCPUInput a -> a@sim:0",
        "sim:0: Tanh a@sim:0 -> a@sim:0",
        "sim:0: EnsureCPUOutput a@sim:0 -> a",
        "cpu: Relu a -> b",
    ]


def test_a_reader_on_the_device_that_wrote_last_needs_no_copy() -> None:
    net = net_of(operator("Relu", "x", "a"), operator("Tanh", "a", "a", SIM), operator("Relu", "a", "b", SIM))
    assert lines(insert_copies(net).net)[-1] == "sim:0: Relu a@sim:0 -> b"


def test_constants_are_copied_beforehand() -> None:
    net = net_of(operator("FC", "x w b", "y", SIM), operator("FC", "y w b", "z", SIM))
    placed = insert_copies(net, lambda name: CPU if name in "xwb" else None, frozenset("wb"))
    assert lines(placed.constants) == [
        "sim:0: CopyFromCPUInput w -> w@sim:0",
        "sim:0: CopyFromCPUInput b -> b@sim:0",
    ]
    assert lines(placed.net) == [
        "sim:0: CopyFromCPUInput x -> x@sim:0",
        "sim:0: FC x@sim:0 w@sim:0 b@sim:0 -> y",
        "sim:0: FC y w@sim:0 b@sim:0 -> z",
    ]


def test_copies_that_are_written_down_are_not_copied_for() -> None:
    net = net_of(operator("CopyCPUToGPU", "x", "a", SIM), operator("CopyGPUToCPU", "a", "b", SIM))
    assert lines(insert_copies(net).net) == lines(net)


def test_the_device_of_the_net_is_that_of_operators_that_name_none() -> None:
    net = NetDef(name="net", device_option=SIM.to_option(), op=[OperatorDef(type="Relu", input=["x"], output=["y"])])
    assert lines(insert_copies(net).net) == ["sim:0: CopyFromCPUInput x -> x@sim:0", "sim:0: Relu x@sim:0 -> y"]


def test_a_blob_that_has_the_name_of_a_copy_is_refused() -> None:
    net = net_of(operator("Relu", "x", "x@sim:0"), operator("Relu", "x", "y", SIM))
    with pytest.raises(SchemaError, match=r"net 'net': blob 'x@sim:0' is reserved for 'x' on sim:0; rename yours"):
        insert_copies(net)


def test_a_control_input_orders_also_what_is_written_on_other_devices() -> None:
    net = net_of(operator("Relu", "x", "a"), operator("Relu", "x", "b"), operator("Tanh", "x", "a", SIM), inputs="x")
    net.op[1].control_input.append("a")
    graph = build_graph(insert_copies(net).net)
    kinds = [definition.type for definition in graph.operators]
    assert kinds == ["Relu", "Relu", "CopyFromCPUInput", "Tanh", "EnsureCPUOutput"]
    assert 1 in graph.parents[3]
    assert 0 in graph.parents[1]


def test_a_control_input_comes_after_a_write_on_another_device() -> None:
    net = net_of(operator("Relu", "x", "a"), operator("Tanh", "x", "a", SIM), operator("Relu", "x", "b"), inputs="x")
    net.op[2].control_input.append("a")
    graph = build_graph(insert_copies(net).net)
    assert [definition.type for definition in graph.operators][-2:] == ["EnsureCPUOutput", "Relu"]
    assert 3 in graph.parents[4]


def test_a_result_goes_where_its_blob_is_and_the_net_stays_what_it_was() -> None:
    net = net_of(operator("Relu", "x", "y"), inputs="x")
    net.external_output.append("y")
    placed = insert_copies(net, lambda name: SIM if name == "y" else None).net
    assert lines(placed) == ["cpu: Relu x -> y@cpu", "sim:0: CopyFromCPUInput y@cpu -> y"]
    assert (placed.name, list(placed.external_input), list(placed.external_output)) == ("net", ["x"], ["y"])


def test_an_operator_that_a_device_does_not_have_runs_on_the_host_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = Device("cuda", 0)
    net = net_of(
        operator("Relu", "x", "y", cuda),
        operator("CreateBlobsQueue", "", "queue", cuda),
        operator("EnqueueBlobs", "queue y", "y", cuda),
        operator("Relu", "y", "z", cuda),
        inputs="x",
    )
    net.op[2].device_option.random_seed = 7
    with caplog.at_level("INFO", "dagexec"):
        placed = insert_copies(net, lambda name: cuda if name == "x" else None)
    assert [line for line in lines(placed.net) if "Enqueue" in line] == ["cpu: EnqueueBlobs queue y@cpu -> y@cpu"]
    assert [
        definition.device_option.random_seed for definition in placed.net.op if definition.type == "EnqueueBlobs"
    ] == [7]
    assert "cuda:0: EnsureCPUOutput y -> y@cpu" in lines(placed.net)
    assert "1 CreateBlobsQueue from cuda:0, 1 EnqueueBlobs from cuda:0" in caplog.text


def test_what_no_device_has_stays_where_it_was_asked_for() -> None:
    net = net_of(operator("NoSuchOperator", "x", "y", SIM))
    assert lines(insert_copies(net, lambda name: SIM if name == "x" else None).net) == ["sim:0: NoSuchOperator x -> y"]
