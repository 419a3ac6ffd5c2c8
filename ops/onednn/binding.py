"""The binding to oneDNN: its C API through cffi in ABI mode, so nothing is compiled and the library may be absent.

The library is looked for once, when it is first asked for: at `DAGEXEC_ONEDNN` (a path, or "off"), in the environment's
own `lib` folder, where pip puts it (extra `onednn`), then where the system's loader looks. Versions from 3.1
serve; their functions and constants used here are the same in all of them. The numbers are those of the C headers of
oneDNN 3.1 (`dnnl_types.h`, `dnnl_common_types.h`), Apache-2.0.

cffi lets other threads run while a call lasts.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from dagexec.errors import DagexecError, DeviceError, ResourceError, UnsupportedFeatureError
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.team import Team
from dagexec.ops.kernels.team_cores import restrict_others
from dagexec.platform import machine_code, teams
from dagexec.platform.extras import install_command
from dagexec.platform.forking import ProcessLock, without_fork
from dagexec.platform.library_pages import give_back_library_pages, give_back_when_prepared
from dagexec.platform.processor import InstructionSet, instruction_set

logger = logging.getLogger("dagexec")

OLDEST_VERSION = (3, 1)

_TEAM_FUNCTIONS = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"
_PAUSE_SOFT = 1

_SUCCESS, _OUT_OF_MEMORY, _INVALID_ARGUMENTS, _UNIMPLEMENTED, _LAST_IMPLEMENTATION, _RUNTIME_ERROR = range(6)
_FLOAT32 = 3
_OPENMP_RUNTIME = 2
_RUNTIMES = {1: "one thread", _OPENMP_RUNTIME: "OpenMP", 4: "TBB"}
_OTHER_RUNTIMES = {8: "a thread pool of the caller", 256: "OpenCL", 512: "SYCL"}

_SPINS = "2000"  # iterations of libgomp's waiting loop, 20 ns each
_BINDING = ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


@dataclass(frozen=True)
class Library:
    """oneDNN, loaded.

    Attributes:
        path: the file, for messages.
        version: (major, minor, patch).
        isa: the instruction set that it generates code for.
        ffi: cffi's view of the types.
        lib: the C functions.
        engine: the CPU engine, which lives as long as the process.
        openmp: the OpenMP functions of the runtime that it uses; None for other threading.
        team: the most threads that its runtime is certain to give a primitive that asks for them.
    """

    path: str
    version: tuple[int, int, int]
    isa: InstructionSet
    ffi: Any
    lib: Any
    engine: Any
    openmp: Any
    team: float = math.inf

    @cached_property
    def machine(self) -> Machine:
        """What kernels of our own run on beside it: the instruction set that it may use, and its threads."""
        return Machine(self.isa.lanes if self.isa.name != "AVX" else 1, self._threads())

    def _threads(self) -> Team | None:
        """The threads of its runtime, for kernels; None where they cannot be called."""
        try:
            functions = [getattr(self.openmp, name) for name in _TEAM_FUNCTIONS]
        except (AttributeError, self.ffi.error):  # no OpenMP, or another one
            return None
        return Team(*(int(self.ffi.cast("uintptr_t", function)) for function in functions))

    def described(self) -> str:
        """Version and instruction set, for keys of choices and for reports."""
        return f"{'.'.join(map(str, self.version))} {self.isa.name}"

    def check(self, status: int, what: str) -> None:
        """Raise unless `status` is success.

        UnsupportedFeatureError when oneDNN has no implementation or takes no such arguments, ResourceError when memory
        does not suffice, otherwise DagexecError; `what` says what was requested.
        """
        if status == _SUCCESS:
            return
        version = ".".join(map(str, self.version))
        if status in (_UNIMPLEMENTED, _LAST_IMPLEMENTATION):
            raise UnsupportedFeatureError(f"{what}: oneDNN {version} has no implementation")
        if status == _INVALID_ARGUMENTS:
            raise UnsupportedFeatureError(f"{what}: oneDNN {version} does not accept these arguments")
        if status == _OUT_OF_MEMORY:
            raise ResourceError(f"{what}: oneDNN {version} is out of memory")
        raise DagexecError(f"{what}: oneDNN {version} refused it with status {status}")

    def check_allowed(self, what: str) -> None:
        """UnsupportedFeatureError where code cannot run any more: some primitives end the process when they try."""
        if not machine_code.is_allowed():
            raise UnsupportedFeatureError(f"{what}: {_NO_CODE}")

    def check_generated(self, status: int, what: str) -> None:
        """`check`, of a primitive that was to be created: UnsupportedFeatureError also where its code cannot run.

        A system that forbids to execute memory that was written to may do so from any moment of a process on.
        """
        if status == _RUNTIME_ERROR:
            raise UnsupportedFeatureError(f"{what}: {_NO_CODE}")
        self.check(status, what)

    def set_threads(self, threads: int) -> None:
        """What primitives made or executed by the calling thread may use from now on."""
        if self.openmp is not None:
            self.openmp.omp_set_num_threads(threads)

    def dims(self, values: Any) -> Any:
        """`values` as a `dnnl_dims_t`."""
        return self.ffi.new("dims_t", list(values))


_NO_CODE = "oneDNN cannot generate code: this process may not execute memory that it wrote"

_lock = ProcessLock()
_found: list[Library | None] = []


def library() -> Library | None:
    """oneDNN, or None where it cannot be used, or not any more; the reason is logged once."""
    if not _found:
        with without_fork(), _lock.own:
            if not _found:
                _found.append(_search())
    found = _found[0]
    if found is not None and not machine_code.is_allowed():
        logger.info("engine ONEDNN is not available, NumPy computes: %s", _NO_CODE)
        _found[0] = found = None
    return found


def require_library(label: str) -> Library:
    """oneDNN. Raises UnsupportedFeatureError, naming the operator `label`, where it cannot be used."""
    found = library()
    if found is None:
        raise UnsupportedFeatureError(f"{label}: oneDNN is not available; install it with: {install_command('onednn')}")
    return found


def usable_threads(threads: int) -> int:
    """How many of `threads` threads a primitive may have, so that it gets them.

    1 in a forked child that would wait for threads of the parent (`teams.stranded`). No more than the runtime gives: a
    primitive that was made for a team of two and gets one thread leaves half of its result as it was.
    """
    if teams.stranded():
        return 1
    found = library()
    return threads if found is None else int(min(threads, found.team))


def _search() -> Library | None:
    reasons = []
    for path in _candidates():
        try:
            found = load(path)
        except DeviceError as error:
            reasons.append(str(error))
            continue
        logger.debug("oneDNN %s at %s", ".".join(map(str, found.version)), found.path)
        return found
    logger.info("engine ONEDNN is not available, NumPy computes: %s", "; ".join(reasons) or "it is switched off")
    return None


def _candidates() -> Iterator[str]:
    asked = os.environ.get("DAGEXEC_ONEDNN", "")
    if asked == "off":
        return
    if asked:
        yield asked
        return
    for folder in dict.fromkeys((sys.prefix, sys.base_prefix)):
        for file in ("libdnnl.so.3", "libdnnl.3.dylib", "dnnl.dll"):
            path = Path(folder) / ("Library/bin" if file.endswith("dll") else "lib") / file
            if path.exists():
                yield str(path)
    yield "libdnnl.so.3"


@lru_cache(maxsize=1)
def _ffi() -> Any:
    """The declarations, translated beforehand: cffi's parser would take 20 ms and 2 MB of every process."""
    from dagexec.ops.onednn.declared import ffi

    return ffi


