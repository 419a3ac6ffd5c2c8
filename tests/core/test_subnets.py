"""Caffe2's If, While and Do against an interpreter that runs their subnets in one dictionary of blobs."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, OperatorDef, Workspace, compile, op
from dagexec.core.graph import build_graph
from dagexec.core.program import program_of
from dagexec.errors import SchemaError, UnsupportedOperatorError
from dagexec.scheduler.hazards import check_net

Array = npt.NDArray[np.float32]
Blobs = dict[str, npt.NDArray[np.generic]]

ADD_ONE = op("Add", ["i", "one"], ["i"])
NET_TYPES = ("simple", "dag", "async_dag")
_KINDS: dict[str, Callable[..., npt.NDArray[np.generic]]] = {
    "Add": np.add, "Sub": np.subtract, "Copy": np.copy, "Negative": np.negative, "LT": np.less,
}  # fmt: skip


def _interpreted(net: NetDef, blobs: Blobs) -> None:
    """As Caffe2 runs it: subnets read and write the blobs of the net around them."""
    for one in net.op:
        nets = {argument.name: argument.n for argument in one.arg}
        if one.type == "If":
            _interpreted(nets["then_net"] if blobs[one.input[0]] else nets.get("else_net", NetDef()), blobs)
        elif one.type == "While":
            _interpreted(nets["cond_net"], blobs)
            while blobs[one.input[0]]:
                _interpreted(nets["loop_net"], blobs)
                _interpreted(nets["cond_net"], blobs)
        elif one.type == "Do":
            [inner] = [list(argument.strings) for argument in one.arg if argument.name == "inner_blobs"]
            [places] = [list(argument.ints) for argument in one.arg if argument.name == "outer_blobs_idx"]
            outer = [*one.input[:-1], *one.output[:-1]]
            bound = {name.decode(): outer[place] for name, place in zip(inner, places, strict=True)}
            own = {name: blobs[other] for name, other in bound.items() if other in blobs}
            _interpreted(nets["net"], own)
            blobs.update({other: own[name] for name, other in bound.items() if name in own})
        elif one.type != "CreateScope":
            blobs[one.output[0]] = _KINDS[one.type](*(blobs[name] for name in one.input))


class _Drawn:
    """Draws nets of operators that read what is there."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0

    def net(self, exists: set[str], depth: int, length: int) -> NetDef:
        """A net, by which `exists` grows."""
        return NetDef(name="n", op=[one for _ in range(length) for one in self._operators(exists, depth)])

    def _operators(self, exists: set[str], depth: int) -> list[OperatorDef]:
        kind = self._random.choice(["If", "While", "Do", *["simple"] * 4] if depth else ["simple"])
        if kind == "If":
            before, branches = set(exists), []
            for _ in range(2):
                inside = set(before)
                branches.append(self.net(inside, depth - 1, self._random.randint(0, 3)))
                exists = exists & inside if branches[1:] else inside
            test = op("LT", [self._one(before), self._one(before)], ["if"])
            then, other = branches
            outputs = sorted({name for one in (*then.op, *other.op) for name in one.output} - {"if"})
            return [test, op("If", ["if", *sorted(before)], outputs, then_net=then, else_net=other)]
        if kind == "While":
            self._number += 1
            step, go = f"i{self._number}", f"go{self._number}"
            body = self.net(set(exists), depth - 1, self._random.randint(0, 3))
            test = NetDef(op=[op("Add", [step, "one"], [step]), op("LT", [step, "limit"], [go])])
            start = [op("Sub", ["one", "one"], [step]), op("LT", [step, step], [go])]
            outputs = [name for one in body.op for name in one.output if name in exists]
            return [*start, op("While", [go, *sorted(exists)], sorted(set(outputs)), loop_net=body, cond_net=test)]
        if kind == "Do":
            outer, names = self._random.sample(sorted(exists - {"one", "limit"}), 2), ["p", "q", "one", "limit"]
            net = self.net(set(names), depth - 1, self._random.randint(1, 3))
            inputs, binding = [*outer, "one", "limit", "s"], {"inner_blobs": names, "outer_blobs_idx": [0, 5, 2, 3]}
            return [op("CreateScope", [], ["s"]), op("Do", inputs, [*outer, "s"], net=net, arg=binding)]
        kind = self._random.choice(["Add", "Sub", "Copy", "Negative"])
        inputs = [self._one(exists) for _ in range(2 if kind in ("Add", "Sub") else 1)]
        output = self._random.choice(["a", "b", "t", "u", inputs[0]])
        output = "b" if output in ("one", "limit") else output
        kind = "Negative" if kind == "Copy" and output in inputs else kind
        exists.add(output)
        return [op(kind, inputs, [output])]

    def _one(self, exists: set[str]) -> str:
        return self._random.choice(sorted(exists))


def _start() -> Blobs:
    return {name: np.array([value], np.float32) for name, value in {"one": 1, "limit": 3, "a": 0.5, "b": -0.25}.items()}


