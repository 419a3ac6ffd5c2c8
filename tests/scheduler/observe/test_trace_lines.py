import re
from types import SimpleNamespace

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.operator import Operator
from dagexec.core.stream import Kernel
from dagexec.errors import OperatorError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.observe.trace_lines import LineObserver, line_observer, operator_line
from tests.nets import net_of, parents_from_edges, temporary_operator
from tests.ops.running import operator_def
from tests.scheduler.observe.test_observers import stream

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
NETS = [SimpleNet, DAGNet, AsyncDAGNet]


@pytest.fixture
def lines_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGEXEC_TRACE", "1")


@pytest.mark.usefixtures("lines_wanted")
@pytest.mark.parametrize("net_class", NETS)
def test_every_run_prints_a_line_for_each_operator_with_the_worker_and_the_time(
    net_class: type[BaseNet], capsys: pytest.CaptureFixture[str]
) -> None:
    with net_class(net_of(DIAMOND, name="diamond"), Workspace()) as net:
        net.run()
        net.run()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    worker = "MainThread" if net_class is SimpleNet else r"dagexec-diamond-\d"
    pattern = re.compile(rf"diamond\[(\d)\] +NoOp +b(\d) +{worker} +\d+\.\d\d\d ms")
    found = [pattern.fullmatch(line) for line in lines]
    assert all(found), lines
    assert sorted(match[1] for match in found if match) == sorted("01230123")
    assert all(match[1] == match[2] for match in found if match)


@pytest.mark.usefixtures("lines_wanted")
def test_an_executor_prints_too_beside_a_trace_that_the_caller_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    with dagexec.compile("zoo:lenet", optimize=False, num_workers=1) as executor:
        executor.run({"data": np.zeros((1, 1, 28, 28), np.float32)}, trace=trace)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lenet[")]
    assert len(lines) == len(trace.spans) == len(executor.graph)
    conv = next(line for line in lines if " Conv " in line)
    assert re.search(r"\d ms +\d+\.\d\d GFLOP/s +\d+\.\d\d GB/s$", conv)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_is_printed_and_nobody_observes(
    value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if value is None:
        monkeypatch.delenv("DAGEXEC_TRACE", raising=False)
    else:
        monkeypatch.setenv("DAGEXEC_TRACE", value)
    assert line_observer() is None
    with DAGNet(net_of(DIAMOND), Workspace()) as net:
        net.run()
    assert capsys.readouterr().err == ""


def test_the_variable_is_read_when_a_net_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DAGEXEC_TRACE", raising=False)
    with DAGNet(net_of([[]]), Workspace()) as net:
        monkeypatch.setenv("DAGEXEC_TRACE", "1")
        net.run()
        assert capsys.readouterr().err == ""


def product(rows: int, inner: int, columns: int) -> tuple[NetDef, Workspace]:
    workspace = Workspace()
    workspace.feed_blob("a", np.ones((rows, inner), np.float32))
    workspace.feed_blob("b", np.ones((inner, columns), np.float32))
    return NetDef(name="n", op=[operator_def("MatMul", ["a", "b"], ["c"])]), workspace


@pytest.mark.usefixtures("lines_wanted")
def test_a_line_is_one_write_so_that_those_of_several_workers_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    definition, workspace = product(2, 2, 2)
    with SimpleNet(definition, workspace) as net:
        monkeypatch.setattr("sys.stderr", SimpleNamespace(write=writes.append))
        net.run()
    assert len(writes) == 1
    assert writes[0].endswith("\n")


def test_the_rates_are_the_cost_of_the_schema_over_the_time() -> None:
    definition, workspace = product(10, 20, 30)
    with SimpleNet(definition, workspace) as net:
        net.run()
        run = ObservedRun(Observer(), net.graph, net.operators)
        line = operator_line(run, 0, "w", 1e-6)
    found = re.search(r" 0\.001 ms +(\S+) GFLOP/s +(\S+) GB/s$", line)
    assert found is not None, line
    assert operator_line(run, 0, "w", 0.0).endswith(" 0.000 ms"), "no rate without a time"
    assert float(found[1]) == pytest.approx(2 * 10 * 20 * 30 / 1e-6 / 1e9)
    assert float(found[2]) == pytest.approx(4 * (10 * 20 + 20 * 30 + 10 * 30) / 1e-6 / 1e9)


def test_the_rates_of_an_operator_whose_cost_is_unknown_are_blank() -> None:
    definition, workspace = product(1, 1, 1)
    with SimpleNet(definition, workspace) as net:  # has not run: its output holds nothing
        run = ObservedRun(Observer(), net.graph, net.operators)
        assert operator_line(run, 0, "w", 1e-3).endswith(" 1.000 ms")


@pytest.mark.usefixtures("lines_wanted")
def test_an_operator_that_fails_has_a_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def body(operator: Operator) -> None:
        raise ValueError("no")

    with (
        temporary_operator("Fail", body),
        SimpleNet(net_of([[]], op_type="Fail"), Workspace()) as net,
        pytest.raises(OperatorError),
    ):
        net.run()
    line, end = capsys.readouterr().err.splitlines()
    assert line.endswith("ms  failed: ValueError")
    assert re.fullmatch(r"net  run failed: OperatorError: Fail .*: no .*", end)


def test_an_operator_on_a_device_is_printed_when_its_kernel_has_run_not_when_it_is_launched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = LineObserver()
    on_device = NetDef(name="n", op=[operator_def("NoOp", [], ["x"])])
    on_device.op[0].device_option.CopyFrom(dagexec.core.device.Device.parse("sim:0").to_option())
    graph = dagexec.core.graph.build_graph(on_device)
    with SimpleNet(net_of([[]]), Workspace()) as net:
        run = ObservedRun(lines, graph, net.operators)
        lines.operator_stopped(run, 0, "w", 0, 10**9, None)
        assert capsys.readouterr().err == ""
        lines.executed(stream("sim:0 stream 3"), Kernel(lambda: None, "k", operator=net.operators[0]), 1.0, 1.002)
        lines.executed(stream("sim:0 stream 3"), Kernel(lambda: None, "somebody else's"), 1.0, 1.002)
    assert re.fullmatch(r"n\[0\] +NoOp +x +sim:0 stream 3 +2\.000 ms\n", capsys.readouterr().err)
    lines.operator_stopped(run, 0, "w", 0, 10**6, ValueError())  # a launch that fails has nothing to follow
    assert re.fullmatch(r"n\[0\] +NoOp +x +w +1\.000 ms  failed: ValueError\n", capsys.readouterr().err)