def load(path: str) -> Library:
    """The library at `path`. Raises DeviceError when it cannot be loaded, is too old or has no CPU engine."""
    try:
        ffi = _ffi()
    except ImportError:
        raise DeviceError(f"{path}: the package cffi is not installed") from None
    try:
        with _openmp_settings():
            lib = ffi.dlopen(path)
        found = lib.dnnl_version()
    except (OSError, ffi.error) as error:
        raise DeviceError(f"{path}: {error}") from None
    version = (found.major, found.minor, found.patch)
    if version[:2] < OLDEST_VERSION or version[0] != OLDEST_VERSION[0]:
        raise DeviceError(f"{path}: oneDNN {'.'.join(map(str, version))}; 3.1 or a newer 3.x is needed")
    if found.cpu_runtime not in _RUNTIMES:
        runtime = _OTHER_RUNTIMES.get(found.cpu_runtime, f"runtime {found.cpu_runtime}")
        known = ", ".join(_RUNTIMES.values())
        raise DeviceError(f"{path}: oneDNN {'.'.join(map(str, version))} is built for {runtime}; expected {known}")
    engine = ffi.new("h *")
    if lib.dnnl_engine_create(engine, 1, 0) != _SUCCESS:
        raise DeviceError(f"{path}: oneDNN {'.'.join(map(str, version))} has no CPU engine here")
    lib.dnnl_set_primitive_cache_capacity(0)  # 3.1 gives one implementation forever when it caches; we keep our own
    isa = instruction_set(int(lib.dnnl_get_effective_cpu_isa()))
    openmp = _openmp(path, found.cpu_runtime)
    loaded = Library(path, version, isa, ffi, lib, engine[0], openmp, _team(openmp))
    try:
        _try_generating(loaded)
    except DagexecError as error:
        raise DeviceError(f"{path}: {error}") from None
    give_back_when_prepared(path)
    give_back_library_pages()
    team = loaded.machine.team
    if team is not None:
        teams.on_restrict(partial(restrict_others, team))
    return loaded


