"""Operators of one form that are calls of NumPy are prepared together, as each would be alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.native import can_run
from dagexec.core.native_tables import AlikeStep
from dagexec.core.operator_def import OperatorDef
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.alike import Alike
from tests.ops.running import Array, operator_def

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

KINDS = ("Softmax", "LeakyRelu", "Add", "Sigmoid", "Max", "Softmax")


def chain(count: int) -> list[OperatorDef]:
    """One after another; those of two operands read what came before, and `c`."""
    found, last = [], "x"
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        inputs = [last, "c"] if kind in ("Add", "Max") else [last]
        last = "y" if number == count - 1 else f"b{number}"
        found.append(operator_def(kind, inputs, [last]))
    return found


def made(
    operators: Sequence[OperatorDef],
    kind: type[SimpleNet] | type[DAGNet] = SimpleNet,
    keep: frozenset[str] | None = None,
    shape: tuple[int, ...] = (3, 20),
) -> BaseNet:
    workspace = Workspace()
    for seed, name in enumerate("xc"):
        workspace.feed_blob(name, np.random.default_rng(seed).standard_normal(shape, np.float32))
    net = NetDef(name="n", external_input=["x", "c"], external_output=["y"], op=operators)
    return kind(net, workspace, keep=keep)


def alike(net: BaseNet) -> list[int]:
    return [index for index, one in enumerate(net.prepared().prepared) if isinstance(one.step, AlikeStep)]


def results(net: BaseNet, x: Array, names: Sequence[str] = "y") -> list[bytes]:
    net.workspace.feed_blob("x", x)
    net.run()
    return [net.workspace.fetch_blob(name).tobytes() for name in names]


@pytest.mark.parametrize("kind", [SimpleNet, DAGNet])
@pytest.mark.parametrize("keep", [None, frozenset("y")])
def test_they_have_the_bytes_that_each_has_when_it_is_prepared_alone(
    kind: type[SimpleNet] | type[DAGNet], keep: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(2)
    odd = random.standard_normal((3, 20), np.float32)
    odd[0, 3], odd[2, 5] = np.nan, -np.inf
    with made(chain(40), kind, keep) as together, made(chain(40), kind, keep) as alone:
        assert len(alike(together)) > 25
        monkeypatch.setattr(Alike, "takes", lambda *_: False)
        assert not alike(alone)
        for x in (random.standard_normal((3, 20), np.float32), odd, random.standard_normal((3, 20), np.float32)):
            assert results(together, x) == results(alone, x)


def test_without_a_plan_all_that_is_in_between_can_be_fetched() -> None:
    names = [f"b{number}" for number in range(23)]
    x = np.random.default_rng(3).standard_normal((3, 20), np.float32)
    with made(chain(24)) as net:
        found = results(net, x, names)
        assert alike(net)
        assert results(net, -x, names) != found
        assert results(net, x, names) == found


def test_for_other_shapes_they_are_prepared_anew() -> None:
    with made(chain(24)) as net, made(chain(24), shape=(2, 7)) as other:
        alike(net)
        x, c = (np.random.default_rng(seed).standard_normal((2, 7), np.float32) for seed in range(2))
        net.workspace.feed_blob("c", c)
        assert results(net, x) == results(other, x)


def test_what_is_written_more_than_once_is_prepared_alone() -> None:
    """A later operator gives the blob other memory."""
    operators = [operator_def("Add", ["x", "c"], ["a"]), operator_def("Add", ["x", "a"], ["b"])]
    operators += [operator_def("Concat", ["x", "x"], ["a"], axis=0), operator_def("Add", ["b", "c"], ["y"])]
    with made(operators) as net:
        assert alike(net) == [3]
        x = np.random.default_rng(3).standard_normal((3, 20), np.float32)
        [y] = results(net, x)
        c = net.workspace.fetch_blob("c")
        np.testing.assert_array_equal(net.workspace.fetch_blob("a"), np.concatenate([x, x]))
        assert y == (x + (x + c) + c).tobytes()


def test_what_a_caller_may_hand_in_or_get_in_its_own_arrays_is_prepared_alone() -> None:
    with made(chain(12), shape=(64, 256)) as net:
        assert not alike(net)


def test_they_are_proved_to_be_handed_out_once_and_in_order() -> None:
    for keep in (None, frozenset("y")):
        with made(chain(30), DAGNet, keep) as net:
            assert alike(net)
            proof = check_net(net)
        assert (proof.unordered, proof.overwritten, proof.faults) == ((), (), ())


def test_scratch_holds_what_was_put_there_before_a_run() -> None:
    """A convolution with channels last keeps the padding of its images there."""
    inputs = [("x", "a"), ("x", "b"), ("a", "c2"), ("b", "y")]
    operators = [
        operator_def("Conv", [source, "w"], [name], kernel=3, pad=1, group=8, order="NHWC") for source, name in inputs
    ]
    random = np.random.default_rng(4)
    x, weights = (random.standard_normal(shape, np.float32) for shape in ((1, 4, 4, 8), (8, 3, 3, 1)))
    workspace = Workspace()
    workspace.feed_blob("x", x)
    workspace.feed_blob("w", weights)
    with SimpleNet(NetDef(name="n", op=operators), workspace) as net:
        net.run()
        assert alike(net)
        a, b, c, y = (workspace.fetch_blob(name) for _, name in inputs)
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    np.testing.assert_allclose(a, np.einsum("nhwcij,cij->nhwc", windows, weights[..., 0]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(b, a)
    np.testing.assert_array_equal(c, y)
