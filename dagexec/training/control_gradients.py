"""The gradients of Caffe2's If, While and Do, whose subnets read and write the blobs of the net around them.

Each is an operator of the same type. That of an If has the gradients of the branches. That of a Do has the gradient
of its net; it takes what its forward Do computed from the stack of workspaces that both name, and therefore reads
blobs that it does not bind as they were behind that run. That of a While runs the gradient of the body, a single Do,
for as long as `HasScope` says that the stack holds something. What loops carry as gradients begins as the gradients
behind the loop, and what they add up, at zero.

An inner net names the blobs around it, so the backward pass renames these in arguments, too (`renamed_in_nets`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from dagexec.core.gradient import (
    OLD_VALUE,
    Gradient,
    GradientOperators,
    GradientRequest,
    SparseGradient,
    fill_like,
    stops_gradients,
)
from dagexec.core.node import node_of
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.subnets import has_subnets
from dagexec.errors import GradientError

BackwardPass = Callable[[NetDef, Mapping[str, str], Collection[str]], Mapping[str, Gradient]]
"""Appends the gradients of losses to a net, as far as there are any; takes the net, the losses, and what is wanted."""

_TYPES = frozenset({"If", "While", "Do"})


def is_block(definition: OperatorDef) -> bool:
    """True for an operator with subnets that work on the blobs around it."""
    return definition.type in _TYPES and has_subnets(node_of(definition))


def passes_no_gradient(definition: OperatorDef) -> bool:
    """True for an operator through which no gradient passes."""
    return stops_gradients(definition.type) and not is_block(definition)


def block_gradient(request: GradientRequest, backward: BackwardPass) -> GradientOperators:
    """The gradient operators of such an operator. Raises GradientError."""
    makers = {"If": _if_gradient, "While": _while_gradient, "Do": _do_gradient}
    return makers[request.definition.type](request, backward)


def renamed_in_nets(definition: OperatorDef, names: Mapping[str, str]) -> None:
    """Rename the blobs around an operator where the nets in its arguments name them; a Do lists them itself."""
    if definition.type == "Do":
        return
    for argument in definition.arg:
        for inner in argument.n.op:
            for blobs in (inner.input, inner.output):
                blobs[:] = [names.get(blob, blob) for blob in blobs]
            renamed_in_nets(inner, names)


def _real(name: str) -> str:
    return name.removesuffix(OLD_VALUE)


def _net(request: GradientRequest, name: str) -> NetDef:
    """A copy of a net in the arguments; an empty one where there is none."""
    copy = NetDef()
    copy.CopyFrom(request.arguments.net(name) or NetDef())
    return copy


def _inputs(request: GradientRequest) -> dict[str, int]:
    """The inputs whose gradients are wanted, by what subnets call them."""
    return {_real(request.definition.input[place]): place for place in sorted(request.wanted)}


def _output_gradients(request: GradientRequest) -> dict[str, str]:
    """The gradients of outputs that have one."""
    return {name: request.dy(place) for place, name in enumerate(request.definition.output) if request.has_dy(place)}


def _dense(net: NetDef, blob: str, gradient: Gradient) -> str:
    """A gradient as one tensor, for which operators are appended where it is sparse."""
    if not isinstance(gradient, SparseGradient):
        return gradient
    net.op.append(op("SparseToDense", [gradient.indices, gradient.values, blob], [f"{gradient.values}_dense"]))
    return f"{gradient.values}_dense"


def _written(operators: Iterable[OperatorDef]) -> set[str]:
    return {name for one in operators for name in one.output}


def _read(operators: Iterable[OperatorDef]) -> list[str]:
    """What operators read that none of them has written before."""
    seen: set[str] = set()
    reads: dict[str, None] = {}
    for one in operators:
        reads.update((name, None) for name in one.input if name not in seen)
        seen.update(one.output)
    return list(reads)


def _copy(source: str, target: str) -> OperatorDef:
    return op("Copy", [source], [target])


def _do_gradient(request: GradientRequest, backward: BackwardPass) -> GradientOperators:
    definition, arguments = request.definition, request.arguments
    outer = [*definition.input[:-1], *definition.output[:-1]]
    names = dict(zip(arguments.strings("inner_blobs"), arguments.ints("outer_blobs_idx"), strict=True))
    inner = {_real(outer[place]): name for name, place in names.items()}
    stack = definition.output[-1]
    net = _net(request, "net")
    forward, writes = len(net.op), _written(net.op)
    of_outputs = {inner[name]: gradient for name, gradient in _output_gradients(request).items() if name != stack}
    seeds = {name: f"{name}_grad" for name in of_outputs if name in writes}
    wanted = {inner[name]: place for name, place in _inputs(request).items() if name in inner}
    gradients = backward(net, seeds, [*wanted])
    bound = {seeds[name]: of_outputs[name] for name in seeds}
    results: dict[int, Gradient] = {}
    made: list[str] = []
    for name, place in wanted.items():
        if name in gradients:
            made.append(f"{name}_grad_out")
            net.op.append(_copy(_dense(net, name, gradients[name]), made[-1]))
            bound[made[-1]] = request.dx(place)
            results[place] = request.dx(place)
        elif name in of_outputs and name not in writes:
            results[place] = of_outputs[name]
    if not made:
        return request.result([], results)
    operators = list(net.op[forward:])
    kept = {_real(name) for name in definition.input} - {*definition.output}
    bound |= {inner[name]: name for name in kept & inner.keys() if inner[name] in _read(operators)}
    outputs = [bound[name] for name in made]
    read = [name for name in dict.fromkeys(bound.values()) if name not in outputs]
    places = {name: place for place, name in enumerate([*read, *outputs])}
    operator = request.plain_operator(
        "Do", [*read, stack], [*outputs, stack],
        net=NetDef(name=f"{net.name}_grad", op=operators),
        inner_blobs=list(bound), outer_blobs_idx=[places[name] for name in bound.values()],
    )  # fmt: skip
    return request.result([operator], results)


def _if_gradient(request: GradientRequest, backward: BackwardPass) -> GradientOperators:
    definition = request.definition
    of_outputs, wanted = _output_gradients(request), _inputs(request)
    branches: dict[str, tuple[NetDef, dict[str, str]]] = {}
    for name in ("then_net", "else_net"):
        net = _net(request, name)
        forward, writes = len(net.op), _written(net.op)
        seeds = {blob: gradient for blob, gradient in of_outputs.items() if blob in writes}
        found = backward(net, seeds, [*wanted])
        gradients = {blob: _dense(net, blob, gradient) for blob, gradient in found.items()}
        own = {blob: f"{definition.output[-1]}:{name}/{blob}" for blob in _written(net.op[forward:]) - writes}
        for one in net.op[forward:]:
            for blobs in (one.input, one.output):
                blobs[:] = [own.get(blob, blob) for blob in blobs]
            renamed_in_nets(one, own)
        passed = {blob: of_outputs[blob] for blob in wanted if blob in of_outputs and blob not in writes}
        results = passed | {blob: own.get(gradient, gradient) for blob, gradient in gradients.items()}
        branches[name] = NetDef(name=f"{net.name}_grad", op=net.op[forward:]), results
    reached = [name for name in wanted if any(name in results for _, results in branches.values())]
    places = {name: wanted[name] for name in reached}
    for net, results in branches.values():
        net.op.extend(
            _copy(results[name], request.dx(place)) if name in results else fill_like(name, request.dx(place), 0.0)
            for name, place in places.items()
        )
    nets = {name: net for name, (net, _) in branches.items()}
    return _block(request, definition.input[0], nets, {place: request.dx(place) for place in places.values()}, [])


def _block(
    request: GradientRequest, condition: str, nets: dict[str, NetDef], results: dict[int, Gradient],
    before: list[OperatorDef], carried: Collection[str] = (),
) -> GradientOperators:  # fmt: skip
    """What such a maker returns: its operator reads and writes what its nets do, of the blobs around it."""
    if not results:
        return request.result([], {})
    definition = request.definition
    outside = {*map(_real, definition.input), *definition.output, *_output_gradients(request).values(), *carried}
    reads = dict.fromkeys(name for net in nets.values() for name in _read(net.op) if name in outside)
    writes = dict.fromkeys(name for net in nets.values() for one in net.op for name in one.output)
    outputs = [name for name in writes if name in outside or name in results.values()]
    inputs = [condition, *(name for name in reads if name != condition)]
    return request.result([*before, request.plain_operator(definition.type, inputs, outputs, **nets)], results)


def _while_gradient(request: GradientRequest, backward: BackwardPass) -> GradientOperators:
    definition = request.definition
    body = _net(request, "loop_net")
    if [one.type for one in body.op] != ["Do"] or not body.op[0].output:
        raise GradientError(
            f"{request.label}: the body of a loop with a gradient must be a single Do, which keeps what it computes"
        )
    stack = body.op[0].output[-1]
    of_outputs, wanted = _output_gradients(request), _inputs(request)
    states = [name for name in definition.output if name != stack and name in _written(body.op)]
    carried = [name for name in of_outputs if name in states]
    while True:  # a state that has a gradient only by another one has it from the turn before on
        net = NetDef()
        net.CopyFrom(body)
        starts = {name: f"{name}_grad_carried" for name in carried}
        found = backward(net, starts, [*dict.fromkeys([*wanted, *states])])
        further = [name for name in states if name in found and name not in carried]
        if not further:
            break
        carried += further
    tested = _written(_net(request, "cond_net").op)
    if changed := sorted(tested.intersection(carried)):
        raise GradientError(f"{request.label}: no gradient passes through the condition, which changes {changed}")
    summed = [name for name in found if name not in states]
    before: list[OperatorDef] = []
    names = {name: request.dx(wanted[name]) if name in wanted else f"{name}_grad_carried" for name in carried}
    names |= {name: request.dx(wanted[name]) for name in summed}
    for name, gradient in names.items():
        start = of_outputs.get(name)
        before.append(_copy(start, gradient) if start is not None else fill_like(name, gradient, 0.0))
    del net.op[0]
    own = {blob: f"{definition.output[-1]}:body/{blob}" for blob in _written(net.op) - {stack}}
    own |= {start: names[name] for name, start in starts.items()}
    for one in net.op:
        for blobs in (one.input, one.output):
            blobs[:] = [own.get(blob, blob) for blob in blobs]
    for name, gradient in names.items():
        result = own.get(str(found[name])) if name in found else None
        if name in summed:
            net.op.append(op("Sum", [gradient, str(result)], [gradient]))
        else:
            net.op.append(fill_like(name, gradient, 0.0) if result is None else _copy(result, gradient))
    net.name = f"{body.name}_grad"
    condition = f"{stack}_is_left"
    test = NetDef(name=f"{net.name}_is_left", op=[op("HasScope", [stack], [condition])])
    results: dict[int, Gradient] = {
        place: names[name] for name, place in wanted.items() if name in names and (name in found or name in states)
    }
    return _block(
        request, condition, {"loop_net": net, "cond_net": test}, results, before, [*names.values(), condition]
    )
