"""Replaying a recording of Caffe2 in dagexec: the operator or net, Caffe2's gradient operators, and dagexec's own.

A case has up to three parts: `run`, `gradient` for the operators that Caffe2's maker made, `maker` for those that
dagexec's makes. `python -m tests.caffe2_replay [CASE...]` prints what differs, and counts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.gradient import Gradient, SparseGradient, gradient
from dagexec.core.registry import is_registered
from dagexec.core.subnets import ONLY_IN_MESSAGES
from dagexec.errors import DagexecError
from tests.caffe2_cases import Array, Arrays, Case, GradientCase, recorded_cases

TOLERANCES = {"f2": (1e-2, 1e-3)}
USUAL_TOLERANCE = (1e-4, 1e-5)
"""Relative and absolute: the fixture's README says that they hold for all that agrees."""

Adjust = Callable[[OperatorDef], OperatorDef]


@dataclass(frozen=True)
class Outcome:
    """How one part of a case went.

    Attributes:
        part: the case's name, and the part's.
        missing: the operator types that dagexec lacks; with one, nothing was run.
        problem: what dagexec does otherwise than Caffe2; "" when they agree.
    """

    part: str
    missing: tuple[str, ...] = ()
    problem: str = ""

    @property
    def agrees(self) -> bool:
        """True when dagexec does what Caffe2 does."""
        return not self.missing and not self.problem


def replay(case: Case, adjust: Adjust = lambda definition: definition) -> list[Outcome]:
    """What comes of the parts of the case. `adjust` changes every operator first: its engine, say."""
    forward = _types(case.net.op)
    found = [_outcome(f"{case.name} run", forward, lambda: _problem_of_run(case, adjust))]
    if case.gradients:
        made = _types(definition for recorded in case.gradients for definition in recorded.operators)
        problem = partial(_first, case, _problem_of_gradient, adjust)
        found.append(_outcome(f"{case.name} gradient", made, problem))
        problem = partial(_first, case, _problem_of_maker, adjust)
        found.append(_outcome(f"{case.name} maker", forward, problem))
    return found


def _types(operators: Iterable[OperatorDef]) -> set[str]:
    """The types of operators, and of those of nets in their arguments."""
    found: set[str] = set()
    for definition in operators:
        found |= {definition.type}.union(*(_types(argument.n.op) for argument in definition.arg))
    return found


def _outcome(part: str, types: Collection[str], problem: Callable[[], str]) -> Outcome:
    missing = tuple(sorted(name for name in types if not is_registered(name) and name not in ONLY_IN_MESSAGES))
    return Outcome(part, missing) if missing else Outcome(part, problem=problem())


def _first(case: Case, problem: Callable[[Case, GradientCase, Adjust], str], adjust: Adjust) -> str:
    return next((found for recorded in case.gradients if (found := problem(case, recorded, adjust))), "")


def run_net(net: NetDef, arrays: Arrays, adjust: Adjust) -> Workspace:
    """The workspace after one run of the net over `arrays`."""
    changed = NetDef()
    changed.CopyFrom(net)
    changed.type = "simple"
    del changed.op[:]
    changed.op.extend(adjust(definition) for definition in net.op)
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    workspace.run_net_once(changed)
    return workspace


def _problem_of_run(case: Case, adjust: Adjust) -> str:
    try:
        workspace = run_net(case.net, case.inputs, adjust)
    except DagexecError as error:
        return "" if case.refused else f"{type(error).__name__}: {error}"
    if case.refused:
        return "Caffe2 refuses this"
    return _problem_of_blobs(workspace, case.outputs, case.unstable)


def _problem_of_gradient(case: Case, recorded: GradientCase, adjust: Adjust) -> str:
    try:
        workspace = run_net(_net(recorded.operators), _after_forward(case, recorded), adjust)
    except DagexecError as error:
        return "" if recorded.refused else f"{type(error).__name__}: {error}"
    if recorded.refused:
        return "Caffe2 refuses to run its gradient"
    read = {name for definition in recorded.operators for name in definition.input}
    return _problem_of_blobs(workspace, recorded.values, frozenset(recorded.values if case.unstable & read else ()))


