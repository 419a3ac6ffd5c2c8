"""Primitives of oneDNN as Python objects: the implementations of an operation, and their code.

A primitive is made for descriptors and one thread; `PrimitiveDescriptor.implementations` walks those that the library
offers. `bound` has them work on memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.bound import BoundPrimitive, memory_at
from dagexec.ops.engines.onednn.descriptors import (
    Array,
    Attributes,
    Cut,
    Described,
    Descriptor,
    handle_of,
    key_of,
    known_descriptors,
)
from dagexec.platform.addresses import address_of
from dagexec.platform.host_memory import check_room
from dagexec.platform.library_pages import note_made

_QUERY_IMPLEMENTATION = 8
SRC_MD, DIFF_SRC_MD, WEIGHTS_MD, DIFF_WEIGHTS_MD, DST_MD, DIFF_DST_MD, WORKSPACE_MD, SCRATCHPAD_MD = range(129, 137)
EXEC_ARG_MD = 255
"""dnnl_query_t of memory descriptors; EXEC_ARG_MD takes an argument number as index."""


class PrimitiveDescriptor(Described):
    """One implementation of an operation: its name, and the layouts that it wants.

    Attributes:
        request: what the library was asked for, the label and the arguments of `describe`.
    """

    __slots__ = ("__weakref__", "_ask", "_library", "_made", "_name", "_scratchpad_bytes", "request")

    def __init__(
        self,
        library: Library,
        handle: Any,
        ask: Callable[[], Any],
        request: tuple[str, str, Sequence[object]],
        key: Hashable | None = None,
    ) -> None:
        """Take over `handle`, made while the calling thread was set to one thread.

        `ask` asks the library again for such a handle, one that can go on to further implementations. `key` is another
        for everything else, None where that is not known.
        """
        self.key = key
        self._scratchpad_bytes: int | None = None
        self._made: weakref.ref[Primitive] | None = None
        self._library = library
        self.handle = library.ffi.gc(handle, library.lib.dnnl_primitive_desc_destroy)
        self._ask = ask
        self.request = request
        self._name = ""

    @property
    def name(self) -> str:
        """The implementation's name, such as `jit_wino_4x3:avx512_core`."""
        if not self._name:
            self._name = self._asked_name()
        return self._name

    def _asked_name(self) -> str:
        name = self._library.ffi.new("char **")
        status = self._library.lib.dnnl_primitive_desc_query(self.handle, _QUERY_IMPLEMENTATION, 0, name)
        self._library.check(status, "the name of an implementation")
        return bytes(self._library.ffi.string(name[0])).decode()

    @property
    def is_reference(self) -> bool:
        """True for the library's plain loops, which are there to be right and not to be fast."""
        return self.name.startswith("ref")

    @property
    def is_generated(self) -> bool:
        """True for code that was generated for the processor; False for what a compiler made of C++."""
        return "jit" in self.name or self.name.startswith("brg")

    def descriptor(self, query: int, index: int = 0) -> Descriptor:
        """The descriptor of an argument, as the implementation wants it; see SRC_MD and the others."""
        key = None if self.key is None else (self.key, query, index)
        known = None if key is None else known_descriptors.get((id(self._library), key))
        if known is not None:
            return known
        copy = self._library.ffi.new("h *")
        status = self._library.lib.dnnl_memory_desc_clone(copy, self._queried(query, index))
        self._library.check(status, "a descriptor of a primitive")
        found = Descriptor(self._library, copy[0], key)
        if key is not None:
            known_descriptors[id(self._library), key] = found
        return found

    def wants(self, query: int, index: int, known: Descriptor) -> bool:
        """True when `known` is the descriptor of that argument."""
        return bool(self._library.lib.dnnl_memory_desc_equal(self._queried(query, index), known.handle))

    def _queried(self, query: int, index: int) -> Any:
        """A descriptor that lives as long as this object."""
        return self._library.lib.dnnl_primitive_desc_query_md(self.handle, query, index)

    @property
    def scratchpad_bytes(self) -> int:
        """Bytes of working memory an execution needs; 64 more let it be aligned."""
        if self._scratchpad_bytes is None:
            self._scratchpad_bytes = int(self._library.lib.dnnl_memory_desc_get_size(self._queried(SCRATCHPAD_MD, 0)))
        return self._scratchpad_bytes

    def implementations(self) -> Iterator[PrimitiveDescriptor]:
        """All implementations that the library offers for the operation, in its order of preference; this is the first.

        The library is asked for more only when the first is not enough.
        """
        yield self
        library = self._library
        walk = library.ffi.gc(self._ask(), library.lib.dnnl_primitive_desc_destroy)
        while True:
            library.use_one_thread()
            if library.lib.dnnl_primitive_desc_next_impl(walk):
                return
            copy = library.ffi.new("h *")  # a copy stays where it is, and cannot go on from there
            library.check(library.lib.dnnl_primitive_desc_clone(copy, walk), "a primitive descriptor")
            yield PrimitiveDescriptor(library, copy[0], self._ask, self.request)

    def asked_for(self, cut: Cut) -> Iterator[PrimitiveDescriptor]:
        """The implementations of the operation for a part of its tensors, all cut; none where that cannot be.

        Its arguments were given as descriptors and attributes, not as handles.
        """
        label, function, arguments = self.request
        try:
            parts = [_part(one, cut) for one in arguments]
            yield from describe(self._library, label, function, *parts).implementations()
        except UnsupportedFeatureError:
            return

    def create(self) -> Primitive:
        """The primitive, one as long as somebody has it: its code is generated here."""
        made = None if self._made is None else self._made()
        if made is None:
            made = Primitive(self._library, self)
            self._made = weakref.ref(made)
        return made


