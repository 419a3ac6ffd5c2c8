"""Nets for the tests of tuning: operators by name, with what each reads."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.graph import Graph, build_graph
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef


def net_of(*rows: tuple[str, Sequence[str]], engine: str = "ONEDNN") -> NetDef:
    """A net of sums: each row is the blob that an operator writes, and those that it reads."""
    net = NetDef(name="drawn")
    for output, inputs in rows:
        net.op.append(OperatorDef(type="Sum", input=list(inputs), output=[output], engine=engine))
    return net


def graph_of(*rows: tuple[str, Sequence[str]]) -> Graph:
    """The graph of `net_of`."""
    return build_graph(net_of(*rows), lambda _name: True)


def model_of(*rows: tuple[str, Sequence[str]]) -> Model:
    """A model of `net_of` with input x; the last row is its output."""
    return Model("drawn", net_of(*rows), inputs={"x": InputInfo(shape=(4,))}, outputs=(rows[-1][0],))


CHAIN = (("a", "x"), ("b", "a"), ("c", "b"), ("d", "c"))

FORK = (("first", "x"), ("left", ["first"]), ("right", ["first"]), ("last", ["left", "right"]))

TWO_FORKS = (
    ("a", "x"),
    ("b1", "a"),
    ("b2", "a"),
    ("c", ["b1", "b2"]),
    ("d1", "c"),
    ("d2", "c"),
    ("e", ["d1", "d2"]),
)