@pytest.mark.parametrize("seed", range(12))
def test_nets_do_as_caffe2_does(seed: int) -> None:
    net = _Drawn(seed).net(set(_start()), 3, 4)
    expected = _start()
    seen = {name for one in net.op for name in (*one.input, *one.output)}
    for _run in range(2):
        _interpreted(net, expected)
    for net_type in NET_TYPES[seed % 3 :][:2]:
        workspace = Workspace()
        for name, value in _start().items():
            workspace.feed_blob(name, value)
        made = workspace.create_net(net, net_type, 2)
        for _run in range(2):
            made.run()
        for name in seen & expected.keys():
            np.testing.assert_array_equal(workspace.fetch_blob(name), expected[name], err_msg=name)
        made.close()


def test_a_compiled_model_gives_the_same_and_is_proved() -> None:
    body = NetDef(op=[op("Add", ["a", "b"], ["a"]), op("Negative", ["a"], ["t"])])
    test = NetDef(op=[op("LT", ["a", "limit"], ["go"])])
    net = NetDef(
        name="count",
        op=[op("While", ["go", "a", "b"], ["a", "t"], loop_net=body, cond_net=test), op("Add", ["a", "t"], ["y"])],
        external_input=["a", "b", "go", "limit"],
        external_output=["a", "t", "y"],
    )
    feeds = {name: np.array([value], np.float32) for name, value in {"a": 0, "b": 2, "limit": 5}.items()}
    feeds["go"] = np.array(True)
    with compile(net, net_type="async_dag", num_workers=2) as executor:
        found = executor.run(feeds)
    assert {name: value.item() for name, value in found.items()} == {"a": 6, "t": -6, "y": 0}
    workspace = Workspace()
    for name, value in feeds.items():
        workspace.feed_blob(name, value)
    made = workspace.create_net(net, "async_dag", 2)
    made.run()
    assert check_net(made).holds  # type: ignore[arg-type]
    made.close()


def test_the_do_of_a_gradient_has_the_blobs_of_its_forward_do() -> None:
    forward = NetDef(op=[op("Add", ["p", "p"], ["twice"]), op("Copy", ["twice"], ["q"])])
    backward = NetDef(op=[op("Add", ["twice", "g"], ["r"])])
    binding = {"inner_blobs": ["p", "q"], "outer_blobs_idx": [0, 1]}
    gradient = op("Do", ["g", "s"], ["r", "s"], net=backward, inner_blobs=["g", "r"], outer_blobs_idx=[0, 1])
    gradient.is_gradient_op = True
    twice = [op("Do", [name, "s"], [f"{name}2", "s"], net=forward, arg=binding) for name in ("a", "b")]
    net = NetDef(op=[op("CreateScope", [], ["s"]), *twice, gradient, op("Copy", ["r"], ["of_b"]), gradient])
    workspace = Workspace()
    for name, value in {"a": 1, "b": 10, "g": 0.5}.items():
        workspace.feed_blob(name, np.array([value], np.float32))
    workspace.run_net_once(net)
    assert [workspace.fetch_blob(name).item() for name in ("a2", "b2", "of_b", "r")] == [2, 20, 20.5, 2.5]


def test_what_only_a_subnet_names_is_kept_for_when_it_runs_again() -> None:
    workspace = Workspace()
    for name, value in {"condition": True, "i": np.float32(0), "one": np.float32(1)}.items():
        workspace.feed_blob(name, np.array(value))
    net = workspace.create_net(NetDef(name="n", op=[op("If", ["condition"], [], then_net=NetDef(op=[ADD_ONE]))]))
    for _ in range(3):
        net.run()
    assert workspace.fetch_blob("i").item() == 3


def test_what_a_body_counts_is_ordered_with_the_net_around_it() -> None:
    count = NetDef(op=[op("CountUp", ["counter"], ["before"])])
    net = NetDef(
        op=[
            op("CreateCounter", [], ["counter"], init_count=1),
            op("If", ["condition", "counter"], ["before"], then_net=count),
            op("RetrieveCount", ["counter"], ["held"]),
        ]
    )
    graph = build_graph(net)
    [branch] = [index for index, one in enumerate(graph.operators) if one.type == "If"]
    [held] = [index for index, one in enumerate(graph.operators) if one.type == "RetrieveCount"]
    assert branch in graph.parents[held]


def test_an_if_of_bodies_is_left_alone() -> None:
    bodies = [NetDef(op=[op("NoOp", [], [name])], external_output=[name]) for name in ("u", "v")]
    ours = op("If", ["condition"], ["y"], then_net=bodies[0], else_net=bodies[1])
    [node] = program_of(NetDef(op=[ours])).op
    assert node.input == ("condition",)
    assert node.output == ("y",)
    assert node.values["then_net"] == bodies[0]


def test_subnets_that_do_not_fit_are_refused() -> None:
    net = NetDef(op=[op("Copy", ["a"], ["b"])])
    with pytest.raises(SchemaError, match=r"While 'b' .*: argument 'loop_net', the net it runs, is missing"):
        program_of(NetDef(op=[op("While", ["a"], ["b"], cond_net=net)]))
    with pytest.raises(SchemaError, match="expected an index of an input or output"):
        program_of(NetDef(op=[op("Do", ["a", "s"], ["b", "s"], net=net, inner_blobs=["a"], outer_blobs_idx=[2])]))
    with pytest.raises(UnsupportedOperatorError, match="no loop of this net has filled the stack"):
        program_of(NetDef(op=[op("HasScope", ["s"], ["more"])]))
