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
    """Append such an operator, and return its message.

    Branches and bodies are a Do each, whose other blobs are in a workspace of its own; a gradient finds them there.
    """
    nets = {argument: subnet.Proto() for argument, subnet in subnets.items() if subnet is not None}
    scope = set(map(str, lexical_scope))
    inputs, outputs = _touched(nets.values(), scope)
    around = scope.union(inputs, outputs)
    stacks: list[str] = []
    for argument in [name for name in nets if name != "cond_net"]:
        stack = net.CreateScope([], net.NextScopedBlob(f"workspace_{op_type.lower()}"))
        nets[argument] = NetDef(name=argument, op=[_do(nets[argument], around, str(stack))])
        stacks.append(str(stack))
    definition = CreateOperator(
        op_type, [BlobReference(condition), *map(BlobReference, (*inputs, *stacks))],
        list(map(BlobReference, (*outputs, *stacks))), arg=nets,
    )  # fmt: skip
    net._declare_inputs(BlobReference(name) for name in definition.input if name not in _tested(definition))
    net.extend_ops([definition])
    return definition


def _do(net: NetDef, around: set[str], stack: str) -> OperatorDef:
    """The operator that runs a net whose blobs are its own, but for those `around` it."""
    inputs, outputs = _touched([net], around)
    places = {name: place for place, name in enumerate((*inputs, *outputs))}
    arguments = {"net": net, "inner_blobs": list(places), "outer_blobs_idx": list(places.values())}
    read, written = ([*map(BlobReference, (*blobs, stack))] for blobs in (inputs, outputs))
    return CreateOperator("Do", read, written, arg=arguments)


def add_else_net(net: Net, definition: OperatorDef, lexical_scope: Iterable[Any], else_net: Net) -> None:
    """Give the last operator of a net, an `If` without one, its other branch."""
    proto = net.Proto()
    if not proto.op or proto.op[-1] != definition or any(one.name == "else_net" for one in definition.arg):
        raise Caffe2Error("Else follows an IfNet, with nothing in between")
    [then_net] = [one.n for one in definition.arg if one.name == "then_net"]
    copy = NetDef()
    copy.CopyFrom(next(one.n for one in then_net.op[0].arg if one.name == "net"))
    condition = definition.input[0]
    del proto.op[-2:]  # with its CreateScope
    add_control_op(net, "If", condition, lexical_scope, then_net=Net(copy), else_net=else_net)


def _tested(definition: OperatorDef) -> set[str]:
    """The condition of a While, where its condition net computes it."""
    tests = [argument.n for argument in definition.arg if argument.name == "cond_net"]
    return {*definition.input[:1]}.intersection(blob for net in tests for one in net.op for blob in one.output)


def _touched(nets: Iterable[NetDef], scope: set[str]) -> tuple[list[str], list[str]]:
    """The blobs around that subnets read, or might leave as they were, and those that they write."""
    read: dict[str, None] = {}
    written: dict[str, None] = {}
    for net in nets:
        inside: set[str] = set()
        for one in net.op:
            inside.update(_tested(one))
            read.update((name, None) for name in one.input if name not in inside and name not in written)
            inside.update(one.output)
        written.update((name, None) for name in inside)
    outputs = [name for name in written if name in scope or name in read]
    return list(dict.fromkeys([*read, *(name for name in outputs if name in scope)])), outputs
