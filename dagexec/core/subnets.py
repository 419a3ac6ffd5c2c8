"""Caffe2's If, While and Do, whose subnets read and write the blobs of the net around them, as operators with bodies.

Bodies (`dagexec.core.body`) have names of their own: they take values and result in values, so that dependencies and
proof see what they touch. `in_own_scopes` brings Caffe2's operators into that form when a message becomes a program.
What a subnet writes and something outside may read is an output. An If whose other branch leaves a blob alone passes on
what it was. A While is its condition net, and then a Loop, which carries what is written. A Do is its operators, under
the names that it binds; its other blobs are called after the stack of workspaces that it works on, so that the Do of a
gradient finds those of its forward Do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node, new_node, node_of, operator_label
from dagexec.core.proto import NetDef
from dagexec.core.recurrent_networks import FORWARD, GRADIENT, lowered
from dagexec.core.scoped_bodies import body_of, copy_of, read_first, written
from dagexec.errors import SchemaError, UnsupportedOperatorError
from dagexec.platform.records import dataclass

ONLY_IN_MESSAGES = frozenset({"While", "Do", "CreateScope", "HasScope", FORWARD, GRADIENT})
"""Operator types that programs do not have."""

_NETS = {"If": ("then_net", "else_net"), "While": ("loop_net", "cond_net")}

Names = Callable[[str], str]


def has_subnets(node: Node) -> bool:
    """True for an operator of Caffe2's whose subnets work on the blobs around it."""
    return node.type in ONLY_IN_MESSAGES or (node.type == "If" and not _has_bodies(node))


def _has_bodies(node: Node) -> bool:
    """True for an If as dagexec has it: it says what its nets capture, or they capture nothing and give its outputs."""
    if "captured" in node.values or len(node.input) != 1:
        return "captured" in node.values
    nets = [node.values.get(name) for name in _NETS["If"]]
    return all(
        isinstance(net, NetDef)
        and not net.external_input
        and len(net.external_output) == len(node.output)
        and (set(net.external_output) != set(node.output) or list(net.external_output) == list(node.output))
        for net in nets
    )


def in_own_scopes(nodes: Sequence[Node], header: NetDef) -> tuple[Node, ...]:
    """The operators of a net, with operators with bodies in place of Caffe2's.

    Raises SchemaError for subnets that are missing or bind blobs wrongly, and UnsupportedOperatorError for the loop of
    a gradient, which Caffe2 runs for as long as a stack has workspaces.
    """
    items = _Reader(header.name).items(nodes, lambda name: name)
    mentioned = _mentioned(items)
    mentioned.update({*header.external_input, *header.external_output})
    return tuple(_Lowering(mentioned).lowered(items, set(header.external_input)))


@dataclass(frozen=True, eq=False)
class _Block:
    """An If or a While with what its subnets do, in the order of `_NETS`."""

    node: Node
    nets: tuple[tuple[Node | _Block, ...], ...]


_Items = Iterable["Node | _Block"]


def _mentioned(items: _Items) -> Counter[str]:
    """How often operators, inner ones included, name each blob."""
    found: Counter[str] = Counter()
    for item in items:
        node = item.node if isinstance(item, _Block) else item
        found.update((*node.input, *node.output, *node.control_input))
        if isinstance(item, _Block):
            found.update(_mentioned(inner for net in item.nets for inner in net))
    return found


class _Reader:
    """Reads operators and those of their subnets; a Do becomes what its net does."""

    def __init__(self, net: str) -> None:
        self._net = net
        self._depths: Counter[str] = Counter()

    def items(self, nodes: Iterable[Node], names: Names) -> tuple[Node | _Block, ...]:
        """The operators with blobs renamed."""
        found: list[Node | _Block] = []
        for index, node in enumerate(nodes):
            if node.type == "CreateScope":
                continue
            if node.type == "HasScope":
                raise UnsupportedOperatorError(
                    f"{operator_label(node, index, self._net)}: a loop over what Caffe2 kept of a forward loop is not "
                    f"supported; add the gradients with dagexec"
                )
            renamed = node.changed(
                inputs=map(names, node.input),
                outputs=map(names, node.output),
                control_input=map(names, node.control_input),
            )
            if node.type in (FORWARD, GRADIENT):
                found += self.items(lowered(node, operator_label(node, index, self._net)), names)
            elif node.type == "Do":
                found += self._done(node, operator_label(node, index, self._net), names)
            elif has_subnets(node):
                label = operator_label(node, index, self._net)
                nets = [self.items(_operators(node, name, label), names) for name in _NETS[node.type]]
                found.append(_Block(renamed, tuple(nets)))
            else:
                found.append(renamed)
        return tuple(found)

    def _done(self, node: Node, label: str, names: Names) -> tuple[Node | _Block, ...]:
        """What a Do does. Each forward Do puts a workspace on the stack, and that of a gradient takes it away."""
        arguments = node.arguments(label)
        inner, places = arguments.strings("inner_blobs"), arguments.ints("outer_blobs_idx")
        outer = [*node.input[:-1], *node.output[:-1]]
        if not node.input or len(inner) != len(places) or any(not 0 <= place < len(outer) for place in places):
            raise SchemaError(
                f"{label}: expected an index of an input or output, the last ones left out, for each inner blob; found "
                f"{inner} and {places}"
            )
        bound = {name: names(outer[place]) for name, place in zip(inner, places, strict=True)}
        stack = names(node.input[-1])
        if not node.is_gradient_op and not (arguments.bool("reuse_workspace") and self._depths[stack]):
            self._depths[stack] += 1
        prefix = f"{stack}:{self._depths[stack]}/"
        items = self.items(_operators(node, "net", label), lambda name: bound.get(name) or prefix + name)
        if node.is_gradient_op:
            self._depths[stack] -= 1
        return items


