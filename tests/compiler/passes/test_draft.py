"""What a pass may ask of a draft, and what comes out of its edits."""

from __future__ import annotations

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.core.model import Model
from dagexec.core.node import new_node
from dagexec.core.proto import NetDef
from tests.compiler.passes.models import listed, model_of, normal, op


def test_a_blob_is_single_when_it_has_one_value_in_a_run() -> None:
    operators = [
        op("Abs", ["x"], ["a"]),
        op("Relu", ["a"], ["b"]),
        op("Tanh", ["b"], ["b"]),
        op("Mul", ["b", "p"], ["y"]),
    ]
    draft = Draft(model_of(operators, p=normal(6)))
    assert [name for name in "xabpy" if draft.is_single(name)] == ["x", "a", "p", "y"]
    assert [number for number, _ in draft.operators() if draft.is_free(number)] == [0]
    assert draft.producer("a") == 0
    assert draft.only_reader("a") is None


def test_a_blob_that_one_run_leaves_for_the_next_is_not_single() -> None:
    net = NetDef(name="counter", op=[op("Add", ["x", "state"], ["y"]), op("Copy", ["y"], ["state"])])
    draft = Draft(Model("counter", net, outputs=("y",)))
    assert not draft.is_single("state")
    assert draft.is_read_early("state")


def test_what_the_init_net_makes_is_given_but_its_value_is_unknown() -> None:
    init = NetDef(name="init", op=[op("ConstantFill", [], ["p"], shape=[6])])
    made = model_of([op("Mul", ["x", "p"], ["y"])])
    draft = Draft(Model("model", made.net, init, {}, made.inputs, made.outputs))
    assert draft.is_given("p")
    assert draft.constant("p") is None


def test_edits_keep_readers_writers_and_external_inputs_right() -> None:
    model = model_of([op("Mul", ["x", "p"], ["a"]), op("Relu", ["a"], ["y"])], p=normal(6))
    draft = Draft(model)
    name = draft.add_parameter("p", np.ones(6, np.float32))
    assert name == "p/1"
    draft.replace(1, new_node("Add", ["a", name], ["b"]), new_node("Abs", ["b"], ["y"]))
    assert draft.readers("b") == [2]
    draft.rename("b", "c")
    draft.redirect("a", "x")
    draft.remove(0)
    draft.changed("all of it")
    changes = draft.settle()
    assert listed(draft.model) == ["Add x p/1 -> c", "Abs c -> y"]
    assert list(draft.model.net.external_input) == ["x", "p/1"]
    assert listed(model) == ["Mul x p -> a", "Relu a -> y"]
    assert changes == ("all of it",)


def test_edits_of_a_pass_that_changes_nothing_are_taken_back() -> None:
    model = model_of([op("Mul", ["x", "p"], ["a"]), op("Relu", ["a"], ["y"])], p=normal(6))
    draft = Draft(model)
    draft.rename("a", "b")
    assert draft.settle() == ()
    assert draft.model is model
    assert [node.output[0] for node in draft.nodes()] == ["a", "y"]


def test_a_model_that_a_pass_made_without_a_change_is_forgotten() -> None:
    model = model_of([op("Mul", ["x", "p"], ["a"]), op("Relu", ["a"], ["y"])], p=normal(6))
    draft = Draft(model)
    draft.become(model, ())
    assert draft.settle() == ()
    draft.rename("a", "b")
    draft.changed("another name")
    draft.settle()
    assert listed(draft.model) == ["Mul x p -> b", "Relu b -> y"]


def test_the_next_pass_has_readers_in_list_order_and_knows_what_is_written_twice() -> None:
    model = model_of([op("Mul", ["x", "p"], ["a"]), op("Relu", ["x"], ["b"]), op("Abs", ["b"], ["y"])], p=normal(6))
    draft = Draft(model)
    draft.replace(0, draft[0].changed(inputs=["p", "x"]))
    draft.changed("the first reader is entered last")
    draft.settle()
    assert list(draft.readers("x")) == [0, 1]
    assert draft.is_single("b")
    draft.replace(2, draft[2].changed(outputs=["b"]))
    draft.changed("in place")
    draft.settle()
    assert not draft.is_single("b")


def test_the_next_pass_sees_what_the_last_one_left() -> None:
    model = model_of([op("Mul", ["x", "p"], ["a"]), op("Relu", ["a"], ["b"]), op("Abs", ["a"], ["y"])], p=normal(6))
    draft = Draft(model)
    draft.replace(1, draft[1].changed(inputs=["x"]))
    draft.redirect("a", "b")
    draft.remove(0)
    draft.add_parameter_named("a", np.ones(6, np.float32))
    draft.changed("all of it")
    draft.settle()
    again = Draft(draft.model)
    for name in "xabpy":
        assert draft.is_single(name) == again.is_single(name)
        assert draft.is_given(name) == again.is_given(name)
    assert [draft[number].type for number in draft.readers("b")] == ["Abs"]
    assert draft.only_reader("b") == 2
    assert draft.unused_parameters() == ["p", "a"]
