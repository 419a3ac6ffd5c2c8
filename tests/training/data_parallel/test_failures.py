"""Failures: models that differ, a replica that fails at any point, bad feeds; and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dagexec.building.fillers import constant
from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.operator import Operator
from dagexec.core.workspace import Workspace
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import (
    ArgumentError,
    ClosedError,
    CommunicationError,
    FeedError,
    MissingBlobError,
    OperatorError,
    RunTimeoutError,
    SchemaError,
)
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore
from dagexec.training.data_parallel import ParallelModel, parallelize
from dagexec.training.data_parallel.solver_thread import SolverThread
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD
from tests.nets import temporary_operator
from tests.training.data_parallel.problems import (
    dyadic,
    image_batch,
    images,
    lenet,
    normalized,
    number_batch,
    numbers,
    parallel_images,
    same_bytes,
    trained,
)

REDUCTIONS = ["allreduce", "tree", "ring"]


def solver_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dagexec-tiny-")]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_label_out_of_range_on_one_device_ends_all_with_the_operator_that_found_it(
    reduction: str, failing: int, request: pytest.FixtureRequest
) -> None:
    model = parallel_images(normalized, ["cpu"] * 4, reduction=reduction)
    with model:
        model.step(image_batch(8))
        before = model.parameters()
        batch = image_batch(8, seed=1)
        batch["label"][2 * failing] = 77
        with pytest.raises(OperatorError, match=f"SoftmaxWithLoss 'cpu_{failing}/softmax'.*77"):
            model.step(batch)
        if reduction != "allreduce" or request.config.getoption("--device") is None:
            # CUDA tells at the end of a net, and that of all-reduce has the updates, too
            assert not same_bytes(
                {name: array for name, array in model.parameters().items() if not name.endswith(("_rm", "_riv"))},
                {name: array for name, array in before.items() if not name.endswith(("_rm", "_riv"))},
            )
        with pytest.raises(ClosedError, match="or one of its steps has failed"):
            model.step(image_batch(8))
    assert not solver_threads()


class PlannedError(Exception):
    """What a test raises."""


def failing_operators(points: dict[str, int], at: int) -> Callable[[Operator], object]:
    """What an operator in the net does: counts its calls by device, and raises at call `at` on cpu_1."""

    def body(operator: Operator) -> None:
        place = operator.definition.input[0].split("/")[0]
        points[place] = points.get(place, 0) + 1
        if place == "cpu_1" and points[place] > at:
            raise PlannedError(f"call {at}")

    return body


def with_checkpoints(helper: ModelHelper) -> list[str]:
    """`dyadic` with an operator before and behind its layers."""
    helper.add_operator("Checkpointed", ["x"], ["before"])
    losses = dyadic(helper)
    helper.add_operator("Checkpointed", ["y"], ["behind"])
    return losses


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("at", range(4))
def test_a_replica_that_fails_in_any_micro_batch_ends_the_step_of_all(reduction: str, at: int) -> None:
    with temporary_operator("Checkpointed", failing_operators({}, at)):
        model = parallel_images(
            with_checkpoints, ["cpu"] * 3, reduction=reduction, iter_size=2, inputs=numbers, timeout=1e6
        )
        with model, pytest.raises(OperatorError, match=f"PlannedError: call {at}"):
            model.step(number_batch(12))
    assert not solver_threads()


def test_ctrl_c_in_the_calling_thread_ends_all_threads() -> None:
    def body(operator: Operator) -> None:
        if operator.definition.input[0].startswith("cpu_0/"):
            raise KeyboardInterrupt

    with temporary_operator("Checkpointed", body):
        for reduction in ("tree", "ring"):
            model = parallel_images(with_checkpoints, ["cpu"] * 3, reduction=reduction, inputs=numbers, timeout=1e6)
            with model, pytest.raises(KeyboardInterrupt):
                model.step(number_batch(12))
            assert model.closed
            assert not solver_threads()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["tree", "ring"])
def test_every_schedule_of_the_threads_gives_the_same_bytes(reduction: str) -> None:
    data = [number_batch(12), number_batch(12)]
    _, expected = trained(parallel_images(dyadic, ["cpu"], inputs=numbers, iter_size=3), data)

    def scenario() -> list[str]:
        model = parallel_images(dyadic, ["cpu"] * 3, inputs=numbers, reduction=reduction, timeout=1e6)
        return same_bytes(trained(model, data)[1], expected)

    for seed in range(12):
        schedule = explore(scenario, seed)
        schedule.raise_failure()
        assert schedule.result == []


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["tree", "ring"])
def test_in_every_schedule_a_failure_ends_all_threads(reduction: str) -> None:
    def scenario() -> None:
        model = parallel_images(with_checkpoints, ["cpu"] * 3, inputs=numbers, reduction=reduction, timeout=1e6)
        with model:
            model.step(number_batch(12))
            start = threads().monotonic()
            with pytest.raises(OperatorError, match="PlannedError"):
                model.step(number_batch(12))
            assert threads().monotonic() - start < 1e5, "a replica has waited until its timeout"

    for seed in range(12):
        with temporary_operator("Checkpointed", failing_operators({}, 2)):
            explore(scenario, seed).raise_failure()


@pytest.mark.slow
def test_a_replica_that_does_not_answer_is_named() -> None:
    started = threading.Event()
    done = threading.Event()

    def body(operator: Operator) -> None:
        if operator.definition.input[0].startswith("cpu_1/"):
            started.set()
            done.wait(20)

    with temporary_operator("Checkpointed", body):
        model = parallel_images(with_checkpoints, ["cpu"] * 2, inputs=numbers, reduction="tree", timeout=0.2)
        threading.Thread(target=lambda: (started.wait(20), done.wait(1), done.set()), daemon=True).start()
        with model:
            named = "rank 1 failed: no message from it|net 'tiny_cpu_1_gradients': stopped"
            with pytest.raises((CommunicationError, RunTimeoutError), match=named):
                model.step(number_batch(12))


def differing(change: Callable[[ModelHelper, int], None]) -> Callable[[ModelHelper], list[str]]:
    """A builder that makes another model each time, as `change(helper, number)` says."""
    calls: list[int] = []

    def forward(helper: ModelHelper) -> list[str]:
        calls.append(len(calls))
        x = helper.fc("data", "fc", 64, 10)
        change(helper, calls[-1])
        return [helper.softmax_with_loss(x, "label")[1]]

    return forward


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda helper, number: helper.fc("fc", f"extra{number}", 10, 3),
            "parameter 'extra0_w' is only on cpu_0; parameter 'extra0_b' is only on cpu_0; "
            "parameter 'extra1_w' is only on cpu_1",
        ),
        (
            lambda helper, number: helper.add_parameter("p", (2 + number,), constant(0), trained=False),
            r"parameter 'p' has shape \(2,\) on cpu_0 and \(3,\) on cpu_1",
        ),
        (
            lambda helper, number: helper.add_parameter("p", (2,), constant(number), trained=False),
            "parameter 'p' is filled in another way",
        ),
        (
            lambda helper, number: helper.add_state("s", (2,), constant(0)) if number else None,
            "'s' is only filled on cpu_1",
        ),
        (
            lambda helper, number: None if number else helper.add_input("more", (None, 3)),
            r"the inputs are \{.*'more'.*\} and",
        ),
        (
            lambda helper, number: helper.relu("fc", "r") if number else helper.sigmoid("fc", "r"),
            r"operator 1 is Sigmoid \['r'\] on cpu_0 and Relu \['r'\] on cpu_1",
        ),
        (
            lambda helper, number: helper.relu("fc", "r") if number else None,
            "operator 1 is SoftmaxWithLoss .* on cpu_0 and Relu",
        ),
    ],
)
def test_models_that_differ_are_refused_with_a_list_of_the_differences(change: Any, problem: str) -> None:
    def make() -> ModelHelper:
        return ModelHelper("tiny", training=True)

    forward = differing(change)

    def forward_with_all_trained(helper: ModelHelper) -> list[str]:
        losses = forward(helper)
        extra = [name for name in helper.parameters if name.startswith("extra") and name.endswith("_w")]
        for name in extra:  # so that each has a gradient
            blob = name.removesuffix("_w")
            losses.append(helper.add_operator("AveragedLoss", [blob], [f"{blob}_loss"]))
        return losses

    with pytest.raises(SchemaError, match="the builders made different models on cpu_0 and cpu_1: .*" + problem):
        parallelize(images, forward_with_all_trained, SGD(0.1), devices=["cpu", "cpu"], make_helper=make)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="reduction must be one of allreduce, tree, ring, found 'star'"):
        parallel_images(lenet, ["cpu"], reduction="star")
    with pytest.raises(ArgumentError, match="iter_size must be at least 1, found 0"):
        parallel_images(lenet, ["cpu"], iter_size=0)
    with pytest.raises(ArgumentError, match="timeout must be positive, found 0"):
        parallel_images(lenet, ["cpu"], timeout=0)
    with pytest.raises(SchemaError, match="net type 'fast' is unknown"):
        parallel_images(lenet, ["cpu"], net_type="fast")
    with pytest.raises(SchemaError, match="must return the names of its losses"):
        parallel_images(lambda helper: [], ["cpu"])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bad_feeds_and_states_are_refused_and_the_model_goes_on(reduction: str) -> None:
    with parallel_images(lenet, ["cpu"] * 2, reduction=reduction, iter_size=2) as model:
        with pytest.raises(FeedError, match=r"'data' has 10 rows, which 2 device\(s\) with 2 micro-batch"):
            model.step(image_batch(10))
        with pytest.raises(FeedError, match=r"expected the inputs \['data', 'label'\], found \[\]"):
            model.step()
        with pytest.raises(FeedError, match=r"'data' is declared as float32\[.*, found float64\[2"):
            model.step(image_batch(8, np.float64))
        with pytest.raises(FeedError, match=r"'data' is declared as .*, found float32\[2, 1, 9, 8\]"):
            model.step(image_batch(8) | {"data": np.zeros((8, 1, 9, 8), np.float32)})
        state = model.state()
        with pytest.raises(MissingBlobError, match="the state has no 'conv1_w'"):
            model.load_state({})
        with pytest.raises(FeedError, match=r"'conv1_b' must be float32? of shape \(4,\), found float64 of \(5,\)"):
            model.load_state(state | {"conv1_b": np.ones(5)})
        assert not same_bytes(model.state(), state)
        assert model.step(image_batch(8))["loss"] > 0


def test_a_closed_model_still_has_its_parameters() -> None:
    model: ParallelModel = parallel_images(lenet, ["cpu", "sim:0"], reduction="tree")
    model.close()
    model.close()
    assert model.parameters()["conv1_w"].shape == (4, 1, 3, 3)
    with pytest.raises(ClosedError):
        model.step(image_batch(4))


@pytest.mark.simulated
def test_a_copy_between_devices_that_fails_ends_the_step_with_its_name() -> None:
    names = ["sim:0", "sim:1", "sim:2"]
    faults = [Fault("copy", "gradient_bucket_0_from_2", nth=2)]
    with simulated(names, faults=faults), parallel_images(lenet, names) as model:
        model.step(image_batch(6))
        with pytest.raises(OperatorError, match="Copy 'sim_0/gradient_bucket_0_from_2'"):
            model.step(image_batch(6))
        assert model.closed


@pytest.mark.slow
@pytest.mark.simulated
def test_a_device_that_hangs_ends_the_step_after_the_timeout() -> None:
    names = ["sim:0", "sim:1"]
    faults = [Fault("hang", "BucketSum", nth=1)]
    with simulated(names, faults=faults), parallel_images(lenet, names, timeout=0.3) as model:
        with pytest.raises(RunTimeoutError):
            model.step(image_batch(6))
        assert model.closed


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("reduction", ["tree", "ring"])
@pytest.mark.parametrize("kernel", ["ConvGradient 'sim_1", "MomentumSGDUpdate 'sim_0"])
def test_a_device_that_hangs_ends_the_steps_of_all_threads(reduction: str, kernel: str) -> None:
    names = ["sim:0", "sim:1"]
    with simulated(names, faults=[Fault("hang", kernel)]):
        model = parallel_images(lenet, names, reduction=reduction, timeout=0.2)
        with model, pytest.raises(RunTimeoutError, match=r"net 'tiny_sim_._(gradients|update)': stopped after"):
            model.step(image_batch(4))
        assert not solver_threads()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_replica_that_waits_for_a_record_is_woken_when_another_fails(reduction: str) -> None:
    """There is one record: one replica gets it and fails, and nobody puts another into the queue."""

    def dequeued(helper: ModelHelper) -> None:
        helper.add_operator("DequeueBlobs", ["records"], ["x", "target"], shapes=["4,4", "4,1"])

    def fail(operator: Operator) -> None:
        raise PlannedError(operator.label)

    queue, workspace, record = BlobsQueue(4, 2), Workspace(), number_batch(4)
    workspace.create_blob("records").value = queue
    queue.enqueue([record["x"], record["target"]])
    with temporary_operator("Checkpointed", fail):
        model = parallelize(
            dequeued,
            with_checkpoints,
            SGD(0.125),
            devices=["cpu"] * 2,
            reduction=reduction,
            workspace=workspace,
            num_workers=2,
            timeout=60,
        )
        start = time.monotonic()
        with model, pytest.raises(OperatorError, match="PlannedError"):
            model.step()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("begun", [0, 1])
def test_ctrl_c_while_threads_are_begun_leaves_none_of_them_waiting(
    begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def interrupted(thread: SolverThread, job: Callable[[], object]) -> None:
        calls.append(len(calls))
        if len(calls) > begun:
            raise KeyboardInterrupt
        begin(thread, job)

    begin = SolverThread.begin
    with parallel_images(lenet, ["cpu"] * 3, reduction="tree", timeout=1e6) as model:
        monkeypatch.setattr(SolverThread, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.step(image_batch(6))
        assert model.closed
        with pytest.raises(ClosedError, match="or one of its steps has failed"):
            model.step(image_batch(6))
    assert not solver_threads()
