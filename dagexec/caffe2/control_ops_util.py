"""`If` and `While` operators of nets: what their subnets touch of the net around them becomes inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dagexec.caffe2.creation import CreateOperator
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import Caffe2Error


def add_if_op(
    if_net: Net, cond_blob: Any, lexical_scope: Iterable[Any], then_net: Net, else_net: Net | None = None
) -> None:
    """Append an `If`. Blobs of the subnets that are in `lexical_scope`, or read first, are those of the net."""
    add_control_op(if_net, "If", cond_blob, lexical_scope, then_net=then_net, else_net=else_net)


def add_while_op(
    while_net: Net,
    cond_blob: Any,
    lexical_scope: Iterable[Any],
    loop_body_net: Net,
    condition_body_net: Net | None = None,
) -> None:
    """Append a `While` to a net; the condition net computes `cond_blob` before each turn, or else the body does."""
    add_control_op(while_net, "While", cond_blob, lexical_scope, loop_net=loop_body_net, cond_net=condition_body_net)


def add_control_op(
    net: Net, op_type: str, condition: Any, lexical_scope: Iterable[Any], **subnets: Net | None
) -> OperatorDef:
    """Append such an operator, and return its message."""
    nets = {argument: subnet.Proto() for argument, subnet in subnets.items() if subnet is not None}
    scope = set(map(str, lexical_scope))
    inputs, outputs = _touched(nets.values(), scope)
    definition = CreateOperator(
        op_type, [BlobReference(condition), *map(BlobReference, inputs)], list(map(BlobReference, outputs)), arg=nets
    )
    computed = {blob for one in nets.get("cond_net", NetDef()).op for blob in one.output}
    net._declare_inputs(BlobReference(name) for name in definition.input if name not in computed)
    net.extend_ops([definition])
    return definition


def add_else_net(net: Net, definition: OperatorDef, lexical_scope: Iterable[Any], else_net: Net) -> None:
    """Give the last operator of a net, an `If` without one, its other branch."""
    proto = net.Proto()
    if not proto.op or proto.op[-1] != definition or any(one.name == "else_net" for one in definition.arg):
        raise Caffe2Error("Else follows an IfNet, with nothing in between")
    [then_net] = [one.n for one in definition.arg if one.name == "then_net"]
    copy = NetDef()
    copy.CopyFrom(then_net)
    del proto.op[-1]
    branch = Net(copy)
    add_control_op(net, "If", definition.input[0], lexical_scope, then_net=branch, else_net=else_net)


def _touched(nets: Iterable[NetDef], scope: set[str]) -> tuple[list[str], list[str]]:
    """The blobs around that subnets read, or might leave as they were, and those that they write."""
    read: dict[str, None] = {}
    written: dict[str, None] = {}
    for net in nets:
        inside: set[str] = set()
        for one in net.op:
            read.update((name, None) for name in one.input if name not in inside and name not in written)
            inside.update(one.output)
        written.update((name, None) for name in inside)
    outputs = [name for name in written if name in scope or name in read]
    return list(dict.fromkeys([*read, *(name for name in outputs if name in scope)])), outputs
