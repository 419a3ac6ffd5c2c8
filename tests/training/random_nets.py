"""Random nets of differentiable operators on float64 matrices, to check the backward pass on.

Every blob is a 3 x 3 matrix. A net reads `a`, `b` and `c`, and ends in `loss`, a sum of some blobs times fixed weights.
Blobs are overwritten, in place and otherwise, read several times, also by one operator, and left unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def

Array = npt.NDArray[Any]

SIZE = 3
INPUTS = ("a", "b", "c")

_UNARY = ("Relu", "Tanh", "Sigmoid", "Sqr", "Negative", "Scale", "Copy", "StopGradient", "Transpose", "Softmax")
_BINARY = ("Add", "Sub", "Mul", "MatMul")
_IN_PLACE = frozenset({"Relu", "Tanh", "Sigmoid", "Negative", "Scale", "Sum", "Add", "Sub", "Mul"})
_ARGUMENTS: Mapping[str, dict[str, ArgumentValue]] = {"Scale": {"scale": -0.5}}


@dataclass
class RandomNet:
    """A net, what it reads, and the same net with a name of its own for each value."""

    net: NetDef
    plain: NetDef
    feeds: dict[str, Array] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "; ".join(f"{', '.join(op.output)} = {op.type}({', '.join(op.input)})" for op in self.net.op)

    def slope(self, blob: str, direction: Array, step: float = 1e-6) -> float:
        """The derivative of `loss` by `blob` in a direction, by central differences; StopGradient gives constants."""
        stopped = [op.output[0] for op in self.plain.op if op.type == "StopGradient"]
        held = dict(zip(stopped, run(self.plain, self.feeds, stopped), strict=True))
        moving = NetDef(name="moving", op=[op for op in self.plain.op if op.type != "StopGradient"])
        sides = [
            float(run(moving, {**self.feeds, **held, blob: self.feeds[blob] + sign * step * direction}, ["loss"])[0])
            for sign in (1, -1)
        ]
        return (sides[0] - sides[1]) / (2 * step)


@st.composite
def random_nets(draw: st.DrawFn, *, in_place: bool = True, smooth: bool = False) -> RandomNet:
    """A net of up to 14 operators before those that make the loss; `smooth` ones have a derivative everywhere."""
    operators: list[OperatorDef] = []
    plain: list[OperatorDef] = []
    types = [name for name in (*_UNARY, *_BINARY, "Sum", "Sum") if not (smooth and name == "Relu")]
    current = {name: name for name in INPUTS}  # blob to its name in the net without overwriting
    for number in range(draw(st.integers(1, 14))):
        op_type = draw(st.sampled_from(types))
        arity = 1 if op_type in _UNARY else 2 if op_type in _BINARY else draw(st.integers(1, 4))
        names = sorted(current)
        inputs = [draw(st.sampled_from(names)) for _ in range(arity)]
        fresh = f"v{number}"
        choices = [fresh]
        if in_place and op_type in _IN_PLACE and inputs.count(inputs[0]) == 1:
            choices += [inputs[0]] * 2
        if in_place:
            choices += [name for name in names if name not in (*inputs, *INPUTS)][:1]
        output = draw(st.sampled_from(choices))
        arguments = _ARGUMENTS.get(op_type, {})
        operators.append(operator_def(op_type, inputs, [output], **arguments))
        plain.append(operator_def(op_type, [current[name] for name in inputs], [fresh], **arguments))
        current[output] = fresh
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    feeds = {name: rng.uniform(-1, 1, (SIZE, SIZE)) for name in INPUTS}
    ends = draw(st.lists(st.sampled_from(sorted(current)), min_size=1, max_size=4))
    for target, names in ((operators, ends), (plain, [current[name] for name in ends])):
        for position, name in enumerate(names):
            target.append(operator_def("Mul", [name, f"weight{position}"], [f"weighted{position}"]))
        target.append(operator_def("Sum", [f"weighted{position}" for position in range(len(names))], ["total"]))
        target.append(operator_def("SumElements", ["total"], ["loss"]))
    feeds |= {f"weight{position}": rng.uniform(-1, 1, (SIZE, SIZE)) for position in range(len(ends))}
    net = NetDef(name="random", op=operators, external_input=sorted(feeds))
    return RandomNet(net, NetDef(name="plain", op=plain), feeds)


def run(net: NetDef, feeds: Mapping[str, Array], fetch: list[str]) -> list[Array]:
    """The blobs `fetch` after a run of `net`."""
    workspace = Workspace()
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    with SimpleNet(net, workspace) as made:
        made.run()
    return [workspace.fetch_blob(name) for name in fetch]
