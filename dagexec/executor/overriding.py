"""An executor whose runs may be fed other values for parameters: ONNX's initializers that are inputs too.

Runs that override nothing use a net in which all parameters are constants, packed and folded. The first run that
overrides some compiles the model once more with these as inputs, for it and later runs that override no others. Both
share the worker pool. Runs that override parameters are not joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy.typing as npt

from dagexec.binding.io_binding import Outputs
from dagexec.core.feeds import Feeds
from dagexec.core.model import InputInfo, Model, Overridable
from dagexec.errors import DagexecError
from dagexec.executor.alternatives import ExecutorWithAlternatives
from dagexec.executor.batching.axes import BatchAxes
from dagexec.executor.executor import Executor
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions
from dagexec.scheduler.workers.place import Place, beside

Build = Callable[[Model, CompileOptions, Place], Executor]

_MAX_NAMED = 8

_MOST = 3
"""Nets for runs that override parameters: the last one has all overridable ones as inputs."""

_Names = frozenset[str]


class OverridableExecutor(ExecutorWithAlternatives):
    """An Executor of a model with parameters that may be fed (`overridable`); alternatives have some as inputs."""

    def __init__(
        self,
        model: Model,
        options: CompileOptions,
        given: Model | None,
        given_types: Callable[[], GivenTypes] | None,
        overridable: Overridable,
        build: Build,
        batch_axes: BatchAxes | None = None,
    ) -> None:
        """`build` makes the executor of a model with some of `overridable` as inputs, on this one's pool."""
        self._overridable, self._build = overridable, build
        super().__init__(model, options, given, given_types, batch_axes)

    @property
    def overridable(self) -> Mapping[str, InputInfo]:
        """The parameters that may be fed, by name; by default they have the model's values."""
        return self._overridable.inputs

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """As `Executor._run`. Feeds may have some of `overridable`; the first such run compiles a net."""
        run = super()._run
        if isinstance(feeds, Mapping) and (names := self._overridden(feeds)):
            other = self._other(names)
            feeds, run = self._completed(feeds, other), other._run
        return run(feeds, call)

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """As `_run`, for a task."""
        run = super()._run_async
        if isinstance(feeds, Mapping) and (names := self._overridden(feeds)):
            other = self._known(names)
            if other is None:
                other = await on_a_thread(f"dagexec-{self.model.name}-compiling", lambda: self._other(names))
            feeds, run = self._completed(feeds, other), other._run_async
        return await run(feeds, call)

    def warm_up(self, feeds: Feeds | npt.ArrayLike | None = None) -> None:
        """As `Executor.warm_up`; feeds that override parameters warm up the net for these."""
        if isinstance(feeds, Mapping) and (names := self._overridden(feeds)):
            other = self._other(names)
            other.warm_up(self._completed(feeds, other))
        else:
            super().warm_up(feeds)

    def _overridden(self, feeds: Feeds) -> _Names:
        """The overridable parameters among `feeds`."""
        inputs = self._overridable.inputs
        return frozenset() if inputs.keys().isdisjoint(feeds) else frozenset(inputs.keys() & feeds.keys())

    def _completed(self, feeds: Feeds, other: Executor) -> Feeds:
        """The feeds, with the values of parameters that are inputs of `other` and that they leave out."""
        values = self._overridable.values
        return {**{name: values[name] for name in other.inputs if name in values}, **feeds}

    def _known(self, names: _Names) -> Executor | None:
        return next((other for key, other in self._alternatives.items() if names <= cast(_Names, key)), None)

    def _other(self, names: _Names) -> Executor:
        """The executor for feeds with `names`, compiled now if need be."""
        return self._known(names) or self._once(lambda: self._known(names) or self._compiled(names))

    def _compiled(self, names: _Names) -> Executor:
        names = names.union(*cast(Mapping[_Names, Executor], self._alternatives))
        if len(self._alternatives) == _MOST - 1:
            names = frozenset(self._overridable.inputs)
        try:
            return self._note(names, self._built(self._overridable.model_with(names)))
        except DagexecError as error:
            error.add_note(f"while the model was compiled for runs that override {sorted(names)[:_MAX_NAMED]}")
            raise

    def _built(self, model: Model) -> Executor:
        """The executor of a model with parameters that are inputs, whose requests are not joined."""
        options = replace(
            self._options,
            net_type=self.net_type,
            num_workers=self.num_workers,
            tuning_seconds=0.0,
            warm_start=False,
            max_batch=1,
            batch_padding=None,
        )
        return self._build(model, options, beside(self._place))