def _part(argument: object, cut: Cut) -> object:
    """What is asked with in the place of an argument of `describe`, for a part."""
    if isinstance(argument, Descriptor):
        return argument.part(cut)[0]
    if isinstance(argument, PrimitiveDescriptor):  # a hint
        return next(argument.asked_for(cut))
    return argument.part(cut) if isinstance(argument, Attributes) else argument


_described: weakref.WeakValueDictionary[Hashable, PrimitiveDescriptor] = weakref.WeakValueDictionary()


def describe(
    library: Library, label: str, function: str, *arguments: object, key: Hashable | None = None
) -> PrimitiveDescriptor:
    """The first implementation of `dnnl_{function}_primitive_desc_create(..., *arguments)`.

    `arguments` are those after the descriptor to fill in, the engine included. With a `key`, which says all that they
    do, or arguments that have one (`key_of`), operators that ask the same share one, and its primitive, as long as any
    of them lives. Raises UnsupportedFeatureError, naming `label`, when the library has none or is not there, and what
    `Library.check` raises.
    """
    if not library.has_primitives:
        raise UnsupportedFeatureError(f"{label}: {function}: oneDNN is not available")
    if key is None:
        engine, null = library.engine, library.ffi.NULL
        key = key_of([0 if argument is engine or argument is null else argument for argument in arguments])
    whole = None if key is None else (id(library), function, key)
    known = None if whole is None else _described.get(whole)
    if known is not None:
        return known

    def ask() -> Any:
        check_room(f"{label}: {function}")
        handle = library.ffi.new("h *")
        library.use_one_thread()
        status = getattr(library.lib, f"dnnl_{function}_primitive_desc_create")(handle, *map(handle_of, arguments))
        library.check(status, f"{label}: {function}")
        return handle[0]

    found = PrimitiveDescriptor(library, ask(), ask, (label, function, arguments), whole)
    if whole is not None:
        _described[whole] = found
    return found


_made = [0]


def primitives_made() -> int:
    """How many primitives were made so far, by all threads."""
    return _made[0]


class Primitive:
    """A `dnnl_primitive_t`. It has no state of a run: many may bind it, and threads may execute it at once."""

    __slots__ = ("__weakref__", "descriptor", "handle", "library")

    def __init__(self, library: Library, descriptor: PrimitiveDescriptor) -> None:
        self.library = library
        self.descriptor = descriptor
        handle = library.ffi.new("h *")
        library.use_one_thread()
        library.check_allowed(f"primitive {descriptor.name}")
        check_room(f"primitive {descriptor.name}")
        status = library.lib.dnnl_primitive_create(handle, descriptor.handle)
        if status:
            library.check_generated(status, f"primitive {descriptor.name}")
        self.handle = library.ffi.gc(handle[0], library.lib.dnnl_primitive_destroy)
        _made[0] += 1
        note_made()

    def bind(self, arguments: Mapping[int, tuple[Descriptor, Array]], label: str) -> BoundPrimitive:
        """The primitive on memory: by argument number, the descriptor and an array whose memory it describes."""
        memories = [
            memory_at(self.library, descriptor, array, address_of(array), label)
            for descriptor, array in arguments.values()
        ]
        return BoundPrimitive(self, tuple(arguments), memories, label)
