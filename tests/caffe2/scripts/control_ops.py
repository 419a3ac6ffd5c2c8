"""Control operators: branches and loops as operators of nets and as steps, in the calls that the tutorial documents."""

import numpy as np
from caffe2.python import workspace
from caffe2.python.core import Plan, to_execution_step
from caffe2.python.net_builder import NetBuilder, ops


def run(builder, name):
    plan = Plan(name)
    plan.AddStep(to_execution_step(builder))
    ws = workspace.C.Workspace()
    ws.run(plan)
    return ws


with NetBuilder() as nb:
    ops.Const(0.0, blob_out="zero")
    ops.Const(1.0, blob_out="one")
    ops.Const(0.5, blob_out="x")
    ops.Const(0.0, blob_out="y")
    with ops.IfNet(ops.GT(["x", "zero"])):
        ops.Copy("one", "y")
    with ops.Else():
        ops.Copy("zero", "y")
if_else = run(nb, "if_net_test").blobs["y"].fetch()

with NetBuilder() as nb:
    ops.Const(7, blob_out="seven")
    ops.Const(0, blob_out="one_less")
    ops.Const(1, blob_out="one")
    ops.Const(0, blob_out="i")
    ops.Const(0, blob_out="y")
    with ops.WhileNet():
        with ops.Condition():
            ops.Add(["i", "one"], ["i"])
            ops.LE(["i", "seven"])
        ops.Add(["i", "y"], ["y"])
ws = run(nb, "while_net_test")
summed, i = ws.blobs["y"].fetch(), ws.blobs["i"].fetch()

with NetBuilder() as nb:
    ops.Const(4.0, blob_out="start")
    ops.Const(0.0, blob_out="limit")
    ops.Const(2.0, blob_out="total")
    with ops.loop(5) as loop:
        ops.Sub(["start", "total"], ["start"])
        with ops.If(ops.LT(["start", "limit"])):
            ops.Negative("start", "start")
        with ops.Else():
            ops.Copy("limit", "was_positive")
        counted = ops.Copy(loop.iter(), "counted")
ws = run(nb, "loop_test")
steps = {name: ws.blobs[name].fetch() for name in ("start", "counted", "was_positive")}
np.testing.assert_array_equal(steps["counted"], 4)