def _problem_of_maker(case: Case, recorded: GradientCase, adjust: Adjust) -> str:
    if recorded.refused:
        return ""  # there is nothing to compare with
    (original,) = case.net.op
    forward, names = _renamed(original)
    after = _after_forward(case, recorded)
    arrays = {new: after[old] for old, new in names.items() if old in after}
    given = [f"{name}_grad" if there else None for name, there in zip(forward.output, recorded.given, strict=True)]
    arrays |= {f"{names[old]}_grad": recorded.output_gradients[f"{old}_grad"] for old in _given(original, recorded)}
    wanted = [index for index, blobs in enumerate(recorded.inputs) if blobs]
    try:
        made = gradient(adjust(forward), given, wanted=wanted)
        workspace = run_net(_net(made.operators), arrays, adjust)
    except DagexecError as error:
        return f"{type(error).__name__}: {error}"
    computed = {**after, **recorded.values}
    for index in wanted:
        expected = [computed[name] for name in recorded.inputs[index]]
        problem = _problem_of_values(workspace, made.inputs[index], expected, values=not case.unstable)
        if problem:
            return f"input {original.input[index]!r}: {problem}"
    return ""


def _renamed(definition: OperatorDef) -> tuple[OperatorDef, dict[str, str]]:
    """The operator with plain names for its blobs, as the backward pass has them, and the names by the old ones.

    Caffe2's tests differentiate gradient operators, too, where `x_grad` is the name of a blob of the forward operator.
    """
    blobs = dict.fromkeys([*definition.input, *definition.output])
    in_arguments = definition.type == "RecurrentNetwork"  # whose arguments name its blobs
    names = {old: old if in_arguments else f"b{index}" for index, old in enumerate(blobs)}
    renamed = OperatorDef()
    renamed.CopyFrom(definition)
    renamed.input[:] = [names[name] for name in definition.input]
    renamed.output[:] = [names[name] for name in definition.output]
    return renamed, names


def _given(definition: OperatorDef, recorded: GradientCase) -> list[str]:
    return [name for name, there in zip(definition.output, recorded.given, strict=True) if there]


def _net(operators: Sequence[OperatorDef]) -> NetDef:
    return NetDef(name="gradient", op=operators)


def _after_forward(case: Case, recorded: GradientCase) -> Arrays:
    return {**case.inputs, **case.outputs, **recorded.output_gradients}


def _problem_of_values(workspace: Workspace, found: Gradient | None, expected: Sequence[Array], *, values: bool) -> str:
    if found is None:
        return "no gradient, where Caffe2 has one"
    blobs = [found.indices, found.values] if isinstance(found, SparseGradient) else [found]
    if len(blobs) != len(expected):
        return f"the gradient is {found}, where Caffe2's has {len(expected)} blobs"
    pairs = zip(blobs, expected, strict=True)
    problems = (problem_of(workspace.fetch_blob(name), value, values=values) for name, value in pairs)
    return next(filter(None, problems), "")


def _problem_of_blobs(workspace: Workspace, expected: Arrays, unstable: frozenset[str]) -> str:
    for name, array in expected.items():
        problem = problem_of(workspace.fetch_blob(name), array, values=name not in unstable)
        if problem:
            return f"blob {name!r}: {problem}"
    return ""


def problem_of(found: Array, expected: Array, *, values: bool = True) -> str:
    """What differs: the type, the shape, or (with `values`) the values, floats by more than the tolerances."""
    if found.dtype != expected.dtype:
        return f"expected {expected.dtype}, found {found.dtype}"
    if found.shape != expected.shape:
        return f"expected shape {expected.shape}, found {found.shape}"
    if not values:
        return ""
    if found.dtype.kind != "f":
        same = found == expected
    else:
        relative, absolute = TOLERANCES.get(found.dtype.str[1:], USUAL_TOLERANCE)
        same = np.isclose(found, expected, rtol=relative, atol=absolute, equal_nan=True)
    if np.all(same):
        return ""
    place = tuple(int(part) for part in np.argwhere(~same)[0])
    return f"{np.count_nonzero(~same)} of {found.size} values, that at {place}: {expected[place]}, found {found[place]}"


def main(names: Sequence[str]) -> None:
    """Print what differs, of the cases whose names begin with one of `names` or of all, and counts."""
    os.chdir(tempfile.mkdtemp())
    counts: Counter[str] = Counter()
    for case in recorded_cases():
        if names and not case.name.startswith(tuple(names)):
            continue
        if case.needs_objects:
            counts["not replayed"] += 1
            continue
        outcomes = replay(case)
        missing = any(outcome.missing for outcome in outcomes)
        differs = any(outcome.problem for outcome in outcomes)
        same = "refused alike" if case.refused else "agree"
        counts["differ" if differs else "an operator is missing" if missing else same] += 1
        for outcome in outcomes:
            if outcome.problem or (names and outcome.missing):
                print(outcome.part, outcome.problem or f"missing: {', '.join(outcome.missing)}", sep=": ")
    print(*(f"{count} {what}" for what, count in counts.most_common()), sep=", ")


if __name__ == "__main__":
    main(sys.argv[1:])
