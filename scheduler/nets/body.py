"""BodyNet: the net inside an operator such as Loop (`dagexec.core.body`), executed on the thread of that operator.

An execution calls the steps one after another. Between them it checks whether the run was stopped, so that no loop is
endless. On a worker of a pool, if running chains side by side saves more than handing them out costs, they are a run of
their own, in which the worker takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Self

from dagexec.core.blob import Blob
from dagexec.core.body import InferredBody, SettledBody
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.core.schema import TensorType
from dagexec.core.tensor import Tensor, binding_epoch
from dagexec.core.variant import Variant
from dagexec.core.workspace import Workspace
from dagexec.errors import DeviceError
from dagexec.platform.blocking import check_stopped, work
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.observe.observed_bodies import Tell, observed_in_body, telling
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.culprit import NameStep, label_of
from dagexec.scheduler.plan.dynamic import dependence
from dagexec.scheduler.plan.inference import inferred_and_settled
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.run.inline import raise_inline
from dagexec.scheduler.run.run import Helping, Run
from dagexec.scheduler.run.work import chain_work

MIN_SECONDS_SAVED = 100e-6
"""Estimated seconds that one more worker must save an execution; waking it and waiting for it costs half of that."""


_MAX_MISSES = 2
"""Preparations for other shapes, after which operators whose shapes change prepare themselves."""

_STEADY = 64
"""Executions without a change of shapes, after which the net is prepared as a whole again."""


class BodyNet(BaseNet):
    """Executed as often as the outer operator wants, on the blobs of its workspace; on the host only."""

    net_type: ClassVar[str] = "body"
    _misses = 0  # preparations made since shapes were steady
    _for_any_shapes: Preparation | None = None
    _unsteady: frozenset[str] = frozenset()  # inputs of which other types were seen, or of any shapes
    _types: tuple[object, ...] | None = None  # of the inputs, at the latest preparation
    _epoch = -1
    _steady = 0  # executions since a tensor moved
    _judged: Preparation | None = None
    _may_share = False

    @classmethod
    def from_definition(
        cls, workspace: Workspace, definition: NetDef | Program, num_workers: int | None, policy: object = None
    ) -> Self:
        """Called by `Workspace.build_net`: only the outputs are kept, and frozen tensors are constants.

        Raises DeviceError for operators on devices.
        """
        constants = frozenset(filter(partial(_is_constant, workspace), workspace.local_blobs()))
        body = cls(definition, workspace, constants=constants, keep=frozenset(definition.external_output))
        if not body.on_host:
            body.close()
            raise DeviceError(f"net {definition.name!r}: the nets that operators run are for the host, not for devices")
        return body

    def prepare(self) -> None:
        """Prepare for the current inputs."""
        self.prepared()

    def __call__(self) -> None:
        """Execute once, for the outer operator, on its thread."""
        preparation = self._current
        if preparation is None or not preparation.bindings.in_place():
            preparation = self.prepared()  # also for any shapes: there is no current one then
        self._execute_prepared(preparation)

    def _execute_prepared(self, preparation: Preparation) -> None:
        tell = telling.tell
        if self._judged is not preparation:
            self._judge(preparation)
        if self._may_share:
            outer = work.run
            if isinstance(outer, Run) and outer.pool is not None and outer.side_by_side:
                self._run_side_by_side(preparation, outer, outer.pool, tell)
                return
        if tell is None:
            self._run_steps(preparation.in_order, preparation.name_step)
        else:
            steps = self._observed_steps(preparation, tell)
            self._run_steps(steps, partial(label_of, preparation.plan, steps))

    def prepared(self) -> Preparation:
        """Steps for the shapes the blobs have now; while some keep changing, steps for any such shapes."""
        preparation = self._for_any_shapes
        if preparation is None:
            return super().prepared()
        self._steady = self._steady + 1 if self._epoch == binding_epoch() else 0
        if self._steady >= _STEADY:
            self._for_any_shapes, self._misses = None, 0
            return super().prepared()
        if not preparation.bindings.in_place():
            moved = [binding.blob for binding in preparation.bindings.inputs if not binding.holds()]
            self._unsteady |= self._names_inside(moved or self._inputs)
            preparation = self._prepare_for_any_shapes()
        self._epoch = binding_epoch()
        return preparation

    def _prepare(self) -> Preparation:
        """As other nets; but with values of growing shapes, that would prepare all operators in each iteration."""
        types = tuple(map(_type_or_none, self._inputs))
        before, self._types = self._types or types, types
        pairs = zip(self._inputs, before, types, strict=True)
        self._unsteady |= self._names_inside([blob for blob, one, other in pairs if one != other])
        return super()._prepare() if self._misses < _MAX_MISSES else self._prepare_for_any_shapes()

    def _prepare_for_any_shapes(self) -> Preparation:
        self._forget_preparations()
        self._let_go_of_arenas()
        self._steady = 0
        dynamic = dependence(self.graph, self._constants, unsteady=self._unsteady).dynamic
        own = [blob for blob in self._inputs if id(blob) in self._own_inputs]
        for blob in (*own, *(blob for index in dynamic for blob in self.operators[index].output_blobs)):
            if not isinstance(blob.value, Variant):
                blob.tensor().grow_in_place()
        self._for_any_shapes = self._attempted_preparation(self._unsteady)
        return self._for_any_shapes

    def _names_inside(self, blobs: Iterable[Blob]) -> frozenset[str]:
        """What these inputs are called here; those that are captured have other names outside."""
        ids = set(map(id, blobs))
        return frozenset(
            name
            for operator in self.operators
            for name, blob in zip(operator.definition.input, operator.input_blobs, strict=True)
            if id(blob) in ids
        )

    def _new_preparation(self) -> Preparation:
        self._misses += 1
        return super()._new_preparation()

    def infer(self, known: Mapping[int, TensorType], results: Sequence[Blob]) -> InferredBody | None:
        """The types of `results`, and the estimated seconds; None where the run decides them."""
        dynamic, inferred = inferred_and_settled(
            self.operators, self.graph, self._constants, in_one_plan=True, known=known
        )
        if dynamic:
            return None
        types = dict(known)
        seconds = 0.0
        for operator, record in zip(self.operators, inferred, strict=True):
            assert record is not None
            types.update(zip(map(id, operator.output_blobs), record.types, strict=True))
            seconds += record.seconds
        return tuple(types.get(id(blob)) or _type_of(blob) for blob in results), seconds

    def settle(self) -> SettledBody:
        """Prepare for the shapes the blobs have now; the caller keeps the result, this net does not."""
        preparation = self._attempted_preparation()
        return SettledBody(
            execute=partial(self._execute_prepared, preparation),
            parts=() if _saves_side_by_side(preparation) else preparation.in_order,
            name_part=partial(preparation.name_step, None),
            blobs=preparation.written,
            nbytes=preparation.nbytes,
            in_place=partial(_put_in_place, preparation),
        )

    def _judge(self, preparation: Preparation) -> None:
        """Note whether chains of these steps side by side would save enough."""
        self._may_share = _saves_side_by_side(preparation)
        self._judged = preparation

    def _observed_steps(self, preparation: Preparation, tell: Tell) -> list[Step]:
        labels = map(self.graph.label, range(len(self.graph)))
        return [observed_in_body(label, step, tell) for label, step in zip(labels, preparation.steps, strict=True)]

    def _run_side_by_side(self, preparation: Preparation, outer: Run, pool: Helping, tell: Tell | None) -> None:
        plan, name_step = preparation.plan, preparation.name_step
        if tell is None:
            work = self._host_work(preparation, None)
        else:
            steps = self._observed_steps(preparation, tell)
            work = chain_work(plan, [tuple(steps[index] for index in chain) for chain in plan.chains])
            name_step = partial(label_of, plan, steps)
        run = Run(self.name, work, name_step, nothing_to_do)
        pool.run_within(run, outer)
        run.raise_error()
        run.check_complete()

    def _run_steps(self, steps: Sequence[Step], name_step: NameStep) -> None:
        """Call `steps` as long as this thread's run goes on; as `run_inline`, at less cost."""
        run, deadline = work.run, work.deadline
        step: Step | None = None
        try:
            if run is None and deadline == math.inf:
                for step in steps:
                    step()
            elif run is not None and deadline == math.inf and not run.stopped:
                for step in steps:
                    step()
                    if run.stopped:
                        break
            else:
                check_stopped(self.name)
                for step in steps:
                    step()
                    check_stopped(self.name)
            if run is not None and run.stopped:
                check_stopped(self.name)
        except BaseException as error:
            raise_inline(self.name, step, error, name_step)

    def _forget_preparations(self) -> None:
        """Drop all steps."""
        super()._forget_preparations()
        self._judged = None

    def _execute(self, preparation: Preparation, timeout: float | None, trace: Observer | None) -> None:
        """Execute as the outer operator does."""
        self()


def _put_in_place(preparation: Preparation) -> bool:
    return preparation.bindings.in_place() or preparation.bindings.restore(frozenset())


def _saves_side_by_side(preparation: Preparation) -> bool:
    plan = preparation.plan
    return len(plan.chains) > 1 and plan.work - plan.critical_path > MIN_SECONDS_SAVED


def _type_of(blob: Blob) -> TensorType:
    tensor = blob.tensor()
    return TensorType(tensor.shape, tensor.meta)


def _type_or_none(blob: Blob) -> TensorType | None:
    """None for what is no tensor."""
    return _type_of(blob) if isinstance(blob.value, Tensor) else None


def _is_constant(workspace: Workspace, name: str) -> bool:
    value = workspace.get_blob(name).value
    return isinstance(value, Tensor) and value.constant is not None
