"""Pass and run_passes: what a transformation of a model is, and how several run one after another.

A pass keeps every output within rounding: it may reorder sums and products of constants, and nothing else. It never
touches a model's outputs, so a caller who wants to fetch further blobs adds them to `Model.outputs` first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from dagexec.compiler.passes.draft import Draft, Rewritten, Trait
from dagexec.compiler.passes.types import KnownTypes
from dagexec.core.graph import check_net
from dagexec.core.model import Model
from dagexec.core.spelling import did_you_mean
from dagexec.errors import ArgumentError
from dagexec.platform.deadline import check_stop
from dagexec.platform.records import dataclass


@dataclass(frozen=True, eq=False)
class Pass:
    """A transformation of models, with the name by which it is switched off and one sentence on what it does.

    Attributes:
        edit: does it, to the graph that all passes share.
        needs: what the types of some operators must be for it to find anything: one of each trait. It is not entered
            where a net has none such.
        retypes: a blob may have another type or shape afterwards, or several: layouts and precisions do that.
        keeps_types: all blobs have their types, as only engines and the like change.
    """

    name: str
    doc: str
    edit: Callable[[Draft], None]
    needs: tuple[Trait, ...] = ()
    retypes: bool = False
    keeps_types: bool = False

    def apply(self, model: Model) -> Rewritten:
        """The model after this pass alone."""
        draft = Draft(model)
        self.edit(draft)
        changes = draft.settle()
        return Rewritten(draft.model, changes)


class PassOutcome(NamedTuple):
    """What one pass did: its changes, the number of operators before and after, and the seconds it took."""

    name: str
    changes: tuple[str, ...]
    operators_before: int
    operators_after: int
    seconds: float


@dataclass(frozen=True)
class PassReport:
    """The model after all passes, what each of them did, in their order, and what is known of its types."""

    model: Model
    outcomes: tuple[PassOutcome, ...]
    known: KnownTypes | None = None

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


def run_passes(model: Model | PassReport, passes: Sequence[Pass], without: Collection[str] = ()) -> PassReport:
    """Apply `passes` in order, those called one of `without` left out. A name may stand in the list more than once.

    They go on where those of a report have ended.

    Parameters must be arrays already: what an init net computes is unknown to every pass. Raises ArgumentError for a
    name in `without` that no pass has, and what `check_net` raises for a net that is none.
    """
    if without:
        check_pass_names(without, passes)
    if isinstance(model, PassReport):
        draft = Draft(model.model, None if model.known is None else model.known.copy())
    else:
        check_net(model.program, _given(model).__contains__)
        draft = Draft(model)
    outcomes = []
    count = len(draft)
    for step in passes:
        if step.name in without:
            continue
        if step.needs and not all(map(draft.has, step.needs)):
            outcomes.append(PassOutcome(step.name, (), count, count, 0.0))
            continue
        check_stop()
        before, start = count, time.perf_counter()
        step.edit(draft)
        changes = draft.settle(retyped=step.retypes, same_types=step.keeps_types)
        count = len(draft)
        outcomes.append(PassOutcome(step.name, changes, before, count, time.perf_counter() - start))
    return PassReport(draft.model, tuple(outcomes), draft.known)


def _given(model: Model) -> frozenset[str]:
    """Blobs that are there before the net runs."""
    made = (name for definition in model.init_program.op for name in definition.output)
    return frozenset((*model.parameters, *model.inputs, *made))
