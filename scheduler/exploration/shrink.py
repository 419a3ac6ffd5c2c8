"""Shrinking: from a net that fails to a smaller one that still fails.

Delta debugging over the operators ("Simplifying and Isolating Failure-Inducing Input", Zeller and Hildebrandt, IEEE
TSE 2002). Operators are removed in chunks, then one by one, either with all that depends on them, or so that their
readers read their first input instead (or one input less). Only nets that `build_graph` accepts are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from dagexec.core.graph import build_graph
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import DagexecError

Fails = Callable[[NetDef], bool]


def shrink(net: NetDef, fails: Fails, limit: int = 1000) -> NetDef:
    """A net of fewer operators for which `fails` is true too, though not without any further chunk of neighbors.

    `fails` is called at most `limit` times; then the smallest net so far is the result. Raises ValueError when
    `fails(net)` is false.
    """
    calls = 0

    def still_fails(candidate: NetDef) -> bool:
        nonlocal calls
        if calls >= limit or not _is_valid(candidate, external):
            return False
        calls += 1
        return fails(candidate)

    external = _read_from_outside(net)
    if not fails(net):
        raise ValueError(f"net {net.name!r} does not fail, so there is nothing to shrink")
    chunk = max(1, len(net.op) // 2)
    changed = False  # since the largest chunks were tried
    while True:
        smaller = next((candidate for candidate in _candidates(net, chunk) if still_fails(candidate)), None)
        if smaller is not None:
            net, changed = smaller, True
            chunk = min(chunk, max(1, len(net.op) // 2))
        elif chunk > 1:
            chunk //= 2
        elif changed:
            chunk, changed = max(1, len(net.op) // 2), False
        else:
            return net


def _candidates(net: NetDef, chunk: int) -> Iterator[NetDef]:
    """Nets without `chunk` neighboring operators; the last ones first, as least depends on them."""
    count = len(net.op)
    for end in range(count, 0, -chunk):
        gone = frozenset(range(max(0, end - chunk), end))
        for candidate in (_without_dependents(net, gone), _bypassed(net, gone)):
            if 0 < len(candidate.op) < count:
                yield candidate


def _without_dependents(net: NetDef, gone: Collection[int]) -> NetDef:
    """Without the operators `gone`, and those that read what is no longer written."""
    missing: set[str] = set()
    operators = []
    for index, operator in enumerate(net.op):
        reads = {*operator.input, *operator.control_input}
        if index in gone or reads & missing:
            missing.update(set(operator.output) - reads | (missing & set(operator.output)))
        else:
            missing.difference_update(operator.output)
            operators.append(operator)
    return _net_of(net, operators)


def _bypassed(net: NetDef, gone: Collection[int]) -> NetDef:
    """Without the operators `gone`, whose readers read their first input instead, or nothing if they have none."""
    stands_for: dict[str, str | None] = {}
    operators = []
    for index, operator in enumerate(net.op):
        inputs = _renamed(operator.input, stands_for)
        if index in gone:
            for name in operator.output:
                if name in inputs[:1]:
                    stands_for.pop(name, None)
                else:
                    stands_for[name] = inputs[0] if inputs else None
            continue
        copy = OperatorDef()
        copy.CopyFrom(operator)
        del copy.input[:], copy.control_input[:]
        copy.input.extend(inputs)
        copy.control_input.extend(dict.fromkeys(_renamed(operator.control_input, stands_for)))
        for name in copy.output:
            stands_for.pop(name, None)
        operators.append(copy)
    return _net_of(net, operators)


def _renamed(names: Iterable[str], stands_for: Mapping[str, str | None]) -> list[str]:
    return [new for name in names if (new := stands_for.get(name, name)) is not None]


def _net_of(net: NetDef, operators: list[OperatorDef]) -> NetDef:
    """`net` with these operators, without external blobs that none of them uses."""
    smaller = NetDef()
    smaller.CopyFrom(net)
    del smaller.op[:], smaller.external_input[:], smaller.external_output[:]
    smaller.op.extend(operators)
    read = {name for operator in operators for name in (*operator.input, *operator.control_input)}
    written = {name for operator in operators for name in operator.output}
    smaller.external_input.extend(name for name in net.external_input if name in read)
    smaller.external_output.extend(name for name in net.external_output if name in written)
    return smaller


def _read_from_outside(net: NetDef) -> frozenset[str]:
    """Blobs that are read before any operator writes them."""
    written: set[str] = set()
    outside: set[str] = set()
    for operator in net.op:
        outside.update(name for name in (*operator.input, *operator.control_input) if name not in written)
        written.update(operator.output)
    return frozenset(outside)


def _is_valid(net: NetDef, external: frozenset[str]) -> bool:
    if not _read_from_outside(net) <= external:
        return False
    try:
        build_graph(net, external.__contains__)
    except DagexecError:
        return False
    return True
