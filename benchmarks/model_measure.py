"""How `models.py` measures one case: processes for all, results compared, then interleaved rounds of those that agree.

A contender whose results are not onnxruntime's has no time: its entry says how far they are apart.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from cnn_measure import OURS, Effort, best, paired, rounds
from cnn_peers import Turn
from cnn_process import AbsentError, Contender, ContenderError
from model_contenders import CALIBRATED, EXACT, ISLANDS, TUNED, Case, Column

REFERENCE = "onnxruntime"
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.05}
"""Of the range of an output's numbers, or where they are one, of that number."""
_MORE = 1.5
"""Times the reference's own distance from what is exact: rounding to 8 bits moves results of random weights far."""
_KINDS = {TUNED: OURS, ISLANDS: OURS, CALIBRATED: OURS, "torch eager": "torch", "torch compiled": "torch"}
"""Columns that are not named after their contender."""

Array = npt.NDArray[Any]
Entry = dict[str, Any]


def measured(case: Case, columns: Mapping[str, Column], effort: Effort) -> dict[str, Any]:
    """The row of one case: an entry for each column, and ratios of dagexec's time over the others'.

    Raises ContenderError where onnxruntime, which results are compared with, does not run the model.
    """
    with ExitStack() as stack:
        entries: dict[str, Entry] = {}
        running: dict[str, Contender] = {}
        for name, column in columns.items():
            if name == EXACT:
                continue
            try:
                running[name], tried = stack.enter_context(best(_peer(name), column.task, column.settings, effort))
                entries[name] = {"tried": tried} if len(tried) > 1 else {}
            except AbsentError as error:
                entries[name] = {"absent": str(error)}
            except ContenderError as error:
                entries[name] = {"failed": str(error)[:400]}
        if REFERENCE not in running:
            raise ContenderError(f"{case.name}: no results to compare with: {entries[REFERENCE]}")
        exact = _outputs(columns[EXACT]) if EXACT in columns else None
        for name, verdict in verdicts(running, TOLERANCES[case.precision], exact).items():
            entries[name] |= verdict
            if "refused" in verdict:
                running.pop(name).close()
        turns, disturbance = rounds(running, effort)
        for name, contender in running.items():
            entries[name] |= _entry(contender, turns[name])
    ratios = {
        name: round(paired(turns[OURS], theirs), 4) for name, theirs in turns.items() if OURS in turns and name != OURS
    }
    return {"contenders": entries, "ratios": ratios, "disturbance": round(disturbance, 3)}


def _peer(column: str) -> str:
    return _KINDS.get(column, column)


def _outputs(column: Column) -> list[Array]:
    with Contender(REFERENCE, column.task, column.settings[0]) as contender:
        return contender.outputs()


def _entry(contender: Contender, turns: Sequence[Turn]) -> Entry:
    memory = contender.memory()
    chosen = {"chosen": contender.chosen} if contender.chosen else {}
    return {
        "ms": round(1e3 * statistics.median(turn.median for turn in turns), 4),
        "least_ms": round(1e3 * min(turn.least for turn in turns), 4),
        "setting": {name: value for name, value in contender.options.items() if name != "calibration"},
        "first_result_s": round(contender.compile_seconds, 3),
        "resident_mib": round(memory.resident),
        "peak_mib": round(memory.peak),
        **chosen,
    }


def verdicts(running: Mapping[str, Any], tolerance: float, exact: Sequence[Array] | None = None) -> dict[str, Entry]:
    """For each contender how far its results are from the reference's, or with "refused", that they are too far.

    With `exact` they are compared with these, and the reference's own distance, and half of it, is allowed, too.
    """
    expected = running[REFERENCE].outputs() if exact is None else exact
    found: dict[str, Entry] = {}
    distances: dict[str, float] = {}
    for name, contender in running.items():
        outputs = contender.outputs()
        if [output.shape for output in outputs] == [array.shape for array in expected]:
            distances[name] = float(np.max([0.0, *map(_difference, outputs, expected)]))  # NaN, where there is one
        else:
            shapes = ", ".join(str(output.shape) for output in outputs)
            found[name] = {"refused": f"shapes {shapes}, where {REFERENCE}'s differ"}
    limit = max(tolerance, _MORE * distances[REFERENCE])
    for name, distance in distances.items():
        found[name] = Entry(difference=float(f"{distance:.3g}"))
        if not distance <= limit:
            found[name]["refused"] = f"a result is off by {distance:.2g} of the range, more than {limit:.2g}"
    return found


def _difference(output: Array, expected: Array) -> float:
    """The largest difference over the range of what is expected."""
    if not expected.size:
        return 0.0
    one, other = output.astype(np.float64), expected.astype(np.float64)
    span = np.ptp(other) or np.abs(other).max() or 1.0
    return float(np.abs(one - other).max() / span)


def first_results(columns: Mapping[str, Column]) -> dict[str, Entry]:
    """Seconds from a loaded library to the first result, in a fresh process: with nothing kept from before, and again.

    The second process finds what the first one kept: dagexec's choices and OpenVINO's blobs; onnxruntime keeps nothing.
    """
    found: dict[str, Entry] = {}
    for name, column in columns.items():
        with tempfile.TemporaryDirectory() as cache:
            options = dict(column.settings[0]) | ({"CACHE_DIR": cache} if name == "openvino" else {})
            kept = {key: value for key, value in column.task.environment.items() if key != "DAGEXEC_CHOICES"}
            task = replace(column.task, environment=kept | {"XDG_CACHE_HOME": os.fspath(cache)})
            try:
                found[name] = {when: _first_result(name, task, options) for when in ("cold_s", "warm_s")}
            except (AbsentError, ContenderError) as error:
                found[name] = {"failed": str(error)[:400]}
    return found


def _first_result(name: str, task: Any, options: Mapping[str, Any]) -> float:
    with Contender(_peer(name), task, options) as contender:
        return round(contender.compile_seconds, 3)
