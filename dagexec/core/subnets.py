"""Caffe2's If, While and Do, whose subnets read and write the blobs of the net around them, as operators with bodies.

Bodies (`dagexec.core.body`) have names of their own: they take values and result in values, so that dependencies and
proof see what they touch. `in_own_scopes` brings Caffe2's operators into that form when a message becomes a program.
What a subnet writes and something outside may read is an output. An If whose other branch leaves a blob alone passes on
what it was. A While is its condition net, and then a Loop, which carries what is written. A Do is its operators, under
the names that it binds; its other blobs are called after the stack of workspaces that it works on, so that the Do of a
gradient finds those of its forward Do. In a loop a stack is a sequence for each blob that the Do of a gradient reads:
the forward Do appends what the blob holds behind it, and the Do of the gradient takes away the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node, new_node, node_of, operator_label
from dagexec.core.proto import NetDef, TensorProto
from dagexec.core.recurrent_networks import FORWARD, GRADIENT, lowered
from dagexec.core.scoped_bodies import STACK, body_of, copy_of, number, read_first, written
from dagexec.errors import SchemaError, UnsupportedOperatorError
from dagexec.platform.records import dataclass

ONLY_IN_MESSAGES = frozenset({"While", "Do", "CreateScope", "HasScope", FORWARD, GRADIENT})
"""Operator types that programs do not have."""

_IN_LOOP, _IN_GRADIENT = ":loop/", ":back/"
"""Between the names of a stack and of a blob of a Do in a loop, and of that of its gradient."""

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
    a gradient whose forward loop is in another net.
    """
    kept: dict[str, list[str]] = {}
    while True:  # what an inner loop keeps, an outer one keeps for it
        reader = _Reader(header.name, kept)
        items = reader.items(nodes, lambda name: name)
        if reader.kept() == kept:
            break
        kept = reader.kept()
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

    def __init__(self, net: str, kept: Mapping[str, Sequence[str]]) -> None:
        """`kept` are the blobs, as their Do names them, that a stack in a loop keeps for the Do of a gradient."""
        self._net = net
        self._kept = kept
        self._depths: Counter[str] = Counter()
        self._bound: dict[str, dict[str, str]] = {}
        self._loops = 0
        self._names: dict[str, dict[str, None]] = {}
        self._names_of_gradients: dict[str, set[str]] = {}

    def kept(self) -> dict[str, list[str]]:
        """What stacks in loops are to keep: something, so that it can be told how often."""
        return {
            stack: sorted(names & self._names[stack].keys()) or list(self._names[stack])[:1]
            for stack, names in self._names_of_gradients.items()
        }

    def items(self, nodes: Iterable[Node], names: Names) -> tuple[Node | _Block, ...]:
        """The operators with blobs renamed."""
        found: list[Node | _Block] = []
        for index, node in enumerate(nodes):
            if node.type == "CreateScope":
                stack = names(node.output[0])
                found += [
                    new_node("SequenceEmpty", [], [f"{stack}{STACK}{name}"]) for name in self._kept.get(stack, ())
                ]
                continue
            if node.type == "HasScope":
                found += self._is_left(node, index, names)
                continue
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
                self._loops += node.type == "While"
                nets = [self.items(_operators(node, name, label), names) for name in _NETS[node.type]]
                self._loops -= node.type == "While"
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
        if _forward(stack) in self._names or (self._loops and not node.is_gradient_op):
            return self._done_in_loop(node, label, stack, bound)
        if not node.is_gradient_op and not (arguments.bool("reuse_workspace") and self._depths[stack]):
            self._depths[stack] += 1
        prefix = f"{stack}:{self._depths[stack]}/"
        bound = self._bound.setdefault(prefix, {}) | bound
        self._bound[prefix] = bound
        items = self.items(_operators(node, "net", label), lambda name: bound.get(name) or prefix + name)
        if node.is_gradient_op:
            self._depths[stack] -= 1
        return items

    def _done_in_loop(self, node: Node, label: str, stack: str, bound: dict[str, str]) -> tuple[Node | _Block, ...]:
        """What a Do does, of which a stack keeps blobs each time, or with what it has kept the Do of a gradient."""
        forward = _forward(stack)
        prefix = f"{stack}{_IN_GRADIENT if node.is_gradient_op else _IN_LOOP}"

        def renamed(name: str) -> str:
            return bound.get(name) or prefix + name

        items = self.items(_operators(node, "net", label), renamed)
        own = {name.removeprefix(prefix) for name in _mentioned(items) if name.startswith(prefix)}
        own = {name for name in own if _IN_LOOP not in name and _forward(prefix + name) not in self._names}
        kept = {name: f"{stack}{STACK}{name}" for name in self._kept.get(forward, ())}
        if not node.is_gradient_op:
            self._names.setdefault(stack, {}).update(dict.fromkeys([*bound, *own]))
            return (*items, *(new_node("SequenceInsert", [one, renamed(name)], [one]) for name, one in kept.items()))
        self._names_of_gradients.setdefault(forward, set()).update(own)
        last = number(f"{stack}:last", -1)
        taken = [
            step
            for name, one in kept.items()
            for step in (
                new_node("SequenceAt", [one, last.output[0]], [prefix + name]),
                new_node("SequenceErase", [one], [one]),
            )
        ]
        return (last, *taken, *items)

    def _is_left(self, node: Node, index: int, names: Names) -> list[Node]:
        """Whether a stack holds anything."""
        stack, result = names(node.input[0]), names(node.output[0])
        if _forward(stack) not in self._names:
            raise UnsupportedOperatorError(
                f"{operator_label(node, index, self._net)}: no loop of this net has filled the stack; have the "
                f"operators of the gradient in the net of the loop"
            )
        kept = [f"{stack}{STACK}{name}" for name in self._kept.get(_forward(stack), ())[:1]]
        length = new_node("SequenceLength", kept, [f"{result}:length"])
        return [length, new_node("Cast", length.output, [result], arg={"to": TensorProto.BOOL})] if kept else []


def _forward(stack: str) -> str:
    """What the forward net calls a stack."""
    return stack.replace(_IN_GRADIENT, _IN_LOOP)


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
