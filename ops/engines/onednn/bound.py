"""Primitives bound to arrays: steps that a run calls, without arguments, at half a microsecond beyond the work itself.

Arguments may be at other places from one run to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dagexec.core.native import NativeCall
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import Array, Descriptor
from dagexec.platform.addresses import address_of

if TYPE_CHECKING:
    from dagexec.ops.engines.onednn.primitive import Primitive


class Rebindable(Protocol):
    """Arguments of a candidate that may be at other places from one run to the next; see BoundPrimitive."""

    def move(self, number: int, array: Array) -> None:
        """Let argument `number` be at another array of the same layout."""

    def nbytes(self, number: int) -> int:
        """Bytes that argument `number` takes."""


class ArgumentRebind:
    """Has one argument be at another array."""

    __slots__ = ("bound", "number")

    def __init__(self, bound: Rebindable, number: int) -> None:
        self.bound = bound
        self.number = number

    def __call__(self, array: Array) -> None:
        self.bound.move(self.number, array)


class _Memory:
    """A `dnnl_memory_t`: an array, and a descriptor of it. Primitives on the same memory share it until they move."""

    __slots__ = ("__weakref__", "_library", "array", "descriptor", "handle", "is_shared")

    def __init__(self, library: Library, descriptor: Descriptor, array: Array, address: int, label: str) -> None:
        """`array` begins at `address`."""
        self.descriptor = descriptor
        self.array = array
        self.is_shared = False
        self._library = library
        handle = library.ffi.new("h *")
        status = library.lib.dnnl_memory_create(
            handle, descriptor.handle, library.engine, library.ffi.cast("void *", address)
        )
        if status:
            library.check(status, f"{label}: memory")
        self.handle = library.ffi.gc(handle[0], library.lib.dnnl_memory_destroy)

    def move(self, array: Array) -> None:
        """Be at another array from now on."""
        address = self._library.ffi.cast("void *", address_of(array))
        self._library.check(self._library.lib.dnnl_memory_set_data_handle(self.handle, address), "moving an argument")
        self.array = array


Memory = _Memory
"""What `memory_at` gives."""

_memories: weakref.WeakValueDictionary[Hashable, _Memory] = weakref.WeakValueDictionary()
"""By descriptor and address; an address is not used anew while the memory's array is there."""


def memory_at(library: Library, descriptor: Descriptor, array: Array, address: int, label: str) -> Memory:
    """The memory of `array`, which begins at `address`, as `descriptor` says; one that may be there already."""
    if descriptor.key is None:
        return _Memory(library, descriptor, array, address, label)
    key = id(descriptor), address  # which the memory keeps
    found = _memories.get(key)
    if found is None:
        found = _Memory(library, descriptor, array, address, label)
        found.is_shared = True  # before another thread finds it, and moves what it takes for its own
        _memories[key] = found
    return found


class BoundPrimitive:
    """A primitive and its memory: a step that executes it, one thread at a time, and a native call."""

    __slots__ = ("__weakref__", "_label", "_memories", "_numbers", "_packed", "primitive")

    def __init__(self, primitive: Primitive, numbers: tuple[int, ...], memories: list[Memory], label: str) -> None:
        """`numbers` are those of the arguments, of which `memories` are the values."""
        self.primitive = primitive
        self._label = label
        self._numbers = numbers
        self._memories = memories
        rows = [(number, memory.handle) for number, memory in zip(numbers, memories, strict=True)]
        self._packed = primitive.library.ffi.new("exec_arg_t[]", rows or 1)

    @property
    def step(self) -> Callable[[], None]:
        """The step, which is this object."""
        return self

    def __call__(self) -> None:
        """Execute it."""
        functions, primitive = _functions(self.primitive.library), self.primitive
        if functions.set_threads is not None:
            functions.set_threads(1)
        if functions.execute(primitive.handle, functions.stream, len(self._numbers), self._packed):
            raise self._failure()

    @property
    def native_call(self) -> NativeCall:
        """See `native.native_call`."""
        packed = int(self.primitive.library.ffi.cast("uintptr_t", self._packed))
        return execution(self.primitive, len(self._numbers), packed, self._failure, self)

    def _failure(self) -> DagexecError:
        return DagexecError(f"{self._label}: oneDNN failed to execute {self.primitive.descriptor.name}")

    @property
    def memories(self) -> Mapping[int, Memory]:
        """The memory of the arguments, by their numbers."""
        return dict(zip(self._numbers, self._memories, strict=True))

    def run_once(self) -> None:
        """Execute it, never again, and let go of its memory."""
        self()
        self._memories.clear()

    def nbytes(self, number: int) -> int:
        """Bytes that argument `number` takes."""
        return self._memories[self._numbers.index(number)].descriptor.nbytes

    def move(self, number: int, array: Array) -> None:
        """Let argument `number` be at another array of the same layout from now on."""
        place = self._numbers.index(number)
        memory = self._memories[place]
        if not memory.is_shared:
            memory.move(array)
            return
        own = _Memory(self.primitive.library, memory.descriptor, array, address_of(array), self._label)
        self._packed[place].memory = own.handle
        self._memories[place] = own


def bound_primitive_of(step: Callable[[], object]) -> BoundPrimitive | None:
    """The primitive that `step` executes, and its memory; None when it does something else."""
    return step if isinstance(step, BoundPrimitive) else None


def execution(
    primitive: Primitive, count: int, packed: int, failure: Callable[[], Exception], keeps: object
) -> NativeCall:
    """The call that executes `primitive` on `count` arguments, which lie at the address `packed`."""
    functions = _functions(primitive.library)
    handle = int(primitive.library.ffi.cast("uintptr_t", primitive.handle))
    run, stream, set_threads = functions.addresses
    before = (set_threads, 1) if set_threads else None
    return NativeCall(run, (handle, stream, count, packed), before, failure, keeps)


class _Functions(NamedTuple):
    """What executes primitives: functions, the stream, and the addresses of `execute`, stream and `set_threads`."""

    execute: Callable[..., int]
    stream: Any
    set_threads: Callable[[int], None] | None
    addresses: tuple[int, int, int]


_functions_of: dict[int, _Functions] = {}


def _functions(library: Library) -> _Functions:
    """Those of `library`, with the stream that everything is executed on: on a processor it holds nothing of a run."""
    found = _functions_of.get(id(library))
    if found is None:
        handle = library.ffi.new("h *")
        library.check(library.lib.dnnl_stream_create(handle, library.engine, 1), "a stream")
        stream = library.ffi.gc(handle[0], library.lib.dnnl_stream_destroy)
        execute = library.lib.dnnl_primitive_execute
        set_threads = None if library.openmp is None else library.openmp.omp_set_num_threads

        def address(pointer: Any) -> int:
            return 0 if pointer is None else int(library.ffi.cast("uintptr_t", pointer))

        addresses = address(execute), address(stream), address(set_threads)
        found = _functions_of.setdefault(id(library), _Functions(execute, stream, set_threads, addresses))
    return found
