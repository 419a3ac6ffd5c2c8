"""NaN stays NaN in operators that oneDNN computes with maxima, minima and comparisons, which give a number for it.

The processor says after a step whether one of them has met a NaN (`dagexec.ops.kernels.invalid_operations`). Then, and
only then, the default engine computes the operator again, and rows of the results in which that finds a NaN that is
missing, or misses one, are taken from it. So finite values cost nothing, and a row's bytes do not depend on those
beside it.

It takes inputs that are still there after the step. An operator that adds to what the output held looks at that first,
and remembers it only if it is not finite (`keeping_nan_in_place`); others that work in place are not for oneDNN.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from dagexec.core.native import NativeStep, Phases, phases_of
from dagexec.core.operator import Operator, Prepared, Rebind, Step, parts_of
from dagexec.core.tensor import Tensor
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import Array
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.nchw_fallback import nchw_fallback, require_clear
from dagexec.ops.families.activation.post_ops import read_post_ops
from dagexec.ops.kernels.finite import FiniteScan, can_scan
from dagexec.ops.kernels.invalid_operations import Watch, can_be_seen
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.moving import table_rebind

logger = logging.getLogger("dagexec")

_LATER: Array = np.empty(0, np.uint8)


def is_seen(library: Library) -> bool:
    """True where the work of `library` is done by the threads that call it, whose flags can be looked at."""
    return (library.openmp is not None or not library.has_primitives) and can_be_seen()


def keeping_nan(operator: Operator, prepared: Prepared, machine: Machine) -> Prepared:
    """`prepared`, of `operator`, and what it takes to keep NaN. Only where `is_seen`.

    Raises UnsupportedFeatureError where the default engine could not compute it again.
    """
    if not any(_is_float(operator.y(index)) for index in range(len(operator.output_blobs))):
        return prepared
    if _leaves_no_trace(operator):
        return scanning(operator, prepared, machine)
    again = Recomputation(operator)
    watch = Watch()
    phases = _phases(prepared.step)
    if phases:
        return again.behind(prepared, NativeStep(watch.guarded(phases, again.run)))
    watched = _watched(prepared.step, watch)

    def run_all() -> None:
        for part in watched:
            part()
        if watch.note[0]:
            watch.note[0] = 0
            again.run()

    return again.behind(prepared, run_all)


def is_watched(operator: Operator) -> bool | None:
    """True where `keeping_nan` looks at the flag of invalid operations; None where it does something else."""
    if not any(_is_float(operator.y(index)) for index in range(len(operator.output_blobs))):
        return False
    return None if _leaves_no_trace(operator) else True


def keeping_nan_in_place(operator: Operator, prepared: Prepared, machine: Machine, index: int) -> Prepared:
    """As `keeping_nan`, for an operator that adds to what output 0, which is input `index`, held.

    Where that was finite, each NaN of the result comes from the other summand, which is computed again without it.
    """
    again = Recomputation(operator)
    watch = Watch()
    result = operator.y(0)
    looks, phases = _leaves_no_trace(operator), _phases(prepared.step)

    def correct(held: Array | None) -> None:
        again.inputs[index] = exact = np.zeros_like(result) if held is None else held
        again.compute([exact])
        if held is None:
            result[np.isnan(exact)] = np.nan
        else:
            _corrected(result, exact)

    if phases and not looks and can_scan(machine, result):
        scan, held = FiniteScan(machine, result, operator.label), list[Array]()

        def hold() -> None:
            held[:] = [result.copy()]

        def recover() -> None:
            correct(held[0] if scan.notes.any() else None)

        before = *scan.step.phases, (scan.piece(hold),)

        return again.behind(prepared, NativeStep((*before, *watch.guarded(phases, recover))))
    watched, flat = _watched(prepared.step, watch), result.reshape(-1)

    def run_all() -> None:
        held = None if _is_finite(flat) else result.copy()
        for part in watched:
            part()
        if watch.note[0] or (looks and not _is_finite(again.inputs[0].reshape(-1))):
            watch.note[0] = 0
            correct(held)

    return again.behind(prepared, run_all)


def scanning(operator: Operator, prepared: Prepared, machine: Machine) -> Prepared:
    """`prepared`, of `operator`, for code that no flag tells of: it looks for NaN in input 0.

    For operators of one tensor, and for layers, in whose sums each number that is not finite meets others.
    """
    if not _is_float(operator.x(0)):
        return prepared
    again = Recomputation(operator)
    step, phases = prepared.step, _phases(prepared.step)
    if phases and can_scan(machine, again.inputs[0]):
        scan = FiniteScan(machine, again.inputs[0], operator.label)
        whole = NativeStep((*phases, *scan.step.phases, (scan.piece(again.run),)), scan.step.native_tables)
        moved, move = prepared.input_rebinds.get(0), table_rebind(whole, again.inputs[0])
        if moved is not None and move is not None:
            prepared = replace(prepared, input_rebinds={**prepared.input_rebinds, 0: partial(_both, moved, move)})
        return again.behind(prepared, whole)

    def run_all() -> None:
        step()
        flat = again.inputs[0].reshape(-1)
        if not _is_finite(flat):
            again.run()

    return again.behind(prepared, run_all)


def _both(first: Rebind, second: Rebind, array: Array) -> None:
    first(array)
    second(array)


def _leaves_no_trace(operator: Operator) -> bool:
    """True for a convolution that oneDNN may compute as a product of matrices with a sigmoid behind it.

    That is compiled code: it compares, finds NaN below all limits and gives 0.
    """
    if operator.schema.image_role is not ImageRole.CONVOLUTION or "post_ops" not in operator.arguments:
        return False
    return any(one.kind == "sigmoid" for one in read_post_ops(operator.call()))


def _phases(step: Step) -> Phases | None:
    """The native calls that all parts of `step` are; None where one is something else."""
    found = [phases_of(part) for part in parts_of(step)]
    return None if None in found else tuple(phase for phases in found for phase in phases or ())


def _watched(step: Step, watch: Watch) -> list[Step]:
    """The parts of `step`, each of them watched."""
    found = ((part, phases_of(part)) for part in parts_of(step))
    return [watch.around(part) if phases is None else NativeStep(watch.guarded(phases, None)) for part, phases in found]


class Recomputation:
    """An operator of the default engine on the arrays of another, made when it is needed.

    Attributes:
        inputs: the arrays that are read. Constants are asked for when they are needed, as they may be in memory in
            packed form alone.
    """

    def __init__(self, operator: Operator) -> None:
        """`operator` is being prepared.

        Raises UnsupportedFeatureError for an operand whose axes do not say what it is in NCHW.
        """
        self._call = operator.call()
        self.inputs = [operator.x(index) for index in range(len(operator.input_blobs))]
        self._results = [operator.y(index) for index in range(len(operator.output_blobs))]
        self._label = operator.label
        self._said = False
        require_clear(self._call, self.inputs, self._results)
        self._constants: dict[int, Tensor] = {}
        for index in range(1, len(self.inputs)):
            tensor = operator.input(index)
            if tensor.constant is not None and tensor.current_array() is self.inputs[index]:
                self._constants[index] = tensor
                self.inputs[index] = _LATER

    def behind(self, prepared: Prepared, step: Step) -> Prepared:
        """`step`, which may run this, in place of the step of `prepared`, a primitive: it is rebound with that."""
        inputs, outputs = prepared.input_rebinds, prepared.output_rebinds
        return Prepared(step, _followed(inputs, self.inputs), _followed(outputs, self._results))

    def run(self) -> None:
        """Correct the results."""
        exact = [np.empty_like(result) for result in self._results]
        self.compute(exact)
        rows = sum(_corrected(*pair) for pair in zip(self._results, exact, strict=True) if _is_float(pair[0]))
        if rows and not self._said:
            self._said = True
            logger.info("%s: a maximum met NaN: the default engine computed %d row(s) of the result", self._label, rows)

    def compute(self, results: list[Array]) -> None:
        """Write to `results` what the default engine computes."""
        inputs = [self._constants[i].array if array is _LATER else array for i, array in enumerate(self.inputs)]
        twin = nchw_fallback(self._call, inputs, results, "")
        for step in (*twin.before, twin.operator.bind(twin.operator.infer()).step, *twin.after):
            step()


def _followed(rebinds: Mapping[int, Rebind], arrays: list[Array]) -> dict[int, Rebind]:
    """`rebinds`, which put the array into `arrays` as well."""
    return {index: partial(_rebound, rebind, arrays, index) for index, rebind in rebinds.items()}


def _rebound(rebind: Rebind, arrays: list[Array], index: int, array: Array) -> None:
    arrays[index] = array
    rebind(array)


def _corrected(result: Array, right: Array) -> int:
    """Take rows from `right` that have a NaN where those of `result` have none, or the other way round: how many."""
    differs = np.isnan(result) != np.isnan(right)
    if result.ndim == 0:
        np.copyto(result, right, where=differs)
        return int(differs)
    rows = differs.reshape(len(differs), -1).any(axis=1)
    result[rows] = right[rows]
    return int(rows.sum())


def _is_finite(flat: Array) -> bool:
    """False when there is a NaN or an infinity, and where float32 is too large for its square."""
    if flat.dtype == np.float32:
        return math.isfinite(np.dot(flat, flat))
    least = 0x7C00 if flat.dtype == np.float16 else 0x7F80
    return int((flat.view(np.uint16) & 0x7FFF).max()) < least


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