def _try_generating(library: Library) -> None:
    """Make one primitive, the copy of a matrix to another layout. Raises DagexecError where that cannot be had."""
    ffi, lib, engine = library.ffi, library.lib, library.engine

    def made(create: Any, destroy: Any, *arguments: Any) -> Any:
        handle = ffi.new("h *")
        library.check_generated(create(handle, *arguments), "a copy")
        return ffi.gc(handle[0], destroy)

    size, strides = library.dims((32, 32)), (library.dims((32, 1)), library.dims((1, 32)))
    describe, forget = lib.dnnl_memory_desc_create_with_strides, lib.dnnl_memory_desc_destroy
    source, target = (made(describe, forget, 2, size, _FLOAT32, steps) for steps in strides)
    layouts = (source, engine, target, engine)
    copy = made(lib.dnnl_reorder_primitive_desc_create, lib.dnnl_primitive_desc_destroy, *layouts, ffi.NULL)
    made(lib.dnnl_primitive_create, lib.dnnl_primitive_destroy, copy)


@contextmanager
def _openmp_settings() -> Iterator[None]:
    """Within it, a libgomp that is loaded takes the settings that suit workers. Child processes do not see them.

    Threads of its teams that wait, for the next primitive or for each other, spin for 40 us, not for 4 ms, and then
    sleep. So long they would take a core from other workers after each primitive of several threads, and from each
    other where other processes use the cores: then a team is on one core, and each barrier takes as long as they spin
    several times over. The policy `active` has them spin for 20 us where there are more of them than cores. What the
    user set of these stays.

    What binds threads to cores is kept from it. It would put every thread that has a team on the first core, the one
    that loads it at once, with all threads that this one starts.

    A libgomp that already exists is left alone. Copies that packages bring along have other names, and are not the one
    that oneDNN loads.
    """
    if _is_loaded("libgomp.so"):
        yield
        return
    before = dict(os.environ)
    spins = {"GOMP_SPINCOUNT": _SPINS, "OMP_WAIT_POLICY": "active"}
    if not spins.keys() & before.keys():
        os.environ.update(spins)
    for name in _BINDING:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in (*spins, *_BINDING):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _is_loaded(library: str) -> bool:
    """True when a file whose name begins so is mapped into this process; False where that cannot be seen."""
    try:
        return f"/{library}" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _openmp(path: str, runtime: int) -> Any:
    """The OpenMP that the library at `path` uses. None without one.

    It is found as the loader has found it: first among what all libraries of the process see, where another runtime may
    stand in (LD_PRELOAD, RTLD_GLOBAL), then among what the library was linked to.
    """
    if runtime != _OPENMP_RUNTIME:
        return None
    ffi = _ffi()
    for place in (None, path):
        try:
            openmp = ffi.dlopen(place)
            openmp.omp_get_max_threads()
            break
        except (OSError, ffi.error):
            continue
    else:
        return None
    try:
        pause = openmp.omp_pause_resource_all
        teams.on_release(lambda: (pause(_PAUSE_SOFT), openmp))  # a function alone does not keep its library loaded
    except ffi.error:  # before OpenMP 5.0 threads keep their teams
        teams.on_release(None)
    return openmp


def _team(openmp: Any) -> float:
    """The most threads that OpenMP gives in any case: settings may limit them, or let the runtime give fewer."""
    if openmp is None:
        return math.inf
    fixed = openmp.omp_get_max_active_levels() and not openmp.omp_get_dynamic()
    limit = int(openmp.omp_get_thread_limit()) if fixed else 1
    if limit == 1:
        logger.info("operators use one thread each: OpenMP's settings allow no more, or fewer than requested")
    return limit
