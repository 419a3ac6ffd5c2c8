"""What operators are given while they are prepared on strided tensors, and in-place operators that pack one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, Workspace
from dagexec.core import registry
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.operator import Operator, Step
from dagexec.core.proto import OperatorDef
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.trace import Trace
from tests.nets import temporary_operator
from tests.ops.running import operator_def

Array = npt.NDArray[Any]
SHAPE = (2, 6, 8, 8)
NHWC = TensorDescriptor.ordered(SHAPE, "NHWC")
NETS: list[type[BaseNet]] = [SimpleNet, DAGNet, AsyncDAGNet]


def sample(seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def net_of(*operators: OperatorDef) -> NetDef:
    return NetDef(name="n", op=operators)


@pytest.mark.parametrize("net_class", NETS)
def test_new_values_in_a_layout_that_stays_are_seen_without_preparing_again(net_class: type[BaseNet]) -> None:
    workspace, weights = Workspace(), np.random.default_rng(1).standard_normal((4, 6, 3, 3)).astype(np.float32)
    convolution = operator_def("Conv", ["x", "w"], ["y"], kernel=3, pad=1)
    pooling = operator_def("MaxPool", ["x"], ["z"], kernel=3, stride=2)
    for blob, values in (("w", weights), ("x", sample())):
        workspace.feed_blob(blob, values, TensorDescriptor.ordered(values.shape, "NHWC"))
    with net_class(net_of(convolution, pooling), workspace) as net:
        net.run()
        prepared = net.prepared()
        for seed in (1, 2):
            workspace.feed_blob("x", sample(seed), NHWC)
            workspace.feed_blob("w", weights * seed, TensorDescriptor.ordered(weights.shape, "NHWC"))
            net.run()
            assert net.prepared() is prepared
            packed = Workspace()
            packed.feed_blob("x", sample(seed))
            packed.feed_blob("w", weights * seed)
            packed.run_net_once(net_of(convolution, pooling))
            for name in ("y", "z"):
                assert workspace.fetch_blob(name).tobytes() == packed.fetch_blob(name).tobytes()


def test_an_operator_is_prepared_and_inferred_on_packed_arrays() -> None:
    found: list[tuple[bool, bool, bool]] = []

    def body(operator: Operator) -> None:
        """Runs; what counts is seen in `prepare`."""

    with temporary_operator("Watching", body):
        watching = registry._operators[("cpu", "Watching", "")]

        def prepare(self: Operator) -> Step:
            x, same, y = self.x(0), self.x(1), self.y(0)
            found.append((x.flags.c_contiguous, x is same, y.flags.c_contiguous))
            return lambda: np.copyto(y, x.reshape(-1)[: y.size])

        watching.prepare = prepare  # type: ignore[method-assign]
        workspace = Workspace()
        workspace.feed_blob("x", sample(), NHWC)
        memory = np.zeros(3, np.float32)
        workspace.adopt_strided_blob("y", memory[::2][:1], writable=True)
        with SimpleNet(net_of(operator_def("Watching", ["x", "x"], ["y"])), workspace) as net:
            net.run()
        assert found == [(True, True, True)]
        assert workspace.fetch_blob("y") == sample().reshape(-1)[0]


VIEWS = [
    operator_def("Flatten", ["x"], ["x"]),
    operator_def("Reshape", ["x"], ["x", "old"], shape=[4, -1]),
    operator_def("ExpandDims", ["x"], ["x"], dims=[0]),
]


@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.parametrize("view", VIEWS, ids=lambda definition: definition.type)
@pytest.mark.parametrize("writable", [True, False])
def test_a_view_in_place_of_a_strided_tensor_has_what_the_run_wrote(
    net_class: type[BaseNet], view: OperatorDef, writable: bool
) -> None:
    definition = net_of(
        operator_def("Abs", ["x"], ["before"]),
        operator_def("Negative", ["x"], ["x"]),
        view,
        operator_def("Sqr", ["x"], ["after"]),
    )
    workspace = Workspace()
    workspace.feed_blob("x", sample())
    with net_class(definition, workspace) as net:
        for seed in (0, 1, 1):
            memory = sample(seed).transpose(0, 2, 3, 1).copy()
            workspace.adopt_strided_blob("x", memory.transpose(0, 3, 1, 2), writable)
            trace = Trace()
            net.run(trace=trace)
            np.testing.assert_array_equal(workspace.fetch_blob("x").reshape(SHAPE), -sample(seed))
            np.testing.assert_array_equal(workspace.fetch_blob("after").reshape(SHAPE), sample(seed) ** 2)
            np.testing.assert_array_equal(workspace.fetch_blob("before"), np.abs(sample(seed)))
            named = [span.conversion for span in trace.spans if span.conversion is not None and span.operator == 2]
            assert [(found.blob, found.source.order, found.target.order) for found in named] == (
                [("x", "NHWC", "NCHW")] if writable else []
            )
            sign = -1 if writable else 1
            np.testing.assert_array_equal(memory.transpose(0, 3, 1, 2), sign * sample(seed))
