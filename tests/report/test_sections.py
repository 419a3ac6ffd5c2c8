"""What the sections say, against the net and the runs that they are made of."""

from itertools import combinations

import numpy as np
import pytest

import dagexec
from dagexec.analysis.bounds import run_bounds
from dagexec.analysis.explanation import traced_runtime
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef
from dagexec.devices.sim import simulated
from dagexec.report.gather import run_report
from dagexec.report.graph import GraphSection
from dagexec.report.timeline import TimelineSection
from dagexec.testing import random_feeds
from dagexec.zoo import build
from tests.report.pages import googlenet, large_report, made_up_trace, plan_of

KINDS = ["timeline", "graph", "memory"]


def test_the_drawing_has_every_operator_and_dependency_once() -> None:
    plan = plan_of(googlenet().net)
    found = GraphSection(plan).as_json()
    drawing = found["drawings"][""]  # type: ignore[index]
    operators = [node["operator"] for node in drawing["nodes"]]
    assert sorted(operators) == list(range(len(plan.graph)))
    edges = {(operators[a], operators[b]) for a, b, _ in drawing["edges"]}
    assert edges == {(parent, child) for parent, row in enumerate(plan.graph.reduced_children) for child in row}


@pytest.mark.slow
def test_modules_are_drawings_that_lead_to_every_operator() -> None:
    (section,) = large_report(10_000).sections
    drawings = section.as_json()["drawings"]
    seen, waiting = set(), [""]
    while waiting:
        for node in drawings[waiting.pop()]["nodes"]:  # type: ignore[index]
            seen.add(node.get("operator"))
            waiting += [node["group"]] if "group" in node else []
    assert seen - {None} == set(range(10_000))


def test_a_run_has_its_operators_on_the_lanes_of_its_workers() -> None:
    plan = plan_of(googlenet().net)
    trace = made_up_trace(plan)
    found = TimelineSection(trace, 0, run_bounds(trace, 2), plan.chain_of).as_json()
    lanes = {lane["name"]: lane for lane in found["lanes"]}  # type: ignore[attr-defined]
    assert list(lanes) == ["worker 0", "worker 1"]
    assert sorted(span[0] for lane in lanes.values() for span in lane["spans"]) == list(range(len(plan.graph)))
    assert {span[2] for lane in lanes.values() for span in lane["spans"]} == {20.0}
    took = {one.chain: one.thread for one in trace.chains}
    crossing = [
        chain
        for chain, row in enumerate(trace.runs[0].parents)
        if row and took[max(row, key=lambda one: next(s.end for s in trace.chains if s.chain == one))] != took[chain]
    ]
    assert len(found["arrows"]) == len(crossing)  # type: ignore[arg-type]


def test_a_run_of_a_model_is_reported_with_its_memory() -> None:
    with dagexec.compile("zoo:lenet", num_workers=2, net_type="dag") as executor:
        feeds = random_feeds(executor.model)
        executor.run(feeds)
        runtime = traced_runtime("dag", 2, executor, feeds)
        report = run_report(runtime, executor.model, feeds, dagexec.load_model("zoo:lenet"))
    assert [section.kind for section in report.sections] == KINDS
    timeline, graph, memory = (section.as_json() for section in report.sections)
    operators = graph["operators"]
    assert isinstance(operators, list)
    assert operators[-1]["shapes"] == ["float32[1, 10]"]
    assert all(operator["seconds"] > 0 for operator in operators)
    assert timeline["workers"] == 2
    assert memory["peak"] == runtime.memory.peak_bytes  # type: ignore[union-attr]
    buffers = memory["buffers"]
    assert isinstance(buffers, list)
    for one, other in combinations(buffers, 2):
        if one["first"] <= other["last"] and other["first"] <= one["last"]:  # both in use at an operator
            low, high = sorted((one, other), key=lambda buffer: buffer["offset"])
            assert low["offset"] + low["bytes"] <= high["offset"], (one, other)
    given = graph["given"]
    assert isinstance(given, dict)
    as_built = build("lenet").net.op
    assert [one["type"] for one in given["operators"]] == [one.type for one in as_built]
    assert f"has {len(as_built)} operators in {given['chains']} chains: compile joined operators" in report.lines[-1]


def test_a_net_that_compile_left_alone_is_drawn_once() -> None:
    with dagexec.compile("zoo:lenet", optimize=False, net_type="simple") as executor:
        feeds = random_feeds(executor.model)
        executor.run(feeds)
        runtime = traced_runtime("simple", 1, executor, feeds)
        report = run_report(runtime, executor.model, feeds, executor.model)
    assert "given" not in report.sections[1].as_json()
    assert report.lines[1:] == [
        "SimpleNet runs all operators on one thread as they are listed: the run shows one chain."
    ]


def test_a_net_whose_init_net_makes_the_parameters_is_shown_as_given() -> None:
    init, net = NetDef(name="init"), NetDef(name="net")
    init.op.add(type="ConstantFill", output=["bias"]).arg.add(name="shape", ints=[4])
    net.op.add(type="Add", input=["data", "bias"], output=["sum"])
    net.op.add(type="Relu", input=["sum"], output=["result"])
    given = Model("net", net, init, inputs={"data": InputInfo(shape=(4,))}, outputs=("result",))
    with dagexec.compile(given, net_type="dag", num_workers=1) as executor:
        feeds = {"data": np.ones(4, np.float32)}
        executor.run(feeds)
        graph = (
            run_report(traced_runtime("dag", 1, executor, feeds), executor.model, feeds, given).sections[1].as_json()
        )
    assert [one["type"] for one in graph["given"]["operators"]] == ["Add", "Relu"]  # type: ignore[index]
    assert len(graph["operators"]) == 1  # type: ignore[arg-type]


def test_lanes_of_one_pool_have_its_workers_numbers_for_names() -> None:
    plan = plan_of(googlenet().net)
    trace = made_up_trace(plan, workers=("dagexec-some-net-0", "dagexec-some-net-11"))
    found = TimelineSection(trace, 0, None, plan.chain_of).as_json()
    assert [lane["name"] for lane in found["lanes"]] == ["worker 0", "worker 11"]  # type: ignore[attr-defined]
    trace = made_up_trace(plan, workers=("dagexec-one-0", "dagexec-other-0"))
    found = TimelineSection(trace, 0, None, plan.chain_of).as_json()
    assert [lane["name"] for lane in found["lanes"]] == ["dagexec-one-0", "dagexec-other-0"]  # type: ignore[attr-defined]


def test_streams_are_lanes_with_the_kernels_of_the_run() -> None:
    with (
        simulated("sim:0", launch_seconds=1e-6, kernel_seconds=None),
        dagexec.compile("zoo:lenet", device="sim:0", net_type="async_dag", num_workers=2) as executor,
    ):
        feeds = {name: np.asarray(array) for name, array in random_feeds(executor.model).items()}
        executor.run(feeds)
        runtime = traced_runtime("async_dag", 2, executor, feeds)
        timeline = run_report(runtime, executor.model, feeds).sections[0].as_json()
    lanes = timeline["lanes"]
    assert isinstance(lanes, list)
    assert {lane["name"] for lane in lanes if lane["clock"] == "device"} <= {f"sim:0 stream {n}" for n in range(4)}
    kernels = [span[0] for lane in lanes if lane["clock"] == "device" for span in lane["spans"] if span[0] is not None]
    assert sorted(kernels) == list(range(len(runtime.plan.graph)))
    assert "critical" not in timeline  # the chains only launch
