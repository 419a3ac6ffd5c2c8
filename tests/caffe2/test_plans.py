"""Plans: how often their steps run, which at once, what ends them, and that a failure leaves nobody waiting."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from dagexec.caffe2 import brew, core, model_helper, workspace
from dagexec.caffe2.net_builder import NetBuilder, ops
from dagexec.errors import Caffe2Error


def _net(name: str, *operators: tuple[Any, ...], kind: str = "") -> core.Net:
    net = core.Net(name)
    net.Proto().type = kind
    for op_type, inputs, outputs, *arguments in operators:
        getattr(net, op_type)(inputs, outputs, **(arguments[0] if arguments else {}))
    return net


def _counting(name: str) -> core.Net:
    """A net that adds one to a counter of its name, which is there."""
    workspace.RunOperatorOnce(core.CreateOperator("CreateCounter", [], [name]))
    return _net(f"count_{name}", ("CountUp", [name], [f"{name}_before"]))


def _count(name: str) -> int:
    workspace.RunOperatorOnce(core.CreateOperator("RetrieveCount", [name], ["count"]))
    return int(workspace.FetchBlob("count"))


def test_steps_run_as_often_as_they_say() -> None:
    inner = core.execution_step("inner", [_counting("a"), _counting("b")], num_iter=3)
    outer = core.execution_step("outer", [inner, core.execution_step("once", _counting("c"))], num_iter=2)
    plan = core.Plan("plan")
    plan.AddStep(outer)
    assert [net.Name() for net in plan.Nets()] == ["count_a", "count_b", "count_c"]
    assert workspace.RunPlan(plan)
    assert workspace.RunPlan(plan.Proto().SerializeToString())
    assert [_count(name) for name in "abc"] == [12, 12, 4]
    assert workspace.RunPlan(core.execution_step("never", _counting("d"), num_iter=0))
    assert _count("d") == 0


def test_a_blob_stops_a_step_behind_the_net_that_sets_it() -> None:
    workspace.FeedBlob("limit", np.array(4, np.int64))
    test = _net("test", ("GE", ["a_before", "limit"], ["stop"]))
    nets = [_counting("a"), test, _counting("b")]
    workspace.RunPlan(core.execution_step("until", nets, should_stop_blob="stop"))
    assert [_count(name) for name in "ab"] == [5, 4]
    workspace.FeedBlob("never", np.array(False))
    workspace.RunPlan(core.execution_step("once", nets[2], should_stop_blob="never", only_once=True))
    assert _count("b") == 5


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_steps_at_once_wait_for_one_another(kind: str) -> None:
    queues = [("CreateBlobsQueue", [], [name], {"num_blobs": 1, "capacity": 1}) for name in ("there", "back")]
    workspace.RunNetOnce(_net("queues", *queues))
    workspace.FeedBlob("x", np.ones(2, np.float32))
    asks = _net("asks", ("EnqueueBlobs", ["there", "x"], []), ("DequeueBlobs", ["back"], ["y"]), kind=kind)
    answers = _net("answers", ("DequeueBlobs", ["there"], ["z"]), ("EnqueueBlobs", ["back", "z"], []), kind=kind)
    steps = [core.execution_step(net.Name(), net, num_iter=5) for net in (asks, answers)]
    workspace.RunPlan(core.execution_step("both", steps, concurrent_substeps=True))
    np.testing.assert_array_equal(workspace.FetchBlob("y"), [1, 1])


def test_instances_of_a_step_share_its_counter() -> None:
    step = core.execution_step("four", _counting("a"), num_iter=10, num_concurrent_instances=4)
    workspace.RunPlan(core.execution_step("all", [step], concurrent_substeps=True))
    assert _count("a") == 40


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_a_failure_ends_the_waits_of_what_runs_beside_it(kind: str) -> None:
    before = threading.active_count()
    workspace.RunNetOnce(_net("queue", ("CreateBlobsQueue", [], ["never"], {"num_blobs": 1})))
    workspace.FeedBlob("x", np.ones(2, np.float32))
    waits = _net("waits", ("DequeueBlobs", ["never"], ["y"]), ("Relu", ["y"], ["z"]), kind=kind)
    fails = _net("fails", ("MatMul", ["x", "x"], ["m"]), kind=kind)
    beside = core.execution_step("beside", _counting("a"))
    beside.RunEveryMillis(3_600_000)
    steps = [core.execution_step(net.Name(), net) for net in (waits, fails)]
    with pytest.raises(Caffe2Error, match="MatMul"):
        workspace.RunPlan(core.execution_step("both", [*steps, beside], concurrent_substeps=True))
    assert _count("a") == 0
    workspace.ResetWorkspace()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_what_is_repeated_beside_a_step_runs_at_its_end_as_well(caplog: pytest.LogCaptureFixture) -> None:
    often = core.execution_step("often", _counting("often"))
    often.RunEveryMillis(1)
    report, work = _counting("report"), core.execution_step("work", _counting("work"), num_iter=3)
    step = core.execution_step("step", [work, often], report_net=report, report_interval=3600)
    workspace.RunPlan(step)
    assert (_count("work"), _count("report")) == (3, 1)
    assert _count("often") >= 1
    workspace.FeedBlob("report", np.zeros(1))
    workspace.RunPlan(step)  # a report that fails is a warning
    assert "what is repeated beside its steps failed" in caplog.text


def test_a_step_may_have_a_workspace_of_its_own() -> None:
    workspace.FeedBlob("x", np.array([2], np.float32))
    net = _net("inside", ("Add", ["x", "x"], ["only_inside"]))
    workspace.RunPlan(core.execution_step("own", net, create_workspace=True))
    assert not workspace.HasBlob("only_inside")
    net = _net("outside", ("Add", ["x", "x"], ["seen"]))
    workspace.RunPlan(core.execution_step("shared", net))
    assert workspace.FetchBlob("seen") == 4


def test_plans_that_contradict_themselves_are_refused() -> None:
    net = _counting("a")
    step = core.execution_step("step", net, num_iter=2)
    step.SetShouldStopBlob("stop")
    with pytest.raises(Caffe2Error, match="num_iter and should_stop_blob exclude one another"):
        workspace.RunPlan(step)
    with pytest.raises(Caffe2Error, match="only_once needs a should_stop_blob"):
        workspace.RunPlan(core.execution_step("step", net, only_once=True))
    step = core.execution_step("step", net)
    step.Proto().network.append("nowhere")
    with pytest.raises(Caffe2Error, match=r"nets \['nowhere'\] are neither in the plan nor in the workspace"):
        workspace.RunPlan(step)
    with pytest.raises(ValueError, match="has nets, so it cannot have steps"):
        step.AddSubstep(core.ExecutionStep("other"))
    workspace.FeedBlob("stop", np.zeros(2))
    with pytest.raises(Caffe2Error, match="'stop' must be one bool"):
        workspace.RunPlan(core.execution_step("step", net, should_stop_blob="stop"))
    assert _count("a") == 1


def test_blocks_of_a_builder_that_are_out_of_place_are_refused() -> None:
    with NetBuilder(), pytest.raises(Caffe2Error, match="Else follows an If"), ops.Else():
        pass
    with NetBuilder(), pytest.raises(Caffe2Error, match="needs a Condition"), ops.WhileNet():
        pass
    with pytest.raises(Caffe2Error, match="until something stops it"), NetBuilder(), ops.loop():
        ops.Const(1)
    with pytest.raises(Caffe2Error, match="no NetBuilder is open"):
        ops.Const(1)


def test_models_run_in_models() -> None:
    model, then, other, body, test = (
        model_helper.ModelHelper(name=name) for name in ("m", "then", "else", "body", "c")
    )
    then.net.Add(["x", "x"], ["x"])
    other.net.Negative(["x"], ["x"])
    body.net.Add(["x", "total"], ["total"])
    test.net.LT(["total", "limit"], ["go"])
    brew.cond(model, "yes", ["x", "yes"], then, other)
    brew.loop(model, "go", ["total", "x", "limit"], body, test)
    brew.cond(model, "no", ["x"], then, other)
    for name, value in {"x": 2.0, "total": 0.0, "limit": 10.0}.items():
        workspace.FeedBlob(name, np.array(value, np.float32))
    for name, truth in {"yes": True, "no": False}.items():
        workspace.FeedBlob(name, np.array(truth))
    workspace.RunNetOnce(model.net)
    assert [float(workspace.FetchBlob(name)) for name in ("x", "total")] == [-4, 12]
