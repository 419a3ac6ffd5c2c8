"""An executor of a model with two branches, of which an input says which one is run.

As decoders are merged with what runs first, which reads no caches: `use_cache_branch` is the condition of an `If`. A
run is one of the branch that it takes, which is compiled alone when a run first takes it. Both share the worker pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs
from dagexec.core.dtypes import BOOL
from dagexec.core.feeds import Feeds
from dagexec.core.model import Model
from dagexec.core.node import Node, new_node
from dagexec.core.program import Program, program_of
from dagexec.executor.alternatives import ExecutorWithAlternatives
from dagexec.executor.executor import Executor
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.executor.sessions.names import states_by_name
from dagexec.executor.sessions.session import Session
from dagexec.executor.source.origin import Origin
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.workers.place import Place, beside

_IF = "If"


def condition_of(model: Model) -> str | None:
    """The input that says which branch is run: one bool that conditions alone read. None where there is none.

    And for nets without states, which have their branches in one net: what these give may be no tensors.
    """
    if not states_by_name(model.inputs, model.outputs):
        return None
    conditions = {node.input[0] for node in model.program.op if node.type == _IF}
    for name in sorted(conditions & model.inputs.keys()):
        info = model.inputs[name]
        is_one = info.dtype is BOOL and info.shape in ((), (1,))
        if is_one and all(
            node.type == _IF and name not in node.input[1:] for node in model.program.op if name in node.input
        ):
            return name
    return None


def branch_of(model: Model, condition: str, value: bool) -> Model:
    """The model of the runs that are fed `value`; inputs that these do not read are left out."""
    nodes = list[Node]()
    for node in model.program.op:
        if node.type != _IF or node.input[0] != condition:
            nodes.append(node)
            continue
        message = node.arguments(node.type).net("then_net" if value else "else_net")
        assert message is not None, "both nets are required arguments"
        net = program_of(message)
        nodes += net.op
        nodes += [
            new_node("Copy", [result], [output])
            for result, output in zip(net.external_output, node.output, strict=True)
        ]
    whole = model.changed(net=Program(tuple(nodes), model.program.header))
    needed = whole.needed_inputs() - {condition}
    inputs = {name: info for name, info in model.inputs.items() if name in needed}
    return whole.changed(inputs=inputs, parameters=dict(model.parameters))  # who compiles it takes them out


def follow_from_inputs(model: Model) -> set[str]:
    """The blobs that are not the same in all runs."""
    names = set(model.inputs)
    for node in model.program.op:
        if not names.isdisjoint(node.input):
            names.update(node.output)
    return names


class BranchedExecutor(ExecutorWithAlternatives):
    """An Executor of such a model; its alternatives are the branches."""

    def __init__(
        self,
        model: Model,
        options: CompileOptions,
        given: Model | None,
        given_types: Callable[[], GivenTypes] | None,
        condition: str,
        build: Callable[[bool | None, Place | None], Executor],
        origin: Origin | None = None,
    ) -> None:
        """`build` makes the executor of a branch on the workers of a place, or one that has both as operators."""
        self._condition, self._build = condition, build
        super().__init__(model, options, given, given_types, origin=origin)

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """As `Executor._run`, of the branch; the first run that takes it compiles it."""
        taken = self._taken(feeds)
        if taken is None:
            return super()._run(feeds, call)
        branch = self._branch(taken)
        return branch._run(self._read(feeds, branch), call)

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """As `_run`, for a task."""
        taken = self._taken(feeds)
        if taken is None:
            return await super()._run_async(feeds, call)
        branch = self._alternatives.get(taken)
        if branch is None:
            branch = await on_a_thread(f"dagexec-{self.model.name}-compiling", partial(self._branch, taken))
        return await branch._run_async(self._read(feeds, branch), call)

    def session(self, states: Mapping[str, str] | None = None) -> Session:
        """As `Executor.session`. The condition need not be fed: the first run takes the branch where it is false.

        What that branch puts out for states is where the other one goes on. A state stays as it is where the other one
        does not put out what follows from its inputs.
        """
        first, following = self._branch(False), self._branch(True)
        pairs = states_by_name(following.inputs, following.outputs) if states is None else dict(states)
        varying = follow_from_inputs(following.model)
        kept = {name: output for name, output in pairs.items() if output in varying}
        return following._sessions.begun_by(first, self._condition, kept, pairs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As `Executor.save`, of a net with both branches, which is compiled for this."""
        with self._build(None, None) as whole:
            whole.save(path)

    def _warm_up(self, feeds: Feeds) -> None:
        for taken in (False, True):
            branch = self._branch(taken)
            branch._warm_up(self._read(feeds, branch))

    @contextmanager
    def net_instead(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, BaseNet] | None]:
        """As `Executor.net_instead`, of the branch that is taken."""
        taken = self._taken(feeds)
        branch = None if taken is None else self._branch(taken)
        instead = super().net_instead(feeds) if branch is None else branch.net_instead(self._read(feeds, branch))
        with instead as found:
            yield found

    def _taken(self, feeds: Feeds | npt.ArrayLike) -> bool | None:
        """The branch that a run takes; None where its condition is not one bool."""
        value = np.asarray(feeds.get(self._condition)) if isinstance(feeds, Mapping) else np.empty(0)
        return bool(value.item()) if value.dtype == np.bool_ and value.shape in ((), (1,)) else None

    def _read(self, feeds: Feeds | npt.ArrayLike, branch: Executor) -> dict[str, Any]:
        """What a branch is fed: all but what only others read."""
        assert isinstance(feeds, Mapping)
        return {name: array for name, array in feeds.items() if name in branch.inputs or name not in self.inputs}

    def _branch(self, taken: bool) -> Executor:
        """The executor of a branch, compiled now if need be."""
        return self._alternatives.get(taken) or self._once(
            lambda: self._alternatives.get(taken) or self._note(taken, self._build(taken, beside(self._place)))
        )
