"""Operators of one form whose tensors nobody sees after a run are prepared together, as each would be alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.native_tables import AlikeStep
from dagexec.errors import OperatorError
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.alike import Alike
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import Array, operator_def

pytestmark = needs_onednn

FORMS = (
    ("Softmax", "x"), ("Relu", "x"), ("Add", "xc"), ("Max", "xx"), ("Mul", "xc"), ("Sigmoid", "x"), ("Sub", "cx"),
)  # fmt: skip


def net_def(count: int, forms: Sequence[tuple[str, str]] = FORMS) -> NetDef:
    """One operator after another; `x` stands for what is there so far, `c` for the input of that name."""
    net, last = NetDef(name="n", external_input=["x", "c"], external_output=["y"]), "x"
    for number in range(count):
        kind, operands = forms[number % len(forms)]
        result = "y" if number == count - 1 else f"b{number}"
        one = operator_def(
            kind, [last if operand == "x" else operand for operand in operands], [result], engine="ONEDNN"
        )
        net.op.append(one)
        last = result
    return net


def made(definition: NetDef, keep: frozenset[str] | None, kind: type[SimpleNet] | type[DAGNet] = SimpleNet) -> BaseNet:
    workspace = Workspace()
    for seed, name in enumerate("xc"):
        workspace.feed_blob(name, np.random.default_rng(seed).standard_normal((3, 20), np.float32))
    return kind(definition, workspace, keep=keep)


def alike(net: BaseNet) -> list[int]:
    return [index for index, one in enumerate(net.prepared().prepared) if isinstance(one.step, AlikeStep)]


def result(net: BaseNet, x: Array) -> Array:
    net.workspace.feed_blob("x", x)
    net.run()
    return net.workspace.fetch_blob("y")


@pytest.mark.parametrize("kind", [SimpleNet, DAGNet])
@pytest.mark.parametrize("keep", [frozenset("y"), None])
def test_they_have_the_bytes_that_each_has_when_it_is_prepared_alone(
    kind: type[SimpleNet] | type[DAGNet], keep: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numbers, and of rows of which some have NaN or infinities in them."""
    definition = net_def(45)
    x = np.random.default_rng(2).standard_normal((3, 20), np.float32)
    odd = x.copy()
    odd[0, 3], odd[2, 5] = np.nan, -np.inf
    with made(definition, keep) as alone, made(definition, keep, kind) as together:
        assert len(alike(together)) > 30
        monkeypatch.setattr(Alike, "takes", lambda *_: False)
        assert not alike(alone)
        for given in (x, odd, x):
            np.testing.assert_array_equal(result(alone, given).view(np.int32), result(together, given).view(np.int32))


def test_a_softmax_of_rows_with_nan_is_computed_again_in_its_place() -> None:
    """The other rows are as they would be; the default engine says what NaN makes of a row."""
    with made(net_def(12, [("Softmax", "x"), ("Relu", "x")]), frozenset("y")) as net:
        x = np.random.default_rng(2).standard_normal((3, 20), np.float32)
        finite = result(net, x)
        x[1, 4] = np.nan
        found = result(net, x)
        assert alike(net)
    np.testing.assert_array_equal(np.isnan(found).all(axis=1), [False, True, False])
    np.testing.assert_array_equal(found[[0, 2]], finite[[0, 2]])


def test_in_an_observed_run_each_is_a_step() -> None:
    definition = net_def(30)
    trace = Trace()
    with made(definition, frozenset("y"), DAGNet) as net:
        net.run(trace=trace)
        assert alike(net)
    assert sorted(span.operator for span in trace.spans) == list(range(30))


def test_they_are_proved_to_be_handed_out_once_and_in_order() -> None:
    with made(net_def(30), frozenset("y"), DAGNet) as net:
        assert alike(net)
        proof = check_net(net)
    assert (proof.unordered, proof.overwritten, proof.faults) == ((), (), ())


def test_a_call_that_fails_is_named_after_its_operator() -> None:
    with made(net_def(30), frozenset("y")) as net:
        failing = alike(net)[5]
        preparation = net.prepared()
        step = preparation.steps[failing]
        assert isinstance(step, AlikeStep)
        for call in (call for phase in step.phases for piece in phase for call in piece if call.arguments[3]):
            step.table[step.table[:, 0] == call.function, 1] = 0  # no primitive
        object.__setattr__(preparation, "in_order", tuple(preparation.steps))
        with pytest.raises(OperatorError, match=rf"{net.operators[failing].output_blobs[0].name}.*oneDNN failed"):
            net.run()


def calls_of_first_run(count: int) -> int:
    """Calls of functions, of Python and of others, that preparing a net of so many operators takes."""
    found = 0

    def count_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    with made(net_def(count), frozenset("y")) as net:
        sys.setprofile(count_call)
        try:
            net.prepared()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.slow
def test_one_more_of_a_form_takes_few_calls() -> None:
    """What is asked of a form is asked once: alone each takes some 500 calls."""
    made(net_def(14), None).close()  # what is done once a process
    few, many = calls_of_first_run(700), calls_of_first_run(1400)
    assert (many - few) / 700 < 250


def test_an_input_that_an_operator_writes_is_where_that_writes_it() -> None:
    """It is read before, and written in its place or in another shape; nobody plans its memory."""
    definition = net_def(30)
    for number in (8, 15, 22):
        definition.op[number].output[0] = "c"
        definition.op[number + 1].input[0] = "c"
    with made(definition, None) as alone, made(definition, frozenset(("c", "y"))) as together:
        assert alike(together)
        for net in (alone, together):
            net.run()
        for name in ("c", "y"):
            found, wanted = (net.workspace.fetch_blob(name) for net in (together, alone))
            np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))
