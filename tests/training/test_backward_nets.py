"""The backward pass on given nets: Caffe2's recorded ones, names, slices, pruning, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.core.gradient import SparseGradient
from dagexec.errors import GradientError
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.training.backward import add_gradient_operators
from tests.ops.running import operator_def

FIXTURES = Path(__file__).parent.parent / "fixtures" / "caffe2"


def net_of(*operators: OperatorDef, external_input: tuple[str, ...] = ()) -> NetDef:
    return NetDef(name="given", op=operators, external_input=external_input)


def made(net: NetDef, length: int) -> list[tuple[str, list[str], list[str]]]:
    """The operators behind the first `length`, as type, inputs and outputs."""
    return [(definition.type, list(definition.input), list(definition.output)) for definition in net.op[length:]]


@pytest.mark.parametrize("name", ["train_sgd", "train_adam"])
def test_recorded_nets_get_the_operators_and_names_of_caffe2(name: str) -> None:
    recorded = NetDef()
    recorded.ParseFromString((FIXTURES / name / "predict_net.pb").read_bytes())
    types = [definition.type for definition in recorded.op]
    forward, backward = types.index("ConstantFill"), types.index("AtomicIter")
    net = NetDef()
    net.CopyFrom(recorded)
    del net.op[forward:]
    gradients = add_gradient_operators(net, ["loss"])
    expected = recorded.op[forward:backward]
    assert made(net, forward) == made(NetDef(op=expected), 0)
    for ours, theirs in zip(net.op[forward:], expected, strict=True):
        assert (ours.engine, ours.is_gradient_op) == (theirs.engine, theirs.is_gradient_op)
        assert Device.from_option(ours.device_option) == Device.from_option(theirs.device_option)
    assert gradients["p"] == "p_grad"
    assert gradients["c2"] == gradients["res"] == "res_grad"
    assert gradients["data"] == "data_grad"


def test_pass_through_gradients_survive_an_operator_in_place_on_one_of_their_blobs() -> None:
    net = net_of(
        operator_def("Relu", ["z"], ["y"]),
        operator_def("Tanh", ["w"], ["x"]),
        operator_def("Tanh", ["x"], ["x"]),
        operator_def("Sum", ["x", "y"], ["x"]),
        operator_def("Scale", ["x"], ["x"], scale=2.0),
        operator_def("SumElements", ["x"], ["loss"]),
    )
    with pytest.raises(GradientError, match="overwrites"):
        add_gradient_operators(net, ["loss"])
    del net.op[2]
    net.op[1].output[0] = "v"
    net.op[2].input[0] = "v"
    gradients = add_gradient_operators(net, ["loss"])
    rng = np.random.default_rng(0)
    feeds = {name: rng.uniform(0.1, 1, 4) for name in "wz"}
    found = run(net, feeds, [gradients["w"], gradients["z"]])
    np.testing.assert_allclose(found[0], 2 * (1 - np.tanh(feeds["w"]) ** 2))
    np.testing.assert_allclose(found[1], np.full(4, 2.0))


def test_a_gradient_that_an_in_place_operator_would_overwrite_gets_another_name() -> None:
    net = net_of(
        operator_def("Scale", ["z"], ["y"], scale=3.0),
        operator_def("Scale", ["w"], ["x"], scale=5.0),
        operator_def("Scale", ["x"], ["x"], scale=7.0),
        operator_def("Sum", ["x", "y"], ["x"]),
        operator_def("SumElements", ["x"], ["loss"]),
    )
    gradients = add_gradient_operators(net, ["loss"])
    written = [definition.output[0] for definition in net.op[5:]]
    assert written[:3] == ["loss_autogen_grad", "x_grad", "_x_grad_autosplit_0"]
    found = run(net, {"w": np.ones(2), "z": np.ones(2)}, [gradients["w"], gradients["z"]])
    np.testing.assert_array_equal(found, [[35.0, 35.0], [3.0, 3.0]])


def test_several_gradients_are_summed_in_the_order_of_the_walk_with_the_plain_name_first() -> None:
    net = net_of(
        operator_def("Tanh", ["a"], ["x"]),
        operator_def("Scale", ["x"], ["p"], scale=2.0),
        operator_def("Scale", ["x"], ["q"], scale=3.0),
        operator_def("Sum", ["x", "p", "q"], ["total"]),
        operator_def("SumElements", ["total"], ["loss"]),
    )
    add_gradient_operators(net, ["loss"])
    operators = made(net, 5)
    assert operators[-2] == ("Sum", ["x_grad", "total_grad", "_x_grad_autosplit_0"], ["x_grad"])
    assert [outputs for kind, _, outputs in operators if kind == "Scale"] == [["x_grad"], ["_x_grad_autosplit_0"]]


def test_a_sum_does_not_work_in_place_on_a_gradient_that_it_adds_twice() -> None:
    net = net_of(
        operator_def("Scale", ["a"], ["x"], scale=2.0),
        operator_def("Sum", ["x", "x", "x"], ["t"]),
        operator_def("Sum", ["t"], ["x"]),
        operator_def("Tanh", ["x"], ["y"]),
        operator_def("SumElements", ["y"], ["loss"]),
    )
    gradients = add_gradient_operators(net, {"loss": None}, wanted=["a"])
    value = np.array([0.1, 0.2])
    (found,) = run(net, {"a": value}, [gradients["a"]])
    np.testing.assert_allclose(found, 6 * (1 - np.tanh(6 * value) ** 2))


def test_an_operator_that_reads_a_blob_twice_has_both_gradients_summed() -> None:
    net = net_of(operator_def("Mul", ["x", "x"], ["y"]), operator_def("SumElements", ["y"], ["loss"]))
    gradients = add_gradient_operators(net, ["loss"])
    (found,) = run(net, {"x": np.array([1.0, -2.0])}, [gradients["x"]])
    np.testing.assert_array_equal(found, [2.0, -4.0])
    assert made(net, 2)[-1] == ("Sum", ["x_grad", "_x_grad_autosplit_0"], ["x_grad"])


def test_losses_are_added_with_the_gradients_given_for_them() -> None:
    net = net_of(
        operator_def("Scale", ["x"], ["one"], scale=2.0),
        operator_def("Sqr", ["x"], ["two"]),
        operator_def("Sum", ["one", "two"], ["three"]),
    )
    gradients = add_gradient_operators(net, {"one": "weight", "two": None, "three": "weight"})
    assert list(net.external_input) == ["weight"]
    feeds = {"x": np.array([3.0, 4.0]), "weight": np.array([10.0, 100.0])}
    found = run(net, feeds, [gradients["x"], "weight"])
    np.testing.assert_allclose(found[0], 2 * 2 * feeds["weight"] + 2 * feeds["x"] * (feeds["weight"] + 1))
    np.testing.assert_array_equal(found[1], feeds["weight"])


def test_a_second_call_leaves_the_gradients_of_the_first_alone() -> None:
    net = net_of(operator_def("Scale", ["x"], ["y"], scale=2.0), operator_def("Scale", ["x"], ["z"], scale=3.0))
    first = add_gradient_operators(net, ["y"])
    second = add_gradient_operators(net, ["z"])
    assert first["x"] != second["x"]
    found = run(net, {"x": np.ones(1)}, [first["x"], second["x"]])
    assert [float(array[0]) for array in found] == [2.0, 3.0]


def test_ones_of_a_loss_have_its_type() -> None:
    net = net_of(operator_def("Sqr", ["x"], ["loss"]))
    gradients = add_gradient_operators(net, ["loss"])
    for dtype in (np.float32, np.float64):
        assert run(net, {"x": np.ones(3, dtype)}, [gradients["x"]])[0].dtype == dtype


def test_nothing_passes_a_stop_gradient_in_place() -> None:
    net = net_of(
        operator_def("Scale", ["a"], ["x"], scale=2.0),
        operator_def("StopGradient", ["x"], ["x"]),
        operator_def("Mul", ["x", "b"], ["y"]),
        operator_def("SumElements", ["y"], ["loss"]),
    )
    gradients = add_gradient_operators(net, ["loss"])
    assert "a" not in gradients
    assert gradients["b"] == "b_grad"


def test_the_gradient_of_a_blob_of_the_caller_is_that_of_its_first_value() -> None:
    stopped = net_of(
        operator_def("StopGradient", ["x"], ["x"]),
        operator_def("Mul", ["x", "b"], ["y"]),
        operator_def("SumElements", ["y"], ["loss"]),
    )
    assert "x" not in add_gradient_operators(stopped, ["loss"])
    scaled = net_of(operator_def("Scale", ["x"], ["x"], scale=5.0), operator_def("SumElements", ["x"], ["loss"]))
    gradients = add_gradient_operators(scaled, ["loss"])
    np.testing.assert_array_equal(run(scaled, {"x": np.ones(2)}, [gradients["x"]])[0], [5.0, 5.0])


def test_the_gradient_of_an_input_that_is_not_wanted_is_not_computed() -> None:
    net = net_of(
        operator_def("Conv", ["data", "w", "b"], ["y"], kernel=3),
        operator_def("SumElements", ["y"], ["loss"]),
    )
    gradients = add_gradient_operators(net, ["loss"], wanted=["w", "b"])
    assert gradients == {"w": "w_grad", "b": "b_grad"}
    assert all("data_grad" not in definition.output for definition in net.op)


def test_branches_that_reach_nothing_wanted_need_no_gradient_maker() -> None:
    net = net_of(
        operator_def("OneHot", ["label", "size"], ["hot"]),
        operator_def("NoSuchMaker", ["data"], ["features"]),
        operator_def("MatMul", ["features", "w"], ["y"]),
        operator_def("SumElements", ["y"], ["loss"]),
    )
    with pytest.raises(GradientError, match="no gradient maker is registered for NoSuchMaker"):
        add_gradient_operators(net, ["loss"])
    assert add_gradient_operators(net, ["loss"], wanted=["w"]) == {"w": "w_grad"}


def table_net(*more: OperatorDef) -> NetDef:
    return net_of(
        operator_def("Gather", ["table", "first"], ["p"]),
        operator_def("Gather", ["table", "second"], ["q"]),
        operator_def("Sqr", ["p"], ["pp"]),
        operator_def("SumElements", ["pp"], ["l1"]),
        operator_def("SumElements", ["q"], ["l2"]),
        *more,
    )


TABLE = {
    "table": np.arange(12.0).reshape(4, 3),
    "first": np.array([1, 1, 3], np.int64),
    "second": np.array([[0, 1]], np.int64),
}


def expected_table_gradient() -> np.ndarray:
    expected = np.zeros((4, 3))
    for index in TABLE["first"]:
        expected[index] += 2 * TABLE["table"][index]
    for index in TABLE["second"].ravel():
        expected[index] += 1
    return expected


def test_slices_of_one_table_are_put_behind_each_other() -> None:
    net = table_net()
    gradient = add_gradient_operators(net, ["l1", "l2"])["table"]
    assert gradient == SparseGradient("table_grad_indices_concat", "table_grad_values_concat")
    indices, values = run(net, TABLE, [gradient.indices, gradient.values])
    assert sorted(indices.tolist()) == [0, 1, 1, 1, 3]
    found = np.zeros((4, 3))
    np.add.at(found, indices, values)
    np.testing.assert_allclose(found, expected_table_gradient())


def test_slices_beside_a_dense_gradient_become_dense() -> None:
    net = table_net(operator_def("Scale", ["table"], ["s"], scale=2.0), operator_def("SumElements", ["s"], ["l3"]))
    gradient = add_gradient_operators(net, ["l1", "l2", "l3"])["table"]
    assert gradient == "table_grad"
    np.testing.assert_allclose(run(net, TABLE, [gradient])[0], expected_table_gradient() + 2)


def test_slices_cannot_become_dense_when_their_blob_is_overwritten() -> None:
    net = table_net(
        operator_def("SumElements", ["table"], ["l3"]),
        operator_def("Scale", ["table"], ["table"], scale=2.0),
    )
    with pytest.raises(GradientError, match="overwrite"):
        add_gradient_operators(net, ["l1", "l3"])


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("wanted", [None, ["x"]])
def test_slices_of_what_an_operator_computes_become_dense(twice: bool, wanted: list[str] | None) -> None:
    operators = [
        operator_def("Sqr", ["x"], ["table"]),
        operator_def("Gather", ["table", "first"], ["rows"]),
        operator_def("SumElements", ["rows"], ["l1"]),
    ]
    if twice:
        operators.append(operator_def("Gather", ["table", "second"], ["more"]))
        operators.append(operator_def("SumElements", ["more"], ["l2"]))
    feeds = {"x": TABLE["table"], "first": TABLE["first"], "second": TABLE["second"]}
    net = NetDef(name="n", op=operators, external_input=sorted(feeds))
    gradients = add_gradient_operators(net, ["l1", "l2"] if twice else ["l1"], wanted=wanted)
    counts = np.bincount(TABLE["first"], minlength=4) + twice * np.bincount(TABLE["second"].ravel(), minlength=4)
    expected = 2 * TABLE["table"] * counts[:, None]
    np.testing.assert_allclose(run(net, feeds, [str(gradients["x"])])[0], expected)


def test_slices_stay_slices_where_no_gradient_goes_on() -> None:
    operators = [
        operator_def("StopGradient", ["x"], ["table"]),
        operator_def("Gather", ["table", "first"], ["rows"]),
        operator_def("SumElements", ["rows"], ["loss"]),
    ]
    net = NetDef(name="n", op=operators, external_input=["x", "first"])
    assert isinstance(add_gradient_operators(net, ["loss"])["table"], SparseGradient)


def test_sums_run_where_the_gradients_are_computed() -> None:
    option = Device("sim", 1).to_option()
    operators = [
        operator_def("Scale", ["x"], ["p"], scale=2.0),
        operator_def("Scale", ["x"], ["q"], scale=3.0),
        operator_def("Add", ["p", "q"], ["y"]),
        operator_def("SumElements", ["y"], ["loss"]),
    ]
    for definition in operators:
        definition.device_option.CopyFrom(option)
    net = net_of(*operators)
    add_gradient_operators(net, ["loss"])
    assert all(definition.device_option == option for definition in net.op)
    assert net.op[-1].type == "Sum"


def test_an_operator_that_overwrites_what_its_own_gradient_needs_is_named() -> None:
    net = net_of(operator_def("Sqr", ["x"], ["x"]), operator_def("SumElements", ["x"], ["loss"]))
    before = NetDef()
    before.CopyFrom(net)
    expected = r"Sqr 'x' \(operator 0\) of net 'given': .*needs the value of blob 'x' that it saw, which it overwrites"
    with pytest.raises(GradientError, match=expected):
        add_gradient_operators(net, ["loss"])
    assert net == before


def test_both_operators_are_named_when_one_overwrites_what_the_other_needs() -> None:
    net = net_of(
        operator_def("Sigmoid", ["x"], ["y"]),
        operator_def("Scale", ["y"], ["y"], scale=2.0),
        operator_def("SumElements", ["y"], ["loss"]),
    )
    expected = (
        r"Sigmoid 'y' \(operator 0\) of net 'given': its gradient operator SigmoidGradient needs the value of blob 'y' "
        r"that it saw, which Scale 'y' \(operator 1\) of net 'given' overwrites"
    )
    with pytest.raises(GradientError, match=expected):
        add_gradient_operators(net, ["loss"])


def test_losses_that_cannot_be_differentiated_are_refused() -> None:
    net = net_of(
        operator_def("Sqr", ["x"], ["y"]),
        operator_def("ArgMax", ["y"], ["best"]),
        operator_def("Cast", ["y"], ["number"], to="int32"),
    )
    with pytest.raises(GradientError, match="net 'given': loss 'x' is not the output of any operator"):
        add_gradient_operators(net, ["x"])
    with pytest.raises(GradientError, match=r"ArgMax 'best' \(operator 1\).*loss 'best' has no gradient"):
        add_gradient_operators(net, ["best"])
    with pytest.raises(GradientError, match=r"no gradient leads from \['number'\]"):
        add_gradient_operators(net, ["number"])
    with pytest.raises(GradientError, match="expected a list of losses, found the string 'y'"):
        add_gradient_operators(net, "y")
    with pytest.raises(GradientError, match="no loss was given"):
        add_gradient_operators(net, [])


def test_wanted_blobs_that_do_not_exist_or_that_no_loss_depends_on_are_refused() -> None:
    net = net_of(operator_def("Sqr", ["x"], ["y"]), operator_def("Sqr", ["a"], ["b"]))
    with pytest.raises(GradientError, match=r"gradients of \['z'\] were requested, but they are not blobs of the net"):
        add_gradient_operators(net, ["y"], wanted=["x", "z"])
    with pytest.raises(GradientError, match=r"loss 'y', the output of Sqr 'y'.* depends on none of .*\['a'\]"):
        add_gradient_operators(net, ["y"], wanted=["a"])


def test_an_operator_without_gradient_on_the_way_is_named_with_the_reason() -> None:
    net = net_of(operator_def("FusedConv", ["x", "w"], ["y"]), operator_def("SumElements", ["y"], ["loss"]))
    with pytest.raises(GradientError, match=r"FusedConv 'y' \(operator 0\) of net 'given': .*only inference makes it"):
        add_gradient_operators(net, ["loss"])


def run(net: NetDef, feeds: dict[str, np.ndarray], fetch: list[str]) -> list[np.ndarray]:
    """The blobs `fetch` after a run."""
    workspace = Workspace()
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    with SimpleNet(net, workspace) as built:
        built.run()
    return [workspace.fetch_blob(name) for name in fetch]
