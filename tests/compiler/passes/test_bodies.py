"""bodies: nets inside of operators are compiled like others."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, op
from dagexec.compiler.passes.bodies import PASS
from dagexec.compiler.passes.identities import PASS as IDENTITIES
from dagexec.compiler.passes.rewriting import run_passes
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.registry import schema_of, sub_nets_of

W = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
B = np.arange(4, dtype=np.float32)


def layers(name: str) -> NetDef:
    """A convolution whose filter is computed of constants, with an activation, on captured x; a name like outside."""
    return NetDef(
        name=name,
        op=[
            op("Mul", ["w", "two"], ["scaled"]),
            op("Conv", ["x", "scaled", "b"], ["c"], kernel=3, pad=1),
            op("Relu", ["c"], ["r"]),
        ],
        external_input=["x", "w", "b", "two"],
        external_output=["r"],
    )


def model() -> Model:
    nested = NetDef(
        name="outer_branch",
        op=[op("If", ["k", "x", "w", "b", "two"], ["r"], captured=["x", "w", "b", "two"], then_net=layers("inner"),
               else_net=layers("other"))],
        external_input=["x", "w", "b", "two", "k"], external_output=["r"],
    )  # fmt: skip
    first = op(
        "If", ["k", "data", "filter", "bias", "factor", "k"], ["y"], captured=["x", "w", "b", "two", "k"],
        then_net=nested, else_net=layers("plain"),
    )  # fmt: skip
    given = {"filter": W, "bias": B, "factor": np.full((1,), 2, np.float32), "scaled": np.ones(3, np.float32)}
    net = NetDef(name="net", op=[first, op("Copy", ["scaled"], ["z"])], external_input=["k", "data", *given])
    inputs = {"k": InputInfo(None, ()), "data": InputInfo(None, (1, 4, 5, 5))}
    return Model("bodies", net, parameters=given, inputs=inputs, outputs=("y", "z"))


def operators(definition: Node) -> list[Node]:
    """Of all nets inside."""
    bodies = sub_nets_of(definition, schema_of(definition.type)).values()
    return [one for net in bodies for inner in net.op for one in (inner, *operators(inner))]


def test_constants_fold_and_layers_fuse_in_bodies_at_any_depth() -> None:
    report = run_passes(model(), [PASS])
    inside = operators(report.model.program.op[0])
    assert [one.type for one in inside if one.type != "If"] == ["FusedConv"] * 3
    again = run_passes(report.model, [PASS])
    assert again.changes == 0


@pytest.mark.parametrize("chosen", [False, True])
def test_a_compiled_body_computes_what_the_given_one_does(chosen: bool) -> None:
    feeds = {"k": np.bool_(chosen), "data": np.random.default_rng(1).standard_normal((1, 4, 5, 5)).astype(np.float32)}
    with dagexec.compile(model(), optimize=False) as plain, dagexec.compile(model(), tuning_seconds=0) as compiled:
        expected, found = plain.run(feeds), compiled.run(feeds)
    np.testing.assert_allclose(found["y"], expected["y"], 1e-4, 1e-5)
    assert found["z"].tolist() == [1, 1, 1]


def test_types_are_known_in_bodies_and_behind_them() -> None:
    carried = op("Cast", ["s"], ["same"], to="float")
    inside = NetDef(
        name="loop",
        op=[carried, op("Add", ["same", "c"], ["next"])],
        external_input=["i", "on", "s", "c"],
        external_output=["on", "next"],
    )
    loop = op("Loop", ["count", "x", "x"], ["z"], loop_net=inside, trip_count=1, captured=["c"])
    net = NetDef(name="net", op=[loop, op("Cast", ["z"], ["y"], to="float"), op("Relu", ["y"], ["r"])])
    inputs = {"x": InputInfo(FLOAT32, (None, 3)), "count": InputInfo(INT64, ())}
    report = run_passes(Model("m", net, inputs=inputs, outputs=("r",)), [PASS, IDENTITIES])
    assert [one.type for one in report.model.net.op] == ["Loop", "Relu"]
    assert [one.type for one in operators(report.model.program.op[0])] == ["Add"]
