"""Pass and run_passes: what a transformation of a model is, and how several run one after another.

A pass keeps every output within rounding: it may reorder sums and products of constants, and nothing else. It never
touches a model's outputs, so a caller who wants to fetch further blobs adds them to `Model.outputs` first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from dagexec.compiler.passes.types import keep_inference
from dagexec.core.graph import check_net
from dagexec.core.model import Model
from dagexec.core.spelling import did_you_mean
from dagexec.errors import ArgumentError
from dagexec.platform.deadline import check_stop
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Rewritten:
    """What a pass returns: the model, and one sentence for each thing it changed (none: the model is as before)."""

    model: Model
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A transformation of models, with the name by which it is switched off and one sentence on what it does.

    Attributes:
        retypes: a blob may have another type or shape afterwards, or several: layouts and precisions do that.
    """

    name: str
    doc: str
    apply: Callable[[Model], Rewritten]
    retypes: bool = False


@dataclass(frozen=True)
class PassOutcome:
    """What one pass did: its changes, the number of operators before and after, and the seconds it took."""

    name: str
    changes: tuple[str, ...]
    operators_before: int
    operators_after: int
    seconds: float


@dataclass(frozen=True)
class PassReport:
    """The model after all passes, and what each of them did, in their order."""

    model: Model
    outcomes: tuple[PassOutcome, ...]

    @property
    def changes(self) -> int:
        """How many changes were made in all."""
        return sum(len(outcome.changes) for outcome in self.outcomes)


def check_pass_names(names: Iterable[str], passes: Sequence[Pass]) -> None:
    """Raise ArgumentError, with the list of passes, when one of `names` is none of theirs."""
    known = list(dict.fromkeys(candidate.name for candidate in passes))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentError(f"there is no pass {name!r}; the passes are {', '.join(known)}{hint}")


def run_passes(
    model: Model, passes: Sequence[Pass], without: Collection[str] = (), *, checked: bool = False
) -> PassReport:
    """Apply `passes` in order, those called one of `without` left out. A name may stand in the list more than once.

    Parameters must be arrays already: what an init net computes is unknown to every pass. Raises ArgumentError for a
    name in `without` that no pass has, and what `check_net` raises for a net that is none, unless it is `checked`.
    """
    check_pass_names(without, passes)
    if not checked:
        check_net(model.program, _given(model).__contains__)
    outcomes = []
    for step in passes:
        if step.name in without:
            continue
        check_stop()
        before, start = len(model.program.op), time.perf_counter()
        rewritten = step.apply(model)
        keep_inference(model, rewritten.model, step.retypes)
        model = rewritten.model
        seconds = time.perf_counter() - start
        outcomes.append(PassOutcome(step.name, rewritten.changes, before, len(model.program.op), seconds))
    return PassReport(model, tuple(outcomes))


def _given(model: Model) -> frozenset[str]:
    """Blobs that are there before the net runs."""
    made = () if model.init_net is None else (name for definition in model.init_net.op for name in definition.output)
    return frozenset((*model.parameters, *model.inputs, *made))
