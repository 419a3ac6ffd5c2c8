"""zero-copy: what is marked, and that marked operators copy nothing where their pieces are in one stretch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, OperatorDef, Workspace, zoo
from dagexec.analysis.comparison import random_feeds
from dagexec.binding.parameters import initialized
from dagexec.compiler.passes import assignment, run_passes
from dagexec.compiler.passes.catalog import FINISHING
from dagexec.compiler.passes.zero_copy import PASS
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import nothing_to_do
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def

Array = npt.NDArray[Any]


def model(
    operators: list[OperatorDef],
    outputs: tuple[str, ...],
    shape: tuple[int | None, ...] = (1, 4, 3, 3),
    parameters: Mapping[str, Array] | None = None,
) -> Model:
    """A model with input x."""
    net = NetDef(name="n", op=operators, external_input=["x", *(parameters or ())])
    return Model("m", net, parameters=parameters or {}, inputs={"x": InputInfo(shape=shape)}, outputs=outputs)


def relu(source: str, target: str) -> OperatorDef:
    """A Relu."""
    return operator_def("Relu", [source], [target])


def concat(parts: list[str], result: str, **arguments: int) -> OperatorDef:
    """A Concat along the channels."""
    return operator_def("Concat", parts, [result], **arguments)


def marked(found: Model) -> list[str]:
    """The first outputs of the operators with zero_copy=1."""
    return [op.output[0] for op in found.net.op if any(a.name == "zero_copy" and a.i for a in op.arg)]


def run(found: Model, x: Array, kind: type[BaseNet] = DAGNet) -> tuple[dict[str, Array], BaseNet]:
    """The outputs of a planned net of the model, proved, and the net."""
    workspace = Workspace()
    workspace.feed_blob("x", x)
    for name, array in found.parameters.items():
        workspace.feed_blob(name, array)
    net = kind(found.net, workspace, keep=frozenset(found.outputs))
    proof = check_net(net)
    assert proof.holds, [str(finding) for finding in (*proof.unordered, *proof.overwritten)]
    net.run()
    net.run()
    net.close()
    return {name: workspace.fetch_blob(name) for name in found.outputs}, net


def test_a_concat_whose_inputs_are_inner_blobs_in_one_piece_is_marked_and_has_nothing_to_do() -> None:
    rewritten = PASS.apply(model([relu("x", "a"), relu("x", "b"), concat(["a", "b"], "c"), relu("c", "y")], ("y",)))
    assert marked(rewritten.model) == ["c"]
    assert rewritten.changes == ("Concat 'c': 'a', 'b' is joined where it lies",)
    x = np.random.default_rng(1).standard_normal((1, 4, 3, 3), np.float32)
    results, net = run(rewritten.model, x)
    np.testing.assert_array_equal(results["y"], np.concatenate([np.maximum(x, 0)] * 2, 1))
    assert net.prepared().steps[2] is nothing_to_do


def test_inputs_outputs_and_parameters_of_the_model_are_not_joined() -> None:
    plain = model([concat(["x", "x"], "c"), relu("c", "y")], ("y",))
    assert PASS.apply(plain).model is plain
    shared = model([relu("x", "a"), concat(["a", "x"], "c"), relu("c", "y")], ("y", "a"))
    assert PASS.apply(shared).model is shared


def test_a_batch_of_one_is_enough_to_be_marked_and_a_larger_one_is_copied() -> None:
    operators = [relu("x", "a"), relu("x", "b"), concat(["a", "b"], "c"), relu("c", "y")]
    rewritten = PASS.apply(model(operators, ("y",), (None, 4, 3, 3))).model
    assert marked(rewritten) == ["c"]
    for batch in (1, 3):
        x = np.random.default_rng(batch).standard_normal((batch, 4, 3, 3), np.float32)
        results, net = run(rewritten, x)
        np.testing.assert_array_equal(results["y"], np.concatenate([np.maximum(x, 0)] * 2, 1))
        assert (net.prepared().steps[2] is nothing_to_do) == (batch == 1)
    never = model(operators, ("y",), (2, 4, 3, 3))
    assert PASS.apply(never).model is never


def test_channels_last_are_in_one_piece_only_when_there_is_one_pixel() -> None:
    operators = [relu("x", "a"), relu("x", "b"), operator_def("Concat", ["a", "b"], ["y"], order="NHWC")]
    assert marked(PASS.apply(model(operators, ("y",), (1, 3, 3, 4))).model) == []
    assert marked(PASS.apply(model(operators, ("y",), (1, 1, 1, 4))).model) == ["y"]


@pytest.mark.parametrize("kind", [SimpleNet, DAGNet, AsyncDAGNet])
@pytest.mark.parametrize("flat", [True, False])
def test_a_dense_block_joins_all_that_was_joined_before_without_a_copy(kind: type[BaseNet], flat: bool) -> None:
    """Flat: each Concat lists all features, as PyTorch exports it; else the one before and something new, as Caffe."""
    operators, features, block = [relu("x", "f0")], ["f0"], "f0"
    parameters = {}
    for layer in range(1, 6):
        new = f"f{layer}"
        operators += [
            operator_def("Sigmoid", [block], [f"h{layer}"]),
            operator_def("Conv", [f"h{layer}", f"w{layer}"], [new], kernel=1),
        ]
        parameters[f"w{layer}"] = np.full((2, 2 + 2 * layer, 1, 1), 0.1 * layer, np.float32)
        features.append(new)
        operators.append(concat(features if flat else [block, new], f"c{layer}"))
        block = f"c{layer}"
    operators.append(relu(block, "y"))
    plain = model(operators, ("y",), parameters=parameters)
    rewritten = PASS.apply(plain).model
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 3), np.float32)
    results, net = run(rewritten, x, kind)
    np.testing.assert_array_equal(results["y"], run(plain, x, SimpleNet)[0]["y"])
    joining = [step for op, step in zip(net.operators, net.prepared().steps, strict=True) if "Concat" in op.label]
    assert joining == [nothing_to_do] * 5


def test_a_blob_that_two_concats_want_in_different_places_is_copied_by_one() -> None:
    operators = [relu("x", "a"), relu("x", "b"), concat(["a", "b"], "c"), concat(["b", "a"], "d"), relu("d", "y")]
    rewritten = PASS.apply(model(operators, ("y", "c"))).model
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 3), np.float32)
    for kind in (SimpleNet, DAGNet):
        results, net = run(rewritten, x, kind)
        np.testing.assert_array_equal(results["y"], np.concatenate([np.maximum(x, 0)] * 2, 1))
        np.testing.assert_array_equal(results["c"], results["y"])
        assert [len(one.inputs_in_place) for one in net.prepared().prepared] == [0, 0, 2, 0, 0]


def test_a_result_that_is_written_over_while_a_part_is_still_read_is_a_copy() -> None:
    """With workers nothing says that `z` has been computed when the result is written over; in list order it may."""
    operators = [
        relu("x", "a"),
        operator_def("Concat", ["a", "a"], ["c"], zero_copy=1),
        operator_def("Sigmoid", ["c"], ["c"]),
        operator_def("Tanh", ["a"], ["z"]),
    ]
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 3), np.float32)
    for kind in (SimpleNet, DAGNet):
        results, net = run(model(operators, ("c", "z")), x, kind)
        np.testing.assert_allclose(results["z"], np.tanh(np.maximum(x, 0)), rtol=1e-6)
        assert net.prepared().prepared[1].inputs_in_place == ()
    earlier = [operators[0], operators[1], operators[3], operators[2]]
    assert run(model(earlier, ("c", "z")), x, SimpleNet)[1].prepared().prepared[1].inputs_in_place == (0,)
    assert run(model(earlier, ("c", "z")), x, DAGNet)[1].prepared().prepared[1].inputs_in_place == ()


def test_a_split_gives_views_and_what_writes_over_one_gets_a_copy() -> None:
    cut = operator_def("Split", ["a"], ["p", "q"])
    operators = [relu("x", "a"), cut, operator_def("Sum", ["p", "q"], ["y"])]
    rewritten = PASS.apply(model(operators, ("y",)))
    assert rewritten.changes == ("Split 'p': 'p', 'q' is cut where it lies",)
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 3), np.float32)
    results, net = run(rewritten.model, x)
    positive = np.maximum(x, 0)
    np.testing.assert_array_equal(results["y"], positive[:, :2] + positive[:, 2:])
    assert net.prepared().steps[1] is nothing_to_do
    marked_split = rewritten.model.net.op[1]
    over = [operators[0], marked_split, operator_def("Sigmoid", ["p"], ["p"]), operator_def("Sum", ["a", "a"], ["z"])]
    results, net = run(model(over, ("z", "p")), x)
    np.testing.assert_array_equal(results["z"], positive + positive)
    assert net.prepared().prepared[1].outputs_in_place == (1,)


def test_a_slice_is_a_view_where_it_is_one_piece() -> None:
    operators = [
        relu("x", "a"),
        operator_def("Slice", ["a"], ["s"], starts=[0, 1, 0, 0], ends=[1, 3, 3, 3], onnx_style=1),
        operator_def("Slice", ["a"], ["t"], starts=[0, 0, 1, 0], ends=[1, 4, 2, 3], onnx_style=1),
        relu("s", "y"),
        relu("t", "z"),
    ]
    rewritten = PASS.apply(model(operators, ("y", "z"))).model
    assert marked(rewritten) == ["s"]
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 3), np.float32)
    results, net = run(rewritten, x)
    np.testing.assert_array_equal(results["y"], np.maximum(x, 0)[:, 1:3])
    np.testing.assert_array_equal(results["z"], np.maximum(x, 0)[:, :, 1:2])
    assert net.prepared().steps[1] is nothing_to_do


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "googlenet"])
def test_zoo_models_join_everything_in_place_with_the_same_bytes(name: str) -> None:
    plain = initialized(zoo.build(name))
    rewritten = run_passes(plain, (assignment.PASS, *FINISHING)).model
    found = []
    for each in (plain, rewritten):
        workspace = Workspace()
        for blob, array in ({**each.parameters} | random_feeds(each, {})).items():
            workspace.adopt_blob(blob, array)
        with DAGNet(each.net, workspace, num_workers=2, keep=frozenset(each.outputs)) as net:
            assert check_net(net).holds
            net.run()
            found.append([workspace.fetch_blob(output).tobytes() for output in each.outputs])
            for operator, prepared in zip(net.operators, net.prepared().prepared, strict=True):
                if each is rewritten and operator.definition.type in ("Concat", "DepthConcat"):
                    assert prepared.inputs_in_place == tuple(range(len(operator.input_blobs)))
    assert found[0] == found[1]
