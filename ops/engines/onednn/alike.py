"""Operators of one form, with tensors of the same types, prepared together: one table of native calls for all of them.

A recipe says which primitives are executed on which tensors. Where that is all, operators differ in nothing but
addresses. So the rows of one of them are repeated, and what differs is written into them column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeCall, Phases, can_run, rows_of
from dagexec.core.native_tables import AlikeStep, AlikeSteps, lie_apart
from dagexec.core.operator import Operator, Repeat
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn.bound import Memory, execution, memory_at
from dagexec.ops.engines.onednn.keeping_nan import Recomputation, is_watched
from dagexec.ops.engines.onednn.recipe import Call, Recipe, Tensors
from dagexec.ops.kernels.invalid_operations import Watch
from dagexec.platform.addresses import address_of

if TYPE_CHECKING:
    from dagexec.ops.engines.onednn.operator import OneDNNOperator

_Numbers = npt.NDArray[np.int64]


def repeat_of(recipe: Recipe, operator: OneDNNOperator, tensors: Tensors) -> Repeat | None:
    """What prepares others of the form of `operator`, which was prepared by `recipe`; None where more differs.

    Constants differ, which each has packed for itself, and so do kernels that are made for one operator.
    """
    if recipe.working or any(tensors.constant) or tensors.absent or not can_run():
        return None
    if not all(isinstance(call, Call) and not call.has_packed for call in recipe.calls):
        return None
    watched = recipe.keeps_nan and is_watched(operator)
    if recipe.keeps_nan and (recipe.is_unseen or watched is None):
        return None
    names = operator.names
    own = [place for place, name in enumerate(names) if names.index(name) == place]
    sizes = [tensors.arrays[place].nbytes for place in own]
    return partial(_repeated, recipe, bool(watched), np.array(own), np.array(sizes))


def _repeated(
    recipe: Recipe, watched: bool, own: _Numbers, sizes: _Numbers, operators: Sequence[Operator], addresses: _Numbers
) -> list[AlikeStep | None]:
    """The steps of `operators`; None for one that has tensors which overlap, or decided otherwise before.

    `own` are the places of tensors of different names, of so many bytes.
    """
    apart = lie_apart(addresses[:, own], sizes)
    members = cast("Sequence[OneDNNOperator]", operators)
    chosen = [number for number in np.flatnonzero(apart).tolist() if _may_follow(members[number], recipe)]
    found: list[AlikeStep | None] = [None] * len(operators)
    if chosen:
        made = _Together(recipe, [members[number] for number in chosen], addresses[chosen], watched=watched).steps()
        for number, step in zip(chosen, made, strict=True):
            found[number] = step
    return found


def _may_follow(operator: OneDNNOperator, recipe: Recipe) -> bool:
    if operator.names_for_all not in ({}, recipe.names_for_all):
        return False
    operator.names_for_all.update(recipe.names_for_all)
    return True


class _Together:
    """Operators that are prepared together, and what their steps keep."""

    def __init__(
        self, recipe: Recipe, operators: Sequence[OneDNNOperator], addresses: _Numbers, *, watched: bool
    ) -> None:
        self._operators = operators
        self._again: dict[int, Recomputation] = {}
        self._recipe = recipe
        calls = [call for call in recipe.calls if isinstance(call, Call)]
        self._memories: list[Memory] = []
        places = np.cumsum([0, *(len(call.numbers) for call in calls)])
        given = np.zeros((len(operators), int(places[-1]), 2), np.uint64)  # `dnnl_exec_arg_t`, of 16 bytes each
        for call, start in zip(calls, places.tolist(), strict=False):
            for number, ((descriptor, place), argument) in enumerate(zip(call.arguments, call.numbers, strict=True)):
                given[:, start + number, 0] = argument
                given[:, start + number, 1] = self._handles(descriptor, place, addresses)
        self._given = given
        functions = [execution(call.primitive, len(call.numbers), 0, _failed, None) for call in calls]
        phases: Phases = tuple(((call,),) for call in functions)
        self._notes = np.zeros(len(operators), np.int32)
        watch = None
        if watched:
            watch = Watch()
            phases = watch.guarded(phases, _nothing)
        table, called = rows_of([call for phase in phases for piece in phase for call in piece])
        tables = np.repeat(table[np.newaxis], len(operators), axis=0)
        first = address_of(given) + given.strides[0] * np.arange(len(operators), dtype=np.uint64)
        notes = address_of(self._notes) + self._notes.itemsize * np.arange(len(operators), dtype=np.uint64)
        executed = iter(places.tolist())
        for row, one in enumerate(called):
            if watch is not None and one.keeps is watch.note:
                tables[:, row, 1] = notes
            elif table[row, 0] == one.function:
                tables[:, row, 4] = first + np.uint64(given.strides[1] * next(executed))
        self._alike = AlikeSteps(phases, tables, self._call, self)

    def steps(self) -> list[AlikeStep]:
        """The step of each of them."""
        return self._alike.steps()

    def _handles(self, descriptor: Any, place: object, addresses: _Numbers) -> npt.NDArray[np.uint64]:
        """What the library calls the memory of an argument of each operator."""
        if not isinstance(place, int):
            assert isinstance(place, Memory)
            self._memories.append(place)
            return np.array([_handle(self._operators[0], place)], np.uint64)
        different, first, which = np.unique(addresses[:, place], return_index=True, return_inverse=True)
        handles = []
        for address, number in zip(different.tolist(), first.tolist(), strict=True):
            operator = self._operators[number]
            blob = (*operator.input_blobs, *operator.output_blobs)[place]
            memory = memory_at(operator.onednn, descriptor, blob.tensor().array, address, operator.label)
            self._memories.append(memory)
            handles.append(_handle(operator, memory))
        return np.array(handles, np.uint64)[which]

    def _call(self, number: int, call: NativeCall) -> NativeCall:
        """A call of one of them."""
        if call.on_failure is not None:
            return replace(call, keeps=self, on_failure=partial(self._compute_again, number))
        label = self._operators[number].label
        return replace(call, keeps=self, failure=lambda: DagexecError(f"{label}: oneDNN failed to execute it"))

    def _compute_again(self, number: int) -> None:
        """An operator has met a NaN."""
        self._notes[number] = 0
        if number not in self._again:
            self._again[number] = Recomputation(self._operators[number])
        self._again[number].run()


def _handle(operator: OneDNNOperator, memory: Memory) -> int:
    return int(operator.onednn.ffi.cast("uintptr_t", memory.handle))


def _failed() -> DagexecError:
    return DagexecError("oneDNN failed to execute a primitive")


def _nothing() -> None:
    """In the place of what computes an operator again."""
