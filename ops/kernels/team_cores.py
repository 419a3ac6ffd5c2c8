"""The cores that threads of a team compute on: each sets its own mask, as an identifier may be another's by then."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache

import numpy as np

from dagexec.ops.kernels.machine_code import executable
from dagexec.ops.kernels.team import Team

_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53 4889fb"  # push rbx; rbx = what is to be done
    "ff13 85c0 7411"  # eax = omp_get_thread_num(); 0, the caller: jmp 1f
    "488b7308 488d5310 31ff b8cb000000 0f05"  # sched_setaffinity(0, bytes, mask)
    "5b c3"  # 1:
)

_WORDS = 16  # of a mask: 1,024 cores


def restrict_others(team: Team, threads: int, cores: Iterable[int]) -> None:
    """Have the threads of the team but the calling one compute on `cores` from now on. It has `threads` afterwards.

    Nothing changes where the system forbids it, or does not run machine code.
    """
    code = _code()
    mask = sum(1 << core for core in cores)
    if code is None or not 0 < mask < 1 << 64 * _WORDS:
        return
    words = [mask >> 64 * number & (1 << 64) - 1 for number in range(_WORDS)]
    data = np.array([team.thread_number, 8 * _WORDS, *words], np.uint64)
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(team.parallel)
    parallel(code, data.ctypes.data, threads, 0)


@cache
def _code() -> int | None:
    """The address of the code that a thread of the team runs."""
    return executable(_CODE)