def _operators(node: Node, argument: str, label: str) -> list[Node]:
    """The operators of a subnet; without one, of else_net and cond_net, none."""
    net = node.values.get(argument)
    if net is None and argument in ("else_net", "cond_net"):
        return []
    if not isinstance(net, NetDef):
        raise SchemaError(f"{label}: argument {argument!r}, the net it runs, is missing")
    nodes = [node_of(one, operator_label(one, index, net.name)) for index, one in enumerate(net.op)]
    if net.HasField("device_option"):
        nodes = [one if one.device_option else one.changed(device_option=net.device_option) for one in nodes]
    return nodes


class _Lowering:
    """Makes operators with bodies of blocks; `mentioned` is how often the whole net names each blob."""

    def __init__(self, mentioned: Counter[str]) -> None:
        self._mentioned = mentioned
        self._numbers = count()

    def lowered(self, items: _Items, available: set[str]) -> list[Node]:
        """The operators; `available` are blobs that exist before."""
        made: list[Node] = []
        exists = set(available)
        for item in items:
            if isinstance(item, _Block):
                exists.update(item.node.input)
                nodes = self._if(item, exists) if item.node.type == "If" else self._while(item, exists)
            else:
                nodes = [item]
            made += nodes
            exists.update(name for node in nodes for name in (*node.input, *node.output))
        return made

    def _if(self, block: _Block, exists: set[str]) -> list[Node]:
        branches = [self.lowered(net, exists) for net in block.nets]
        writes = [written(nodes) for nodes in branches]
        reads = dict.fromkeys(name for nodes in branches for name in read_first(nodes))
        results = self._seen_outside(block, dict.fromkeys(name for names in writes for name in names), reads)
        for nodes, names in zip(branches, writes, strict=True):
            for name in results:
                if name not in names and (name in exists or name in reads):
                    reads.setdefault(name)  # passed on
                elif name not in names:
                    nodes.append(_nothing(name))
        before = self._befores([block.node.input[0], *reads], results)
        inside = {name: f"{name}:in" if name in results else name for name in reads}
        nets = {
            argument: body_of(argument, nodes, inside, [], list(results))
            for argument, nodes in zip(_NETS["If"], branches, strict=True)
        }
        made = _with(
            block.node,
            "If",
            [before.get(name, name) for name in (block.node.input[0], *reads)],
            results,
            {**nets, "captured": [inside[name] for name in reads]},
        )
        return [*(copy_of(name, old) for name, old in before.items()), made]

    def _while(self, block: _Block, exists: set[str]) -> list[Node]:
        condition = block.node.input[0]
        loop, test = (self.lowered(net, exists) for net in block.nets)
        body = [*loop, *test]
        reads = read_first(body)
        states = self._seen_outside(block, written(body), {**reads, condition: None})
        exists = exists.union(read_first(test), written(test))
        before = self._befores(states, states)
        captured = [name for name in {**reads, condition: None} if name not in states]
        inside = {name: f"{name}:in" for name in states} | {name: name for name in captured}
        number = next(self._numbers)
        given = [f"{condition}:iteration{number}", f"{condition}:given{number}", *(inside[name] for name in states)]
        made = _with(
            block.node,
            "Loop",
            [before.get(condition, condition), *before.values(), *captured],
            states,
            {
                "loop_net": body_of("loop_net", body, inside, given, [condition, *states]),
                "condition": True,
                "captured": captured,
            },
        )
        known = exists.union(reads)
        starts = [copy_of(name, old) if name in known else _nothing(old) for name, old in before.items()]
        return [*test, *starts, made]

    def _seen_outside(self, block: _Block, writes: Iterable[str], reads: Mapping[str, None]) -> dict[str, None]:
        """What of it is read elsewhere, or when the block is executed again, those that the operator names first."""
        own = _mentioned(inner for net in block.nets for inner in net)
        seen = [name for name in writes if self._mentioned[name] > own[name] or name in reads]
        return dict.fromkeys(sorted(seen, key=lambda name: name not in block.node.output))

    def _befores(self, names: Iterable[str], results: Mapping[str, None]) -> dict[str, str]:
        """Other names for what blobs hold before the operator that overwrites them."""
        return {name: f"{name}:before{next(self._numbers)}" for name in dict.fromkeys(names) if name in results}


def _with(
    node: Node, op_type: str, inputs: Iterable[str], outputs: Iterable[str], arg: dict[str, ArgumentValue]
) -> Node:
    return node.changed(op_type=op_type, inputs=inputs, outputs=outputs, values=new_node(op_type, arg=arg).values)


def _nothing(name: str) -> Node:
    """A blob that nothing has written: no elements."""
    return new_node("NoOp", [], [name])
