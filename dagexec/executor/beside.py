"""Executors *beside* that of a model: of other nets with its parameters, on the same workers.

Steps of sessions, and runs of any length, are computed by such nets in place of the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from dagexec.core.model import Model
from dagexec.core.workspace import Workspace
from dagexec.executor.dispatch.statistics import ExecutorStatistics
from dagexec.executor.model_runner import ModelRunner
from dagexec.options import CompileOptions
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    batch_axes = LazyModule("dagexec.executor.batching.axes")
else:
    from dagexec.executor.batching import axes as batch_axes
    from dagexec.executor.batching.axes import BatchAxes

Runner = TypeVar("Runner", bound=ModelRunner)


class Beside(Generic[Runner]):
    """Those of one executor.

    Attributes:
        members: those that are open.
    """

    def __init__(
        self,
        parameters: Workspace,
        options: CompileOptions,
        build: Callable[[Model, CompileOptions, Workspace, BatchAxes | None], Runner],
        statistics_of: Callable[[Runner], ExecutorStatistics],
    ) -> None:
        """`parameters` and `options` are the model's; `build` makes an executor on its workers."""
        self._parameters, self._options = parameters, options
        self._build, self._statistics_of = build, statistics_of
        self.members: list[Runner] = []
        self._retired: ExecutorStatistics | None = None

    def made(self, model: Model, joins: bool) -> Runner:
        """One of a net with the same parameters and some of its own.

        Where it `joins` requests, rows that are zeros are of none. Raises RowsError where rows are not apart.
        """
        parameters = Workspace(parent=self._parameters)
        for name, array in model.parameters.items():
            if not parameters.has_blob(name):
                parameters.adopt_blob(name, array)
        options = replace(
            self._options, tuning_seconds=0.0, warm_start=False, shapes=None, batch_axes=None, batch_padding=None,
            max_batch=self._options.max_batch if joins else 1,
        )  # fmt: skip
        axes = batch_axes.BatchAxes(model, options, has_empty_rows=True) if joins else None
        executor = self._build(model, options, parameters, axes)
        self.members.append(executor)
        return executor

    def member(self, executor: ModelRunner) -> Runner:
        """The one that this is."""
        return next(one for one in self.members if one is executor)

    def retire(self, executor: ModelRunner) -> None:
        """Close one, and go on counting what it has run."""
        unused = self.member(executor)
        more = self._statistics_of(unused)
        self._retired = more if self._retired is None else self._retired.with_counts_of(more)
        self.members.remove(unused)
        unused.close()

    def with_counts(self, total: ExecutorStatistics) -> ExecutorStatistics:
        """The same with the requests of all of them so far."""
        for more in (*filter(None, [self._retired]), *map(self._statistics_of, tuple(self.members))):
            total = total.with_counts_of(more)
        return total

    def close(self) -> None:
        """Close all."""
        for one in self.members:
            one.close()
