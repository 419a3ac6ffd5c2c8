"""Scope: the names of a net that an operator runs, and what they stand for in the nets around it.

A pass that recognizes what an operator such as Loop does asks who makes a value inside, and whether what a body
captures is a constant of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.compiler.passes.draft import Array, Draft
from dagexec.core.node import Node
from dagexec.core.program import Program
from dagexec.core.registry import schema_of, sub_nets_of


class Scope:
    """A net inside of an operator.

    Attributes:
        draft: the graph around all of them.
        net: the net.
        given: the names of the values that it is given in each execution.
        results: the names of what an execution results in.
    """

    def __init__(self, draft: Draft, net: Program, captured: Mapping[str, str], around: Scope | None = None) -> None:
        """`captured` are the names outside of what it captures, by those inside; `around` is the scope outside."""
        self.draft, self.net = draft, net
        self.given = [name for name in net.external_input if name not in captured]
        self.results = list(net.external_output)
        self._captured, self._around = captured, around
        self._writers = {name: one for one in net.op for name in one.output}

    @classmethod
    def of(cls, draft: Draft, node: Node, around: Scope | None = None) -> dict[str, Scope]:
        """The scopes of the nets that an operator runs, by the argument that holds each."""
        names = node.arguments(node.type).strings("captured")
        captured = dict(zip(names, node.input[len(node.input) - len(names) :], strict=True))
        nets = sub_nets_of(node, schema_of(node.type))
        return {argument: cls(draft, net, captured, around) for argument, net in nets.items()}

    def place(self, name: str) -> tuple[Scope | None, str]:
        """Where a value is made, and its name there; None for the graph around all nets."""
        if name in self._writers or name not in self._captured:
            return self, name
        outside = self._captured[name]
        return (None, outside) if self._around is None else self._around.place(outside)

    def outer(self, name: str) -> str | None:
        """The blob of the graph around all nets that the value is; None where a net makes it."""
        scope, found = self.place(name)
        return found if scope is None else None

    def writer(self, name: str, *kinds: str) -> tuple[Scope, Node] | None:
        """The operator in a net that makes the value, if it is one of `kinds`."""
        scope, found = self.place(name)
        node = None if scope is None else scope._writers.get(found)
        return None if scope is None or node is None or node.type not in kinds else (scope, node)

    def constant(self, name: str) -> Array | None:
        """The value, if it is a constant, or one cast to the type of something else."""
        cast = self.writer(name, "CastLike")
        if cast is not None:
            return cast[0].constant(cast[1].input[0])
        outside = self.outer(name)
        return None if outside is None else self.draft.constant(outside)
