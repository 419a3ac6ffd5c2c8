"""recurrent_net: a net whose step runs once for each row of a sequence, with the step of its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference, as_references
from dagexec.core.proto import NetDef
from dagexec.training.backward import add_gradient_operators

__all__ = ["recurrent_net"]


def recurrent_net(
    net: Net,
    cell_net: Net,
    inputs: Sequence[tuple[Any, Any]],
    initial_cell_inputs: Sequence[tuple[Any, Any]],
    links: Mapping[Any, Any],
    timestep: Any = None,
    scope: str | None = None,
    outputs_with_grads: Iterable[int] = (0,),
    recompute_blobs_on_backward: Any = None,
    forward_only: bool = False,
) -> tuple[tuple[BlobReference, ...], BlobReference]:
    """Append a RecurrentNetwork; returns its outputs and its last one, which holds nothing here.

    Args:
        net: is appended to.
        cell_net: the step, which reads a row of shape [1, N, D] of each sequence, and the states before it.
        inputs: what the step calls a row of a sequence, and the sequence, of shape [T, N, D].
        initial_cell_inputs: what the step calls a state before it, and the first of them, [1, N, D] or [N, D].
        links: what the step calls a state behind it, by what it calls the same state before it.
        timestep: what the step calls its number, if it reads it.
        scope: what names of states begin with; by default the name of the step.
        outputs_with_grads: the outputs that have gradients. Outputs are of each state all values, then the last.
        recompute_blobs_on_backward: nothing; each step is computed anew for the gradient.
        forward_only: leave out what the gradient needs.
    """
    prefix = scope or cell_net.Name()
    step = NetDef()
    step.CopyFrom(cell_net.Proto())
    rows = {str(inner): str(*as_references(outer)) for inner, outer in inputs}
    first = {str(inner): str(*as_references(outer)) for inner, outer in initial_cell_inputs}
    behind = {str(before): str(after) for before, after in links.items()}
    states = {before: f"{prefix}/{before}_states" for before in first}
    read = [name for one in step.op for name in one.input]
    written = {name for one in step.op for name in one.output}
    own = {*rows, *first, *([] if timestep is None else [str(timestep)])}
    others = [name for name in dict.fromkeys(read) if name not in written and name not in own]
    operands = [*rows.values(), *first.values(), *others]
    of_states = [
        (inner, states[before], offset) for before in first for inner, offset in ((before, 0), (behind[before], 1))
    ]
    linked = [*of_states, *((inner, outer, 0) for inner, outer in rows.items())]
    aliases = [
        (states[before], f"{behind[before]}_{kind}", offset)
        for before in first
        for kind, offset in (("all", 1), ("last", -1))
    ]
    arguments: dict[str, Any] = {
        "step_net": step,
        "timestep": "timestep" if timestep is None else str(timestep),
        "recurrent_states": list(states.values()),
        "initial_recurrent_state_ids": [len(rows) + place for place in range(len(first))],
        **_lists("link_internal", "link_external", "link_offset", linked),
        **_lists("alias_src", "alias_dst", "alias_offset", aliases),
        "outputs_with_grads": list(outputs_with_grads),
    }
    if not forward_only:
        arguments |= _backward(step, linked, [name for name in others if name not in behind.values()], operands)
    outputs = [alias[1] for alias in aliases]
    made = net._add_operator(
        "RecurrentNetwork",
        [BlobReference(name) for name in operands],
        [BlobReference(name) for name in (*outputs, f"{prefix}/step_workspaces")],
        arg=arguments,
    )
    return made[:-1], made[-1]


def _lists(first: str, second: str, third: str, rows: Sequence[tuple[Any, Any, Any]]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in zip((first, second, third), zip(*rows, strict=True), strict=True)}


def _backward(
    step: NetDef, linked: Sequence[tuple[str, str, int]], others: Sequence[str], operands: Sequence[str]
) -> dict[str, Any]:
    """The arguments for the gradient: the backward step, what it is linked with, and the parameters that have one."""
    both = NetDef()
    both.CopyFrom(step)
    seeds: dict[str, str | None] = {inner: f"{inner}_grad" for inner, _, offset in linked if offset == 1}
    wanted = [*(inner for inner, _, offset in linked if not offset), *others]
    gradients = add_gradient_operators(both, seeds, wanted=wanted)
    backward = NetDef(name=f"{step.name}_backward", op=both.op[len(step.op) :])
    links = [(seeds[inner], f"{outer}_grad", 1) for inner, outer, offset in linked if offset == 1]
    links += [
        (str(gradients[inner]), f"{outer}_grad", 0)
        for inner, outer, offset in linked
        if not offset and inner in gradients
    ]
    parameters = [name for name in others if isinstance(gradients.get(name), str)]
    return {
        "backward_step_net": backward,
        **_lists("backward_link_internal", "backward_link_external", "backward_link_offset", links),
        "param": [operands.index(name) for name in parameters],
        "param_grads": [str(gradients[name]) for name in parameters],
    }
