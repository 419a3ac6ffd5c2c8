"""The tail of a net for any length: the operators that work along positions otherwise, a pooling over a text, say.

They are run as they are, at the length that there is, on the first positions of what the others have computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.compiler.length_rules import Known, NotSizedError, first_type
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.ops.families.attention.fused import FUSED_ATTENTION
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Followed:
    """An operator of the net.

    Attributes:
        node: it.
        sized: what takes its place in the net for any length; None where it is not shown to be right there.
        known: what is known of its outputs then.
        writers: the number of the operator that wrote each of its inputs; None where that was there before.
    """

    node: Node
    sized: Node | None
    known: Sequence[Known]
    writers: Sequence[int | None]

    def is_cut(self, name: str) -> bool:
        """The first positions of this output are its values at the length that there is."""
        if self.sized is None:
            return False
        known = dict(zip(self.node.output, self.known, strict=True))[name]
        return not known.is_counted and all((one.each, one.before) == (1, 1) for one in known.rows)


@dataclass(frozen=True)
class Tail:
    """What follows the net for any length.

    Attributes:
        model: its inputs are some of the model's, and blobs of the net, and its outputs the model's others.
        blobs: those of the net.
    """

    model: Model
    blobs: tuple[str, ...]


def tail_of(model: Model, followed: Sequence[Followed], outputs: Sequence[tuple[str, int]]) -> Tail:
    """What computes these `outputs`, each with the number of the operator that writes it. Raises NotSizedError."""
    numbers: set[int] = set()
    cut: dict[str, int] = {}
    waiting = [number for _, number in outputs]
    while waiting:
        number = waiting.pop()
        if number in numbers:
            continue
        numbers.add(number)
        one = followed[number]
        if one.node.type == FUSED_ATTENTION:
            raise NotSizedError("attention follows what is not right for any length")
        for name, writer in zip(one.node.input, one.writers, strict=True):
            if writer is None:
                continue
            if not followed[writer].is_cut(name):
                waiting.append(writer)
            elif cut.setdefault(name, writer) != writer:
                raise NotSizedError(f"{one.node.type} reads {name!r} of another time")
    for name, writer in cut.items():
        later = [number for number in range(writer + 1, len(followed)) if name in followed[number].node.output]
        earlier = [number for number in numbers if number < writer and name in followed[number].node.output]
        if earlier or any(followed[number].sized is not None for number in later):
            raise NotSizedError(f"{name!r} is overwritten before the tail reads it")
    nodes = tuple(followed[number].node for number in sorted(numbers))
    read = {name for node in nodes for name in node.input}
    inputs = {name: info for name, info in model.inputs.items() if name in read}
    for name, writer in cut.items():
        known = dict(zip(followed[writer].node.output, followed[writer].known, strict=True))[name]
        kind = first_type(known.probed)
        inputs[name] = InputInfo(kind.meta, (None,) * len(kind.shape))
    net = type(model.program)(nodes, model.program.header)
    parameters = {name: array for name, array in model.parameters.items() if name in read}
    names = tuple(name for name, _ in outputs)
    return Tail(model.changed(net=net, inputs=inputs, outputs=names, parameters=parameters), tuple(cut))
