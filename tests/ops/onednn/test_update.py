"""Updates by kernels: after several steps, the bytes that NumPy's rules give."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import fallbacks, needs_onednn
from tests.ops.pieces import cut_into
from tests.ops.running import Array, operator_def, run_net

ADAM = ("Adam", "param s0 s1 grad rate iteration", "param s0 s1")
MOMENTUM = ("MomentumSGDUpdate", "grad s0 rate param", "grad s0 param")
CASES: list[tuple[str, str, str, dict[str, ArgumentValue]]] = [
    (*ADAM, {}),
    (*ADAM, {"beta1": 0.8, "beta2": 0.9, "epsilon": 0.01, "decoupled_weight_decay": 0.1}),
    ("Adam", "param s0 s1 grad rate iteration", "param s0 s1 step", {}),
    ("Adam", "param s0 s1 grad rate iteration", "other s0 s1", {}),
    (*MOMENTUM, {"momentum": 0.9}),
    (*MOMENTUM, {"momentum": 0.75, "nesterov": 1}),
    ("MomentumSGDUpdate", "grad s0 rate param", "step s0 param", {"momentum": 0.75, "nesterov": 1}),
    ("MomentumSGD", "grad s0 rate", "grad s0", {"momentum": 0.9}),
    ("MomentumSGD", "grad s0 rate", "grad s0", {"momentum": 0.9, "nesterov": 1}),
    ("Adagrad", "param s0 grad rate", "param s0", {}),
    ("Adagrad", "param s0 grad rate", "param s0 rates step", {"decay": 0.9, "epsilon": 0.01}),
    ("Adadelta", "param s0 s1 grad rate", "param s0 s1", {}),
    ("RmsProp", "grad s0 s1 rate", "grad s0 s1", {"momentum": 0.5}),
    ("RmsProp", "grad s0 s1 rate", "step other s1", {}),
]


def after_steps(case: tuple[str, str, str, dict[str, ArgumentValue]], engine: str, size: int, pieces: int) -> Array:
    """The outputs after three steps, one behind the other."""
    op_type, inputs, outputs, arguments = case
    definition = operator_def(op_type, inputs.split(), outputs.split(), **arguments, engine=engine)
    rng, workspace = np.random.default_rng(size), Workspace()

    def normal() -> Array:
        return rng.standard_normal(size).astype(np.float32)

    blobs = {name: normal() for name in ("param", "s0", "s1")}
    if not op_type.startswith("Momentum"):
        blobs["s0"], blobs["s1"] = np.abs(blobs["s0"]), np.abs(blobs["s1"])
    for name in inputs.split():
        if name in blobs:
            workspace.feed_blob(name, blobs[name])
    workspace.feed_blob("grad", normal())
    workspace.feed_blob("rate", np.float32([0.1]))
    workspace.feed_blob("iteration", np.int64([0]))
    with cut_into(pieces), SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        for step in range(3):
            workspace.feed_blob("grad", normal())
            workspace.feed_blob(
                "rate", np.float32([0.1 / (step + 1) if op_type.startswith("Momentum") else -0.1 / (step + 1)])
            )
            workspace.feed_blob("iteration", np.int64([step]))
            net.run()
        return np.concatenate([workspace.fetch_blob(name) for name in outputs.split()])


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("size", "pieces"), [(1, 1), (45, 1), (1000, 2), (70_001, 2)])
def test_updates_are_numpy_s_to_the_byte(
    case: tuple[str, str, str, dict[str, ArgumentValue]], size: int, pieces: int
) -> None:
    with fallbacks() as found:
        ours = after_steps(case, "ONEDNN", size, pieces)
    assert not found
    assert np.isfinite(ours).all()
    assert ours.tobytes() == after_steps(case, "", size, 1).tobytes()


@needs_onednn
def test_numpy_updates_what_is_not_float32() -> None:
    """Float64 is not the kernels'."""
    for engine in ("", "ONEDNN"):
        definition = operator_def(
            "MomentumSGDUpdate", ["g", "m", "rate", "p"], ["g", "m", "p"], momentum=0.5, engine=engine
        )
        workspace = Workspace()
        for name, value in (("g", 1.0), ("m", 2.0), ("rate", 0.25), ("p", 3.0)):
            workspace.feed_blob(name, np.float64([value]))
        run_net(workspace, definition)
        assert workspace.fetch_blob("p").tolist() == [1.75]
