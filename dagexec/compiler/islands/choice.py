"""The choice between own kernels and islands for a model: as asked for, as known, or as measured.

What is measured are own kernels, for each runtime a net in which it computes all that it can, and where there is time
left, a mixed net (`mixing`) beside the fastest of those. Without time for tuning, short runs decide, and islands have
to gain more.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy.typing as npt

from dagexec.compiler.compiled import Compiled
from dagexec.compiler.islands import mixing
from dagexec.compiler.islands.comparing import Candidate, fastest
from dagexec.compiler.islands.guarantees import Guarantees, promises
from dagexec.compiler.islands.plans import Plan, PlanPart, plan_from_text, plan_text, whole_plan, with_plan
from dagexec.compiler.islands.regions import IslandSource, falling_back, island_source
from dagexec.compiler.passes.catalog import BEFORE_ISLANDS
from dagexec.compiler.passes.own import own_passes
from dagexec.compiler.passes.rewriting import run_passes
from dagexec.compiler.tuning.bench import Bench, random_inputs
from dagexec.compiler.tuning.runner import Trial
from dagexec.core.choices import choices
from dagexec.core.model import Model
from dagexec.core.purity import is_known
from dagexec.errors import DagexecError
from dagexec.foreign import IslandRuntime, usable_runtimes
from dagexec.options import CompileOptions
from dagexec.platform.deadline import Deadline

logger = logging.getLogger("dagexec")

_SHARE = 0.4  # of the seconds for tuning
_SHORT_SECONDS = 2.0  # for sessions to be made and run where there are none for tuning
_GAIN, _SHORT_GAIN = 0.98, 0.9  # islands take at most this part of the time of own kernels: measured times vary

OnOwnKernels = Callable[[Model, CompileOptions], Compiled]
Key = Callable[[str, Model, object], str]


class IslandsChoice:
    """The choice for one model."""

    def __init__(
        self, model: Model, kept: Model, options: CompileOptions, seconds: float, on_own_kernels: OnOwnKernels, key: Key
    ) -> None:
        """`model` has arrays as parameters; `kept` is the model with all that runs may ask for as outputs.

        `seconds` are for tuning, `on_own_kernels` compiles a net with islands as any other, and `key` says what a
        choice is kept under.
        """
        self._model = model
        self._options = options
        self._plain = replace(options, islands="none")
        self._tuning = seconds
        self._on_own_kernels = on_own_kernels
        self._key = key
        self._said: list[str] = []
        self._versions = self._runtimes()
        first = (*BEFORE_ISLANDS, *own_passes(options.passes))
        passes = [one for one in first if one.name not in options.without_passes]
        source = run_passes(kept, passes).model if self._versions else kept
        inputs = random_inputs(source, options.shapes or {}) if self._versions else None
        shapes = {name: one.shape for name, one in (inputs or {}).items()}
        self._source: IslandSource = replace(island_source(source, shapes), specialized=not options.batch_invariant)

    def _runtimes(self) -> dict[IslandRuntime, str]:
        """The versions of the runtimes that may be used."""
        wanted = get_args(IslandRuntime) if self._options.islands == "auto" else (self._options.islands,)
        found, broken = usable_runtimes(wanted)
        for name, why in broken.items():
            self._said.append(f"{name} cannot be used: {why}")
            logger.warning("net %r: islands of %s cannot be used: %s", self._model.name, name, why)
        return found

    def result(self) -> Compiled:
        """The model as it is going to run."""
        plans = {name: whole_plan(name, self._source) for name in self._versions}
        models = {plan_text(plan): self._planned(plan) for plan in plans.values()}
        found = {text: model for text, model in models.items() if model is not self._source.model}
        if not found:
            return self._own("nothing can be computed in islands")
        if self._options.islands != "auto":
            [(text, model)] = found.items()
            return self._forced(text, model)
        asked = self._asked(found)
        keys = [self._key(what, self._source.model, asked) for what in ("islands", "islands estimate")]
        for key in keys if not self._tuning else keys[:1]:
            known = self._known(key, found)
            if known is not None:
                self._said.append(f"{plan_text(known)} (known)")
                return self._compiled(self._planned(known), self._plain) if known else self._own()
        inputs = self._test_inputs()
        if inputs is None:
            return self._own("own kernels: nothing can be measured on inputs that are made up")
        return self._measured(found, inputs, keys[0] if self._tuning else keys[1])

    def _planned(self, plan: Plan) -> Model:
        return with_plan(self._source, plan, self._versions)

    def _known(self, key: str, found: Mapping[str, Model]) -> Plan | None:
        text = choices.find(key)
        return None if text is None else plan_from_text(text, self._versions.keys(), len(self._source.graph))

    def _asked(self, found: Mapping[str, Model]) -> tuple[object, ...]:
        options = self._options
        counts = (options.first_replicas, options.net_type, options.num_workers, options.intra_op_threads)
        return (sorted(found), sorted(self._versions.items()), options.batch_invariant, options.nan, *counts)

    def _own(self, *why: str) -> Compiled:
        self._said += why
        return self._with_report(self._on_own_kernels(self._model, self._plain))

    def _compiled(self, model: Model, options: CompileOptions) -> Compiled:
        return self._with_report(self._made(model, options))

    def _made(self, model: Model, options: CompileOptions) -> Compiled:
        return self._on_own_kernels(model.changed(outputs=self._model.outputs), options)

    def _with_report(self, compiled: Compiled) -> Compiled:
        assert compiled.report is not None
        report = replace(compiled.report, islands=tuple(self._said))
        return replace(compiled, model=falling_back(compiled.model), report=report)

    def _forced(self, text: str, model: Model) -> Compiled:
        """All that the runtime can compute, if it keeps what is promised."""
        problem = self._problem(model)
        if problem is None:
            self._said.append(text)
            return self._compiled(model, self._plain)
        name = self._options.islands
        logger.warning("net %r: %s computes nothing of it: %s (docs/islands.md)", self._model.name, name, problem)
        return self._own(f"{name} is left out: {problem}")

    def _problem(self, model: Model) -> str | None:
        """Why islands that nobody measures may not be taken, None when they may."""
        if not promises(self._options):
            return None
        inputs = self._test_inputs()
        if inputs is None:
            return "its results cannot be tested on inputs that are made up"
        plain = replace(self._plain, tuning_seconds=0)
        own, made = (self._made(one, plain) for one in (self._model, model))
        guarantees = Guarantees(self._model, _trial(own), inputs, self._options, Deadline(math.inf))
        return guarantees.broken(_trial(made))

    def _test_inputs(self) -> dict[str, npt.NDArray[Any]] | None:
        """Inputs for runs that nobody asked for; None where their shapes are open, or operators may do more."""
        if not all(map(is_known, self._model.program.op)):
            return None
        return random_inputs(self._model, self._options.shapes or {})

    def _measured(self, found: Mapping[str, Model], inputs: Mapping[str, npt.NDArray[Any]], key: str) -> Compiled:
        """The fastest of all, within the time for tuning, or else within a short time."""
        share = self._tuning * _SHARE or _SHORT_SECONDS
        own = self._on_own_kernels(self._model, replace(self._plain, tuning_seconds=max(0.0, self._tuning - share)))
        deadline = Deadline(share)
        each = replace(self._plain, tuning_seconds=self._tuning * _SHARE / 4 / len(found))
        bench = Bench(inputs, 0.0, deadline, self._options.report)
        made: dict[str, Compiled] = {}
        for text, model in found.items():
            if not deadline.is_over:
                is_one = len(model.program.op) == 1  # there is nothing to choose
                made[text] = self._made(model, replace(each, tuning_seconds=0) if is_one else each)
        guarantees = Guarantees(self._model, _trial(own), inputs, self._options, deadline)
        best = self._fastest("own kernels", own, made, guarantees, bench)
        is_decided = not deadline.is_over
        if self._tuning and is_decided:
            base = own if best is None else made[best]
            mixed = self._mixed(own, bench, share / 6)
            if mixed and plan_text(mixed) not in made and not deadline.is_over:
                text = plan_text(mixed)
                made[text] = self._made(self._planned(mixed), each)
                best = self._fastest(best or "own kernels", base, {text: made[text]}, guarantees, bench) or best
        if is_decided:
            choices.keep(key, best or plan_text(()))
            choices.flush()
        return self._with_report(own if best is None else made[best])

    def _fastest(
        self, name: str, base: Compiled, others: Mapping[str, Compiled], guarantees: Guarantees, bench: Bench
    ) -> str | None:
        """Which of the others is faster than `base` by enough and keeps what is promised, if any; the fastest."""
        return fastest(
            Candidate(name, _trial(base)),
            [Candidate(text, _trial(one)) for text, one in others.items()],
            bench,
            (self._tuning * _SHARE or _SHORT_SECONDS) / 6,
            _GAIN if self._tuning else _SHORT_GAIN,
            guarantees.broken,
            self._said.append,
        )

    def _mixed(self, own: Compiled, bench: Bench, seconds: float) -> Plan:
        """The plan in which each part of the net is computed by who is fastest; empty where that is not known."""
        cuts = mixing.find_cuts(self._source, own.model)
        if not cuts:
            return ()
        try:
            took = bench.operator_seconds(own.model, seconds / 4)
            fine = mixing.segment_seconds(own.model, took, list(cuts.values()))
            places = mixing.coarse_cuts(list(cuts), fine)
            coarse = [cuts[place] for place in places]
            others = {
                runtime: mixing.segment_seconds(model, times, coarse)
                for runtime in self._versions
                for model, times in [self._in_pieces(runtime, places, bench, seconds / 4)]
            }
        except DagexecError as error:
            self._said.append(f"not looked at part by part: {error}")
            return ()
        mine = mixing.segment_seconds(own.model, took, coarse)
        return mixing.mixed_plan(places, len(self._source.graph), mine, others)

    def _in_pieces(
        self, runtime: IslandRuntime, places: list[int], bench: Bench, seconds: float
    ) -> tuple[Model, list[float]]:
        """A net with islands of a runtime between all cuts, and the times of its operators."""
        ends = [0, *places, len(self._source.graph)]
        plan = [PlanPart(runtime, start, stop) for start, stop in itertools.pairwise(ends)]
        model = self._made(self._planned(tuple(plan)), replace(self._plain, tuning_seconds=0)).model
        return model, bench.operator_seconds(model, seconds)


def _trial(compiled: Compiled) -> Trial:
    return Trial(compiled.model, compiled.options)
