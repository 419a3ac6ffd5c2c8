"""Bugs of memory that is used again: buffers of a plan, arenas, working memory, and results of callers."""

from __future__ import annotations

from dagexec.binding.io_binding import IOBinding
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.scheduler.memory import buffers, lifetime
from dagexec.scheduler.run import work
from tests.planted import scenes
from tests.planted.bug import Bug, Edit

BRANCHES = ((), (0,), (0,), (1,), (2,), (3, 4))
KEPT, ARENAS, PIECES = "kept buffers reused", "ABA on arenas", "pieces"

BUGS = (
    Bug(
        "a buffer that is free while it is read",
        KEPT,
        "an operator counts as done before itself, so what it writes may lie where it reads",
        (Edit(lifetime.graph_order, "before.append(ancestors)", "before.append(ancestors | 1 << len(before))"),),
        scenes.planned(BRANCHES, "b5"),
        "proof",
        "is overwritten within",
    ),
    Bug(
        "a result that is overwritten in its run",
        KEPT,
        "blobs that are to have their values after the run share memory with later ones",
        (Edit(buffers._Search._finished, "kept = self._is_kept(root.members)", "kept = False"),),
        scenes.planned(scenes.line(4), "b0", "b3"),
        "proof",
        "is overwritten",
    ),
    Bug(
        "a result that the next run overwrites",
        KEPT,
        "a caller gets the replica's own array, and no copy",
        (Edit(IOBinding.fetch, "else array.copy()", "else array"),),
        scenes.results_of_two_calls,
        "schedules",
        "other numbers",
    ),
    Bug(
        "an arena that is taken from a run",
        ARENAS,
        "a model gives its arena back for another one's run while a run is in it; it is there again, and empty",
        (Edit(Dispatcher.give_back_arenas, "self.state.unused()", "self.state.replicas"),),
        scenes.two_models,
        "schedules",
        "other numbers",
        slow=True,
    ),
    Bug(
        "phases that do not wait",
        PIECES,
        "the pieces of a phase of an operator are handed out before those of the one before are done",
        (
            Edit(work._chained, "*([task + 1] for task in", "*([] for task in"),
            Edit(work._chained, "*[1] * (len(row) - 1)", "*[0] * (len(row) - 1)"),
        ),
        scenes.phases_proved,
        "proof",
        "does not wait for phase",
    ),
    Bug(
        "one scratch for all pieces",
        PIECES,
        "pieces of an operator that may run side by side have the same working memory",
        (Edit(lifetime._Intervals.together, "flags: Flags = others == operator", "flags: Flags = others != others"),),
        scenes.phases_proved,
        "proof",
        "is overwritten within",
    ),
)
