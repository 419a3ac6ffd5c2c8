"""The binding to oneDNN: its C API through cffi in ABI mode, so nothing is compiled and the library may be absent.

The library is looked for once, when it is first asked for: at `DAGEXEC_ONEDNN` (a path, or "off"), in the environment's
own `lib` folder, where pip puts it (extra `onednn`), then where the system's loader looks. Versions from 3.1
serve; their functions and constants used here are the same in all of them. The numbers are those of the C headers of
oneDNN 3.1 (`dnnl_types.h`, `dnnl_common_types.h`), Apache-2.0.

Without it the engine has the kernels of `dagexec.ops.kernels` alone: a `Library` of which no primitive can be made.

cffi lets other threads run while a call lasts.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dagexec.errors import DagexecError, DeviceError, ResourceError, UnsupportedFeatureError
from dagexec.ops.kernels.machine import Machine
from dagexec.platform import machine_code
from dagexec.platform.cached import cached_property
from dagexec.platform.forking import ProcessLock, without_fork
from dagexec.platform.library_pages import give_back_library_pages, give_back_when_prepared
from dagexec.platform.processor import InstructionSet, instruction_set, own_instruction_set
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec")

OLDEST_VERSION = (3, 1)

_kept_loaded: list[Any] = []
"""Libraries whose pages are given back: were one unloaded, other memory would be lost in their place."""

_SUCCESS, _OUT_OF_MEMORY, _INVALID_ARGUMENTS, _UNIMPLEMENTED, _LAST_IMPLEMENTATION, _RUNTIME_ERROR = range(6)
_FLOAT32 = 3
_OPENMP_RUNTIME = 2
_RUNTIMES = {1: "one thread", _OPENMP_RUNTIME: "OpenMP", 4: "TBB"}
_OTHER_RUNTIMES = {8: "a thread pool of the caller", 256: "OpenCL", 512: "SYCL"}

_BINDING = ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


@dataclass(frozen=True)
class Library:
    """oneDNN, loaded, and the machine that our own kernels run on; or that machine alone.

    Attributes:
        path: the file, for messages.
        version: (major, minor, patch).
        isa: the instruction set that code is generated for.
        ffi: cffi's view of the types.
        lib: the C functions; None without oneDNN.
        engine: the CPU engine, which lives as long as the process.
        openmp: the OpenMP functions of the runtime that it uses; None for other threading.
    """

    path: str
    version: tuple[int, int, int]
    isa: InstructionSet
    ffi: Any
    lib: Any
    engine: Any
    openmp: Any

    @property
    def has_primitives(self) -> bool:
        """False without oneDNN."""
        return self.lib is not None

    @cached_property
    def machine(self) -> Machine:
        """What kernels of our own run on beside it: the instruction set that it may use."""
        return Machine(self.isa.lanes if self.isa.name != "AVX" else 1)

    def described(self) -> str:
        """Version and instruction set, for keys of choices and for reports."""
        if not self.has_primitives:
            return f"own kernels {self.isa.name}"
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

    def use_one_thread(self) -> None:
        """Have primitives that the calling thread makes or executes from now on compute in that thread."""
        if self.openmp is not None:
            self.openmp.omp_set_num_threads(1)

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
        logger.info("oneDNN is not available, NumPy computes: %s", _NO_CODE)
        _found[0] = found = None
    return found


def engine_library() -> Library | None:
    """What engine ONEDNN computes with: oneDNN, or our own kernels alone; None where neither can, or not any more."""
    return library() or (own_kernels() if machine_code.is_allowed() else None)


def known_library() -> Library | None:
    """As `engine_library` found it; a system that forbids it from now on is noticed when code is to be made."""
    return (_found[0] if _found else library()) or own_kernels()


@cache
def own_kernels() -> Library | None:
    """Our own kernels alone; None where they cannot run."""
    types = SimpleNamespace(NULL=None)
    found = Library("", (0, 0, 0), own_instruction_set(), types, None, None, None)
    return found if found.machine.can_run else None


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
    instead = "NumPy computes" if own_kernels() is None else "our own kernels compute"
    logger.info("oneDNN is not available, %s: %s", instead, "; ".join(reasons) or "it is switched off")
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
    from dagexec.ops.engines.onednn.declared import ffi

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
    ffi.new("exec_arg_t[]", 1)  # cffi 2.1 finds its size at first use, and two threads at once without the GIL fail
    engine = ffi.new("h *")
    if lib.dnnl_engine_create(engine, 1, 0) != _SUCCESS:
        raise DeviceError(f"{path}: oneDNN {'.'.join(map(str, version))} has no CPU engine here")
    lib.dnnl_set_primitive_cache_capacity(0)  # 3.1 gives one implementation forever when it caches; we keep our own
    isa = instruction_set(int(lib.dnnl_get_effective_cpu_isa()))
    openmp = _openmp(path, found.cpu_runtime)
    loaded = Library(path, version, isa, ffi, lib, engine[0], openmp)
    try:
        _try_generating(loaded)
    except DagexecError as error:
        raise DeviceError(f"{path}: {error}") from None
    _kept_loaded.append(lib)
    give_back_when_prepared(path)
    give_back_library_pages()
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
    """Within it, a libgomp that is loaded is not told to bind threads to cores. Child processes do not see that.

    It would put the thread that loads it on the first core, with all threads that this one starts. Primitives compute
    in the threads that execute them, one each, so that no other setting counts.

    A libgomp that already exists is left alone. Copies that packages bring along have other names, and are not the one
    that oneDNN loads.
    """
    if _is_loaded("libgomp.so"):
        yield
        return
    before = {name: os.environ.pop(name) for name in _BINDING if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


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
    return openmp
