"""Tables of calls on the threads of a team."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dagexec.ops.kernels.team import phased_step, team_step
from dagexec.ops.onednn.binding import library, require_library

_found = library()
pytestmark = pytest.mark.skipif(_found is None or not _found.machine.can_run, reason="no kernels run here")


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_team_runs_every_table(threads: int) -> None:
    """As many tables as threads or not: each fills its part."""
    memset = ctypes.cast(ctypes.CDLL(None).memset, ctypes.c_void_p).value
    assert memset is not None
    memory = np.zeros(60, np.uint8)
    tables = [
        [(memset, memory.ctypes.data + 10 * part + half, part + half + 1, 5, 0) for half in (0, 5)] for part in range(6)
    ]
    team_step(require_library("test").machine.team, threads, [*tables, []], memory, "test")()
    assert memory.tolist() == [part + half + 1 for part in range(6) for half in (0, 5) for _ in range(5)]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_phase_begins_when_the_one_before_has_ended(threads: int) -> None:
    """Each of 50 phases has every table copy its neighbor's place on: a value goes round only if all wait."""
    memcpy = ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value
    assert memcpy is not None
    tables, phases = 4, 50
    memory = np.zeros((phases + 1, tables), np.int64)
    memory[0] = range(tables)
    address, row = memory.ctypes.data, memory.strides[0]
    calls = [
        [
            [
                (
                    memcpy,
                    address + (phase + 1) * row + 8 * table,
                    address + phase * row + 8 * ((table + 1) % tables),
                    8,
                    0,
                )
            ]
            for table in range(tables)
        ]
        for phase in range(phases)
    ]
    phased_step(require_library("test").machine.team, threads, calls, memory, "test")()
    assert memory[-1].tolist() == [(table + phases) % tables for table in range(tables)]
