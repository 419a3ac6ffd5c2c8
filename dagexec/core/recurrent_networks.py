"""Caffe2's RecurrentNetwork, whose step net runs once a step of a sequence, and its gradient, as Scans.

A state has a blob of its own in the net, with the values before the first step and those behind each step; outputs are
parts of it (`alias_src`). The step net takes row t of the sequence and rows from t on of that blob, and gives the row
behind those that there were (`link_internal`). The gradient goes through the steps from the last to the first. It
computes each step anew from the state before it, so that nothing but states is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf import text_format

from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.core.node import Node, new_node, node_of
from dagexec.core.proto import NetDef, TensorProto
from dagexec.core.scoped_bodies import body_of, number, read_first
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass

_INT32 = TensorProto.INT32
FORWARD, GRADIENT = "RecurrentNetwork", "RecurrentNetworkGradient"


@dataclass(frozen=True)
class Link:
    """A blob of the step net that is `window` rows of a blob outside, from so many rows behind that of the step on."""

    internal: str
    external: str
    offset: int
    window: int


@dataclass(frozen=True)
class State:
    """What goes from step to step.

    Attributes:
        name: of the blob with the values before and behind all steps.
        initial: the input with the first of them.
        length: how many first values there are.
        read: what the step net calls rows of it.
        after: what the step net calls the row that it gives.
    """

    name: str
    initial: int
    length: int
    read: tuple[Link, ...]
    after: str

    @property
    def before(self) -> str:
        """What the step net calls the value before a step, where that is all it takes."""
        return self.read[0].internal if self.read else f"{self.after}:before"

    @property
    def is_plain(self) -> bool:
        """True where the step net takes nothing but the value before."""
        return self.length == 1 and [(one.offset, one.window) for one in self.read] == [(0, 1)]

    @property
    def rows(self) -> str:
        """What of it goes from step to step: the last rows, as many as there were at first."""
        return self.before if self.is_plain else f"{self.after}:rows"

    @property
    def next_rows(self) -> str:
        """What goes to the next step."""
        return self.after if self.length == 1 and not self.is_plain else f"{self.after}:next"

    @property
    def next_row(self) -> str:
        """The row that the step gives, with the axes of the one before."""
        return f"{self.after}:next" if self.is_plain else self.after

    def links(self, *, current: bool) -> list[Node]:
        """The rows that the step net takes: those with the one that it gives, or else the others."""
        if self.is_plain:
            return []
        read = [one for one in self.read if (one.offset + one.window > self.length) == current]
        rows = f"{self.after}:all" if current else self.rows
        joined = [_op("Concat", [self.rows, self.after], [rows, f"{rows}:dims"], axis=0)] if current else []
        joined += [_op("Slice", [rows], [f"{self.after}:next"], starts=[1], ends=[-1])] if current else []
        return [
            *joined,
            *(
                _op("Slice", [rows], [one.internal], starts=[one.offset], ends=[one.offset + one.window])
                for one in read
            ),
        ]


@dataclass(frozen=True)
class Network:
    """The arguments of the operator.

    Attributes:
        label: the operator in messages.
        states: what goes from step to step.
        rows: the links of sequences, each with the place of its input.
        step, timestep: the step net, and what it calls the number of the step.
        aliases: outputs, by the state that they are of, and how many rows behind its first they begin.
    """

    label: str
    states: tuple[State, ...]
    rows: tuple[tuple[Link, int], ...]
    step: NetDef
    timestep: str
    aliases: tuple[tuple[str, str, int], ...]

    @classmethod
    def of(cls, arguments: Arguments, inputs: Sequence[str], label: str) -> Network:
        """Read them. Raises SchemaError for links that do not lead from rows to the row behind them."""
        names, places = arguments.strings("recurrent_states"), arguments.ints("initial_recurrent_state_ids")
        links = links_of(arguments, "link")
        if len(names) != len(places) or any(not 0 <= place < len(inputs) for place in places):
            raise SchemaError(f"{label}: expected an input for each of the states {names}, found {places}")
        step = net_of(arguments, "step_net")
        written = {blob for one in step.op for blob in one.output}
        states = []
        for name, place in zip(names, places, strict=True):
            of_state = [link for link in links if link.external == name]
            given = [link for link in of_state if link.internal in written]
            length = given[0].offset if len(given) == 1 else 0
            read = tuple(link for link in of_state if link not in given)
            if length < 1 or given[0].window != 1 or any(link.offset + link.window > length + 1 for link in read):
                raise SchemaError(
                    f"{label}: the step must give one row of state {name!r}, behind those that it reads; it is linked "
                    f"with offsets {[link.offset for link in of_state]}"
                )
            states.append(State(name, place, length, read, given[0].internal))
        rows = [link for link in links if link.external not in names]
        for link in rows:
            if link.external not in inputs or link.offset or link.window != 1:
                raise SchemaError(f"{label}: {link.external!r} must be an input that is linked with offset 0, window 1")
        lists = arguments.strings("alias_src"), arguments.strings("alias_dst"), arguments.ints("alias_offset")
        return cls(
            label,
            tuple(states),
            tuple((link, list(inputs).index(link.external)) for link in rows),
            step,
            arguments.string("timestep", "timestep"),
            tuple(zip(*lists, strict=True)),
        )

    def last(self, output: str) -> bool:
        """True for an output that is the state behind the last step; others are those behind all steps."""
        offsets = {offset for _, name, offset in self.aliases if name == output}
        if offsets not in ({-1}, {1}):
            raise SchemaError(f"{self.label}: a gradient of output {output!r} must be of all steps, or of the last")
        return offsets == {-1}

    def start(self) -> list[Node]:
        """The operators of a step, with the rows as the step net takes them."""
        made = [_expanded(f"{link.internal}:row", link.internal) for link, _ in self.rows]
        made += [link for state in self.states for link in state.links(current=False)]
        pending = {state.after: state for state in self.states}
        for one in self.step.op:
            made.append(node_of(one))
            made += [link for blob in one.output if blob in pending for link in pending.pop(blob).links(current=True)]
        return made


def links_of(arguments: Arguments, prefix: str) -> list[Link]:
    """The links that arguments of such names say. Raises SchemaError where there are more names than offsets."""
    internal, external = arguments.strings(f"{prefix}_internal"), arguments.strings(f"{prefix}_external")
    offsets = arguments.ints(f"{prefix}_offset")
    if not len(internal) == len(external) == len(offsets):
        raise SchemaError(
            f"{FORWARD}: {prefix}_internal, {prefix}_external and {prefix}_offset are not as long as one another"
        )
    windows = arguments.ints(f"{prefix}_window") or [1] * len(offsets)
    return [Link(*one) for one in zip(internal, external, offsets, windows, strict=True)]


def net_of(arguments: Arguments, name: str) -> NetDef:
    """A net in an argument, be it as text."""
    if isinstance(arguments.values.get(name), bytes):
        return text_format.Parse(arguments.string(name, ""), NetDef())
    net = arguments.net(name)
    if net is None:
        raise SchemaError(f"{FORWARD}: argument {name!r}, the net it runs, is missing")
    return net


def lowered(node: Node, label: str) -> list[Node]:
    """The operators that do what such an operator does."""
    return _forward(node, label) if node.type == FORWARD else _backward(node, label)


def _forward(node: Node, label: str) -> list[Node]:
    network = Network.of(node.arguments(label), node.input, label)
    scratch, step = node.output[-1], network.timestep
    sequence = node.input[network.rows[0][1] if network.rows else 0]
    starts = [*_batch(sequence, f"{scratch}:batch"), number(f"{scratch}:first", 0)]
    starts += [
        _op("Expand", [node.input[state.initial], f"{scratch}:batch"], [f"{state.name}:initial"])
        if state.length == 1
        else _op("Copy", [node.input[state.initial]], [f"{state.name}:initial"])
        for state in network.states
    ]
    inner = [*network.start(), number(f"{step}:one", 1), _op("Add", [step, f"{step}:one"], [f"{step}:next"])]
    inner += [
        _op("ResizeLike", [state.after, state.before], [state.next_row]) for state in network.states if state.is_plain
    ]
    inner += [_squeezed(state.next_row, f"{state.after}:row") for state in network.states]
    scanned = network.rows or ((Link(f"{sequence}:step", sequence, 0, 1), 0),)
    given = [*(state.rows for state in network.states), step, *(f"{link.internal}:row" for link, _ in scanned)]
    results = [*(state.next_rows for state in network.states), f"{step}:next"]
    stacked = [f"{state.after}:row" for state in network.states]
    finals = [f"{state.name}:final" for state in network.states]
    rows = [f"{state.name}:rows" for state in network.states]
    scan = _scan(
        [*(f"{state.name}:initial" for state in network.states), f"{scratch}:first"],
        [node.input[place] for _, place in scanned],
        [*finals, f"{scratch}:number", *rows],
        inner, given, [*results, *stacked],
    )  # fmt: skip
    joined = [
        _op("Concat", [f"{state.name}:initial", f"{state.name}:rows"], [state.name, f"{state.name}:dims"], axis=0)
        for state in network.states
    ]
    outputs = [
        _op("Slice", [source], [target], starts=[offset if offset >= 0 else offset - 1], ends=[-1])
        for source, target, offset in network.aliases
    ]
    return [*starts, scan, *joined, *outputs, _op("NoOp", [], [scratch])]


def _backward(node: Node, label: str) -> list[Node]:
    arguments = node.arguments(label)
    with_grads = arguments.ints("outputs_with_grads")
    aliases = arguments.strings("alias_dst")
    outputs = {*aliases, *arguments.strings("recurrent_states")}
    own = list(node.input[len(with_grads) : -1])
    own = own[: next((place for place, name in enumerate(own) if name in outputs), len(own))]
    names = _with_names(arguments, own)
    network = Network.of(arguments, names, label)
    if not all(state.is_plain for state in network.states) or not network.rows:
        raise SchemaError(f"{label}: a step with a gradient must read a row of a sequence, and of each state one alone")
    step = network.timestep
    grads = dict(zip((aliases[place] for place in with_grads), node.input, strict=False))
    links = links_of(arguments, "backward_link")
    places = arguments.ints("param")
    parameters = dict(
        zip(arguments.strings("param_grads") or [f"{own[place]}_grad" for place in places], places, strict=True)
    )
    before: list[Node] = []
    sums: list[Node] = []
    carried: list[tuple[str, str, str]] = []  # the start, and what a step is given and gives
    scanned: list[tuple[str, str]] = []
    produced = {blob for one in net_of(arguments, "backward_step_net").op for blob in one.output}
    for state in network.states:
        found = {link.offset: link.internal for link in links if link.external == f"{state.name}_grad"}
        behind, first = found.get(1, f"{state.after}_grad"), found.get(0, f"{state.before}_grad")
        start, given = f"{state.name}_grad:last", f"{behind}:given"
        before.append(_op("Slice", [state.name], [f"{state.name}:one"], starts=[0], ends=[1]))
        before.append(_zeros(f"{state.name}:one", f"{start}:0"))
        terms = [
            f"{start}:0",
            *(one for name, one in grads.items() if _is_of(network, name, state) and network.last(name)),
        ]
        before.append(_op("Sum", terms, [start]))
        every = [one for name, one in grads.items() if _is_of(network, name, state) and not network.last(name)]
        rows = [f"{behind}:row{index}" for index in range(len(every))]
        sums += [_expanded(row, f"{row}:step") for row in rows]
        sums.append(_op("Sum", [given, *(f"{row}:step" for row in rows)], [behind]))
        if first not in produced:
            sums.append(_zeros(given, first))
        carried.append((start, given, first))
        scanned += zip(every, rows, strict=True)
        before.append(_op("Slice", [state.name], [f"{state.name}:before"], starts=[0], ends=[-2]))
        scanned.append((f"{state.name}:before", f"{state.before}:row"))
    for name, place in parameters.items():
        before.append(_zeros(own[place], f"{own[place]}:zero"))
        carried.append((f"{own[place]}:zero", f"{name}:given", f"{name}:sum"))
    scanned += [(own[place], f"{link.internal}:row") for link, place in network.rows]
    turn = f"{node.output[0]}:number"
    before += [
        _op("Shape", [own[network.rows[0][1]]], [f"{turn}:sizes"]),
        _op("Slice", [f"{turn}:sizes"], [f"{turn}:steps"], starts=[0], ends=[1]),
        _op("Cast", [f"{turn}:steps"], [f"{turn}:int32"], to=_INT32),
        number(f"{turn}:back", -1),
        _op("Add", [f"{turn}:int32", f"{turn}:back"], [turn]),
    ]
    carried.append((turn, step, f"{step}:next"))
    inner = [_expanded(f"{state.before}:row", state.before) for state in network.states]
    inner += [*network.start(), *sums, *map(node_of, net_of(arguments, "backward_step_net").op)]
    inner += [_op("Sum", [f"{name}:given", name], [f"{name}:sum"]) for name in parameters]
    inner += [number(f"{step}:back", -1), _op("Add", [step, f"{step}:back"], [f"{step}:next"])]
    of_rows = []
    for link, _ in network.rows:
        [grad] = [one.internal for one in links if one.external == f"{link.external}_grad"] or [f"{link.internal}_grad"]
        inner.append(_squeezed(grad, f"{grad}:row"))
        of_rows.append(f"{grad}:row")
    made = [f"{node.output[0]}:sum{index}" for index in range(len(carried))]
    stacked = list(node.output[: len(of_rows)])
    scan = _scan(
        [start for start, _, _ in carried],
        [outside for outside, _ in scanned],
        [*made, *stacked],
        inner,
        [*(given for _, given, _ in carried), *(inside for _, inside in scanned)],
        [*(result for _, _, result in carried), *of_rows],
        scan_input_directions=[1] * len(scanned),
        scan_output_directions=[1] * len(of_rows),
    )
    behind_rows = list(node.output[len(of_rows) :])
    of_states = behind_rows[len(parameters) :]
    after = [
        _op("Copy", [source], [target])
        for source, target in zip(made[len(network.states) : -1], behind_rows[: len(parameters)], strict=True)
    ]
    after += [
        _op("SumReduceLike", [source, own[state.initial]], [target])
        for state, source, target in zip(network.states, made, of_states, strict=False)
    ]
    return [*before, scan, *after]


def _with_names(arguments: Arguments, own: Sequence[str]) -> list[str]:
    """The inputs under the names that links have for them: those of the forward operator."""
    linked = [link.external for link in links_of(arguments, "link")]
    states = arguments.strings("recurrent_states")
    sequences = [name for name in dict.fromkeys(linked) if name not in states and name not in own]
    return [sequences.pop(0) if sequences and index == 0 else name for index, name in enumerate(own)]


def _is_of(network: Network, output: str, state: State) -> bool:
    return any(source == state.name and name == output for source, name, _ in network.aliases)


def _batch(sequence: str, shape: str) -> list[Node]:
    """The shape that a first row of a state is brought to; it may have no axis of steps, or be that of all examples."""
    return [
        _op("Shape", [sequence], [f"{shape}:sequence"]),
        _op("Slice", [f"{shape}:sequence"], [f"{shape}:size"], starts=[1], ends=[2]),
        _op("GivenTensorInt64Fill", [], [f"{shape}:one"], shape=[1], values=[1]),
        _op("Concat", [f"{shape}:one", f"{shape}:size", f"{shape}:one"], [shape, f"{shape}:dims"], axis=0),
    ]


def _scan(
    states: Sequence[str], scanned: Sequence[str], outputs: Sequence[str], inner: list[Node], given: Sequence[str],
    results: Sequence[str], **arguments: ArgumentValue,
) -> Node:  # fmt: skip
    captured = [name for name in read_first(inner) if name not in given]
    inside = {name: f"{name}:in" if any(name in one.output for one in inner) else name for name in (*given, *captured)}
    body = body_of("scan_net", inner, inside, [inside[name] for name in given], results)
    return _op(
        "Scan", [*states, *scanned, *captured], outputs, scan_net=body, num_scan_inputs=len(scanned),
        captured=[inside[name] for name in captured], **arguments,
    )  # fmt: skip


def _op(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: ArgumentValue) -> Node:
    return new_node(op_type, inputs, outputs, arg=arguments)


def _expanded(source: str, target: str) -> Node:
    return _op("ExpandDims", [source], [target], dims=[0])


def _squeezed(source: str, target: str) -> Node:
    return _op("Squeeze", [source], [target], dims=[0])


def _zeros(source: str, target: str) -> Node:
    """Zeros in the shape of another blob."""
    return _op("ConstantFill", [source], [target], value=0.0, input_type=1)
