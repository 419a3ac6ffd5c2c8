"""How many threads operators take by their work."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.core.arguments import make_argument
from dagexec.core.operator import Step
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import create_operator
from dagexec.core.schema import Cost
from dagexec.core.workspace import Workspace
from dagexec.ops.onednn.binding import library, usable_threads
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.sharing import SHARE_SECONDS, work_seconds, worthwhile_threads
from dagexec.scheduler.nets.simple import SimpleNet

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def test_each_thread_of_a_team_finds_its_share_of_work() -> None:
    shares = (0.0, 1.0, 1.9, 2.1, 3.1, 8.5, 1e6)
    assert [worthwhile_threads(share * SHARE_SECONDS, 8) for share in shares] == [1, 1, 1, 2, 3, 8, 8]


def test_work_is_what_takes_longer_of_arithmetic_and_memory() -> None:
    assert work_seconds(Cost(10**9, 0, 0), 8) == pytest.approx(0.02)
    assert work_seconds(Cost(10**9, 0, 0), 16) == pytest.approx(0.01)
    assert work_seconds(Cost(1, 10**7, 10**7), 16) == pytest.approx(0.002)


@pytest.mark.skipif(usable_threads(2) < 2, reason="OpenMP grants one thread")
def test_a_concatenation_of_much_is_left_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    arguments = [make_argument("max_threads", 2), make_argument("axis", 0)]
    concat = OperatorDef(type="Concat", input=["a", "b"], output=["c", "sizes"], engine="ONEDNN", arg=arguments)
    for name in "ab":
        workspace.feed_blob(name, np.zeros((4,), np.float32))
    operator = create_operator(concat, workspace)
    assert isinstance(operator, OneDNNOperator)
    asked: list[int] = []
    inner = operator.prepare_primitive

    def noting() -> Step:
        asked.append(operator.threads)
        return inner()

    monkeypatch.setattr(operator, "prepare_primitive", noting)
    for size in (16, 1 << 20, 17):
        for name in "ab":
            workspace.feed_blob(name, np.zeros((size,), np.float32))
        operator.bind(operator.infer())
    assert asked == [1, 2, 1]


@pytest.mark.skipif(usable_threads(2) < 2, reason="OpenMP grants one thread")
def test_an_operator_takes_as_many_threads_as_its_work_is_worth_at_the_shapes_of_a_run() -> None:
    workspace = Workspace()
    relu = OperatorDef(type="Relu", input=["x"], output=["y"], engine="ONEDNN", arg=[make_argument("max_threads", 2)])
    workspace.feed_blob("x", np.zeros((4,), np.float32))
    net = SimpleNet(NetDef(name="relu", op=[relu]), workspace)
    taken = []
    for size in (16, 1 << 20, 17):
        x = np.linspace(-1, 1, size, dtype=np.float32)
        workspace.feed_blob("x", x)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), np.maximum(x, 0))
        operator = net.operators[0]
        assert isinstance(operator, OneDNNOperator)
        taken.append(operator.threads)
    assert taken == [1, 2, 1]
