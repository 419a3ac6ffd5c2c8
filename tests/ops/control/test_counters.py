"""Counters, flags and AtomicFetchAdd, in nets of several workers and in nets that run at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.errors import OperatorError


def test_a_counter_counts_up_and_down() -> None:
    net = NetDef(
        op=[
            op("CreateCounter", [], ["c"], init_count=1),
            op("CountUp", ["c"], ["up"]),
            *(op("CountDown", ["c"], [f"down{turn}"]) for turn in range(3)),
            op("CheckCounterDone", ["c"], ["done"]),
            op("RetrieveCount", ["c"], ["count"]),
            op("ResetCounter", ["c"], ["previous"], init_count=7),
            op("RetrieveCount", ["c"], ["new"]),
            op("CheckCounterDone", ["c"], ["not_done"]),
        ]
    )
    for kind in ("simple", "dag"):
        workspace = Workspace()
        made = workspace.build_net(net, kind, 2)
        for _ in range(2):
            made.run()
            held = {name: workspace.fetch_blob(name) for name in ("up", "count", "previous", "new")}
            assert {name: (value.item(), value.dtype, value.shape) for name, value in held.items()} == {
                name: (value, np.int64, ()) for name, value in {"up": 1, "count": -1, "previous": -1, "new": 7}.items()
            }
            truths = [workspace.fetch_blob(name).item() for name in ("down0", "down1", "down2", "done", "not_done")]
            assert truths == [False, False, True, True, False]
        made.close()


def test_nets_that_run_at_once_share_a_counter_a_flag_and_a_sum() -> None:
    workspace = Workspace()
    makers = ("CreateCounter", "CreateAtomicBool", "CreateMutex")
    workspace.run_net_once(NetDef(op=[op(kind, [], [kind]) for kind in makers]))
    workspace.feed_blob("sum", np.array([0], np.int32))
    workspace.feed_blob("step", np.array([3], np.int32))
    workspace.feed_blob("yes", np.array(True))
    workspace.run_operator_once(op("CheckAtomicBool", ["CreateAtomicBool"], ["before"]))

    def count(number: int) -> None:
        net = NetDef(
            name=f"n{number}",
            op=[
                op("CountUp", ["CreateCounter"], [f"up{number}"]),
                op("AtomicFetchAdd", ["CreateMutex", "sum", "step"], ["sum", f"old{number}"]),
                op("ConditionalSetAtomicBool", ["CreateAtomicBool", "yes"], []),
            ],
        )
        made = workspace.build_net(net)
        for _ in range(50):
            made.run()
        made.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    workspace.run_operator_once(op("RetrieveCount", ["CreateCounter"], ["count"]))
    workspace.run_operator_once(op("CheckAtomicBool", ["CreateAtomicBool"], ["after"]))
    assert [workspace.fetch_blob(name).item() for name in ("count", "sum", "before", "after")] == [
        200,
        600,
        False,
        True,
    ]
    assert max(workspace.fetch_blob(f"old{number}").item() for number in range(4)) == 597


def test_a_counter_that_can_count_no_further_fails() -> None:
    workspace = Workspace()
    workspace.run_operator_once(op("CreateCounter", [], ["c"], init_count=2**63 - 1))
    with pytest.raises(OperatorError, match="a counter at 9223372036854775807 cannot count on"):
        workspace.run_operator_once(op("CountUp", ["c"], ["before"]))
    workspace.feed_blob("x", np.zeros(1))
    with pytest.raises(OperatorError, match="Counter"):
        workspace.run_operator_once(op("CountUp", ["x"], ["before"]))
