"""What the processor has: instruction set, vector width, cores that this process may use, and caches.

Everything that depends on the processor asks here: blocks of channel layouts, candidates for measuring, cost rules,
numbers of threads, and the keys of stored choices. Two processors of one name may differ in what they can do, and a
library may be told to use less than there is (`ONEDNN_MAX_CPU_ISA`, `OPENBLAS_CORETYPE`), so a key names the
instruction sets in effect and not only the name.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dagexec.platform import system
from dagexec.platform.cgroups import control_groups
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass
from dagexec.platform.system import affinity, caches, processor_field

if not TYPE_CHECKING:
    threadpoolctl = LazyModule("threadpoolctl")
else:
    import threadpoolctl


_FLOAT32_BITS = 32
_DEFAULT_CACHE = 32 << 20
_DEFAULT_CORE_CACHE = 1 << 20
_DEFAULT_WAYS = 8


@dataclass(frozen=True)
class InstructionSet:
    """What a library of kernels generates code for.

    Attributes:
        name: as oneDNN spells it in `ONEDNN_MAX_CPU_ISA`, such as "AVX2".
        lanes: float32 numbers in a vector.
        bfloat16: products of bfloat16 are instructions.
        int8: sums of products of int8 are instructions, and exact (VNNI).
    """

    name: str
    lanes: int
    bfloat16: bool = False
    int8: bool = False


_VNNI, _BF16 = 0x40 | 0x08, 0x80 | 0x10
_SETS = (  # bits of dnnl_cpu_isa_t (oneDNN's dnnl_types.h), the newest first; a set has those of its predecessors
    (0x0FEF, "AVX512_CORE_AMX", 512),
    (0x01EF, "AVX512_CORE_FP16", 512),
    (0x00E7, "AVX512_CORE_BF16", 512),
    (0x0067, "AVX512_CORE_VNNI", 512),
    (0x0027, "AVX512_CORE", 512),
    (0x001F, "AVX2_VNNI_2", 256),
    (0x000F, "AVX2_VNNI", 256),
    (0x0007, "AVX2", 256),
    (0x0003, "AVX", 256),
    (0x0001, "SSE41", 128),
)


_AVX2, _AVX512 = ("avx2", "fma"), ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDED = {  # by their bits of dnnl_cpu_isa_t, the features of instructions that came with a set
    0x01: {"sse4_1"},
    0x02: {"avx"},
    0x04: {*_AVX2},
    0x20: {*_AVX512},
}
_AS_LINUX = {
    "sse41": ("sse4_1",),
    "fma3": ("fma",),
    "avx512_skx": _AVX512,
    "x86_v3": ("sse4_1", "avx", *_AVX2),
    "x86_v4": ("sse4_1", "avx", *_AVX2, *_AVX512),
}
"""NumPy's names of features in Linux's words, where they differ."""

PLAIN, NEON = InstructionSet("plain", 1), InstructionSet("NEON", 8)


def instruction_set(bits: int) -> InstructionSet:
    """The instruction set of a number of `dnnl_cpu_isa_t`: the newest known set that it includes."""
    for needed, name, width in _SETS:
        if bits & needed == needed:
            return InstructionSet(name, width // _FLOAT32_BITS, bool(bits & _BF16), bool(bits & _VNNI))
    return PLAIN


@cache
def own_instruction_set() -> InstructionSet:
    """What kernels of our own may use on this processor, found without a library of kernels.

    It is no more than `ONEDNN_MAX_CPU_ISA` allows, and no newer than AVX512_CORE: they use nothing that came later. On
    64-bit Arm a vector is two of NEON's registers.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return NEON
    features = _features()
    bits = sum(bit for bit, needed in _NEEDED.items() if needed <= features)
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return instruction_set(bits & next((needed for needed, name, _ in _SETS if name == allowed), bits))


def _features() -> frozenset[str]:
    """What an x86 processor and its system offer, as Linux calls it; elsewhere what NumPy knows of it."""
    flags = processor_field("flags")
    if flags:
        return frozenset(flags.split())
    known = getattr(getattr(np, "_core", None), "_multiarray_umath", None)
    names = {name.lower() for name, there in getattr(known, "__cpu_features__", {}).items() if there}
    return frozenset(feature for name in names for feature in _AS_LINUX.get(name, (name,)))


@cache
def numpy_instruction_set() -> str:
    """The newest extension that NumPy's loops use here, such as "AVX512_SPR"; "baseline" where there is none."""
    try:
        found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    except (KeyError, TypeError, AttributeError):
        return "baseline"
    return str(found[-1]) if found else "baseline"


@cache
def blas_core() -> str:
    """The processor that NumPy's OpenBLAS has kernels for, such as "Haswell"; "" where NumPy has another BLAS."""
    libraries = threadpoolctl.ThreadpoolController().select(internal_api="openblas").info()
    own = [library for library in libraries if "numpy" in library["filepath"]]
    return next((str(library.get("architecture", "")) for library in own or libraries), "")


@cache
def processor_name() -> str:
    """The name of this machine's processor, such as "AMD EPYC 9B14"; its architecture where no name is known."""
    return system.processor_name() or platform.processor() or platform.machine()


@cache
def processor_key() -> str:
    """The part of a choice's key that says on which processor a measurement holds."""
    blas = os.environ.get("OPENBLAS_CORETYPE", "")
    told = f" as {blas}" if blas else ""
    return f"{processor_name()}, {numpy_instruction_set()}{told}"


_most_cores = math.inf


def limit_cores(cores: int) -> None:
    """This process keeps no more than so many cores busy from now on, as others of the machine are for others."""
    global _most_cores
    _most_cores = cores


def available_cores() -> int:
    """Cores this process may keep busy: of its affinity, and no more than `limit_cores` and its control group allow.

    A quota of 1.5 cores counts as 1: threads that wait for each other would spend the rest on waiting.
    """
    return max(1, math.floor(min(affinity(), _most_cores, cpu_quota())))


@cache
def cpu_quota() -> float:
    """Cores that the control groups of this process grant it, as of the first call; infinity without a limit."""
    return min((quota for folder in control_groups("cpu") for quota in _quotas(folder)), default=math.inf)


def _quotas(folder: Path) -> Iterator[float]:
    """The limit of one control group, in cores, where it has one."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):  # none, "max", or a file that is something else
        return


@cache
def last_level_cache() -> int:
    """Bytes of the processor's largest cache, as far as the system tells; 32 MiB otherwise."""
    return max((one.nbytes for one in caches()), default=_DEFAULT_CACHE)


@cache
def core_cache() -> int:
    """Bytes of a core's second-level cache, as far as the system tells; 1 MiB otherwise."""
    return next((one.nbytes for one in caches() if one.level == 2), _DEFAULT_CORE_CACHE)


@cache
def nearest_cache_ways() -> int:
    """Places that a line of memory may have in a core's first-level cache, as far as the system tells; 8 otherwise."""
    return next((one.ways for one in caches() if one.level == 1 and one.ways), _DEFAULT_WAYS)
