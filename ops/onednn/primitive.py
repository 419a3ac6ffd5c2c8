"""Descriptors and primitives of oneDNN as Python objects, and primitives bound to arrays: steps that a run calls.

A descriptor says shape, dtype and physical layout of a tensor. A primitive is made for descriptors and a number of
threads; `PrimitiveDescriptor.implementations` walks those that the library offers. Bound to arrays, it becomes a
callable without arguments that costs about half a microsecond beyond the work itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8, TypeMeta, from_name
from dagexec.core.native import NativeCall
from dagexec.errors import DagexecError, UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW, NCHW8C, NCHW16C, NHWC
from dagexec.ops.onednn.binding import Library
from dagexec.platform.host_memory import aligned_bytes, check_room

Array = npt.NDArray[Any]

DTYPES: Mapping[TypeMeta, int] = {FLOAT16: 1, BFLOAT16: 2, FLOAT32: 3, INT32: 4, INT8: 5, UINT8: 6}
"""dnnl_data_type_t of the element types that oneDNN computes with."""

FORWARD_TRAINING, FORWARD_INFERENCE = 64, 96
"""dnnl_prop_kind_t."""

SRC, SRC_1, SRC_2, DST, DST_1, DST_2, WEIGHTS, WEIGHTS_1, BIAS = 1, 2, 3, 17, 18, 19, 33, 34, 41
MEAN, VARIANCE, SCALE, SHIFT, WORKSPACE, SCRATCHPAD = 49, 50, 51, 52, 64, 80
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS, DIFF_BIAS = 129, 145, 161, 169
MULTIPLE_SRC, ATTR_SCALES, ATTR_ZERO_POINTS, POST_OP = 1024, 4096, 8192, 32768
"""Argument numbers of an execution (`DNNL_ARG_*`): the second input of post-op i is POST_OP * (i + 1) | SRC_1."""

_QUERY_IMPLEMENTATION = 8
SRC_MD, DIFF_SRC_MD, WEIGHTS_MD, DIFF_WEIGHTS_MD, DST_MD, DIFF_DST_MD, WORKSPACE_MD, SCRATCHPAD_MD = range(129, 137)
EXEC_ARG_MD = 255
"""dnnl_query_t of memory descriptors; EXEC_ARG_MD takes an argument number as index."""

_ANY = 1
_PLAIN_TAGS = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}  # a, ab, abc, ...
_CHANNELS_LAST_TAGS = {3: 15, 4: 22, 5: 33}  # acb, acdb, acdeb
_BLOCKED_8_TAGS = {3: 69, 4: 102, 5: 142}  # aBc8b, aBcd8b, aBcde8b
_BLOCKED_16_TAGS = {3: 56, 4: 78, 5: 121}  # aBc16b, aBcd16b, aBcde16b
_BLOCK_OF_TAG = dict.fromkeys(_BLOCKED_8_TAGS.values(), 8) | dict.fromkeys(_BLOCKED_16_TAGS.values(), 16)
_TAGS = {NCHW: _PLAIN_TAGS, NHWC: _CHANNELS_LAST_TAGS, NCHW8C: _BLOCKED_8_TAGS, NCHW16C: _BLOCKED_16_TAGS}


Cut = Mapping[int, tuple[int, range]]
"""By axis its whole size, and the indices of a part."""


class Descriptor:
    """A `dnnl_memory_desc_t`: logical shape, dtype and layout of a tensor. Immutable; freed with the object.

    Whoever asks for the same layout gets the same object, as long as somebody has it.

    Attributes:
        key: descriptors of one key are equal; None where that is not known.
    """

    __slots__ = ("__weakref__", "_library", "handle", "key")

    def __init__(self, library: Library, handle: Any, key: Hashable | None = None) -> None:
        """Take over `handle`, which nobody else frees."""
        self._library = library
        self.key = key
        self.handle = library.ffi.gc(handle, library.lib.dnnl_memory_desc_destroy)

    @classmethod
    def any_layout(cls, library: Library, shape: Sequence[int], meta: TypeMeta) -> Descriptor:
        """A tensor whose layout the primitive chooses."""
        return cls._tagged(library, shape, meta, _ANY)

    @classmethod
    def of_order(cls, library: Library, shape: Sequence[int], meta: TypeMeta, order: str) -> Descriptor:
        """A tensor of logical `shape` (N, C, spatial) stored as `order` says, in NCHW packed."""
        tag = _TAGS[order].get(len(shape))
        if tag is None:
            raise UnsupportedFeatureError(f"a tensor of rank {len(shape)} in order {order} for oneDNN")
        return cls._tagged(library, shape, meta, tag)

    @classmethod
    def strided(cls, library: Library, shape: Sequence[int], meta: TypeMeta, strides: Sequence[int]) -> Descriptor:
        """A tensor with `strides` in elements."""
        key = tuple(shape), meta.name, tuple(strides)
        known = _descriptors.get((id(library), key))
        if known is not None:
            return known
        handle = library.ffi.new("h *")
        status = library.lib.dnnl_memory_desc_create_with_strides(
            handle, len(shape), library.dims(shape), _dtype(meta), library.dims(strides)
        )
        if status:
            library.check(status, f"a descriptor of shape {tuple(shape)} and strides {tuple(strides)}")
        found = _descriptors[id(library), key] = cls(library, handle[0], key)
        return found

    @classmethod
    def of(cls, library: Library, array: Array, meta: TypeMeta) -> Descriptor:
        """The shape and strides of a host array of element type `meta`."""
        size = array.itemsize
        return cls.strided(library, array.shape, meta, [step // size for step in array.strides])

    @classmethod
    def _tagged(cls, library: Library, shape: Sequence[int], meta: TypeMeta, tag: int) -> Descriptor:
        key = tuple(shape), meta.name, tag
        known = _descriptors.get((id(library), key))
        if known is not None:
            return known
        handle = library.ffi.new("h *")
        status = library.lib.dnnl_memory_desc_create_with_tag(
            handle, len(shape), library.dims(shape), _dtype(meta), tag
        )
        if status:
            library.check(status, f"a descriptor of shape {tuple(shape)}")
        found = _descriptors[id(library), key] = cls(library, handle[0], key)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape; empty where it is not known."""
        known = self._layout
        return () if known is None else known[0]

    @property
    def _layout(self) -> tuple[tuple[int, ...], str, int | tuple[int, ...]] | None:
        """Shape, element type, and strides or a tag; None where that is not known."""
        key: Any = self.key
        is_plain = isinstance(key, tuple) and len(key) == 3 and isinstance(key[1], str) and key[2] != _ANY
        return key if is_plain else None

    def part(self, cut: Cut) -> tuple[Descriptor, int]:
        """That of the part with some indices along some axes, and the bytes before it.

        Axes of size 1 stay. Raises UnsupportedFeatureError where an axis has another size, where the part does not end
        with blocks of channels, and where the layout is not known.
        """
        if self._layout is None:
            raise UnsupportedFeatureError("a layout of the library's own")
        shape, name, layout = self._layout
        block = _BLOCK_OF_TAG.get(layout, 1) if isinstance(layout, int) else 1
        meta, sizes, before = from_name(name), list(shape), 0
        for axis, (size, indices) in cut.items():
            if axis >= len(shape) or shape[axis] == 1:
                continue
            if shape[axis] != size:
                raise UnsupportedFeatureError(f"axis {axis} has {shape[axis]} elements, not {size}")
            if (
                block > 1
                and axis
                and (axis > 1 or indices.start % block or (indices.stop % block and indices.stop < size))
            ):
                raise UnsupportedFeatureError(f"a part of blocks of {block} channels")
            sizes[axis] = len(indices)
            step = self.nbytes // prod(shape[: axis + 1])
            if isinstance(layout, tuple):
                step = layout[axis] * meta.itemsize
            before += indices.start * step
        if isinstance(layout, tuple):
            return Descriptor.strided(self._library, sizes, meta, layout), before
        return Descriptor._tagged(self._library, sizes, meta, layout), before

    def first(self, shape: Sequence[int]) -> Descriptor:
        """That of the first elements along each axis of a tensor of this layout, in the same memory."""
        library, handle = self._library, self._library.ffi.new("h *")
        ends = library.dims(shape), library.dims([0] * len(shape))
        library.check(library.lib.dnnl_memory_desc_create_submemory(handle, self.handle, *ends), f"a part {shape}")
        return Descriptor(library, handle[0])

    @property
    def nbytes(self) -> int:
        """Bytes a tensor takes, padding counted."""
        return int(self._library.lib.dnnl_memory_desc_get_size(self.handle))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptor):
            return NotImplemented
        return bool(self._library.lib.dnnl_memory_desc_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]


_descriptors: weakref.WeakValueDictionary[Hashable, Descriptor] = weakref.WeakValueDictionary()


class Attributes:
    """A `dnnl_primitive_attr_t`: post-ops, scales, and working memory that the caller gives.

    It is made when its handle is requested: an operator whose primitive already exists needs none.
    """

    __slots__ = ("_handle", "_library", "_masks", "_post_ops")

    def __init__(self, library: Library) -> None:
        self._library = library
        self._handle: Any = None
        self._post_ops: list[tuple[str, tuple[object, ...]]] = []
        self._masks: list[tuple[str, int, int]] = []

    def eltwise(self, algorithm: int, alpha: float, beta: float) -> None:
        """Append an element-wise function of the result."""
        self._append("eltwise", algorithm, alpha, beta)

    def add_to_destination(self) -> None:
        """Append: the result is added to what the destination holds."""
        self._append("sum", 1.0, 0, 0)

    def binary(self, algorithm: int, other: Descriptor) -> None:
        """Append a function of the result and another, broadcast, tensor."""
        self._append("binary", algorithm, other)

    def scales(self, argument: int, mask: int) -> None:
        """Argument `argument` has scales along the axes of `mask`; they are given at execution."""
        self._masks.append(("scales", argument, mask))
        self._handle = None

    def zero_points(self, argument: int, mask: int) -> None:
        """Argument `argument` has zero points along the axes of `mask`; they are given at execution."""
        self._masks.append(("zero_points", argument, mask))
        self._handle = None

    def part(self, cut: Cut) -> Attributes:
        """Those for a part of the result. Raises what `Descriptor.part` raises."""
        found = Attributes(self._library)
        found._masks = list(self._masks)
        for kind, arguments in self._post_ops:
            found._append(kind, *(one.part(cut)[0] if isinstance(one, Descriptor) else one for one in arguments))
        return found

    def _append(self, kind: str, *arguments: object) -> None:
        self._post_ops.append((kind, arguments))
        self._handle = None

    @property
    def key(self) -> Hashable | None:
        """Attributes of one key are equal; None where that is not known."""
        links = tuple((kind, key_of(arguments)) for kind, arguments in self._post_ops)
        return None if any(key is None for _, key in links) else (links, tuple(self._masks))

    @property
    def handle(self) -> Any:
        """The attributes for the library. Raises what `Library.check` raises, for a post-op that it does not know."""
        if self._handle is None:
            self._handle = self._made()
        return self._handle

    def _made(self) -> Any:
        library, lib = self._library, self._library.lib
        made, post_ops = library.ffi.new("h *"), library.ffi.new("h *")
        library.check(lib.dnnl_primitive_attr_create(made), "primitive attributes")
        handle = library.ffi.gc(made[0], lib.dnnl_primitive_attr_destroy)
        library.check(lib.dnnl_primitive_attr_set_scratchpad_mode(handle, 1), "the scratchpad mode")
        for what, argument, mask in self._masks:
            library.check(getattr(lib, f"dnnl_primitive_attr_set_{what}_mask")(handle, argument, mask), what)
        if not self._post_ops:
            return handle
        library.check(lib.dnnl_post_ops_create(post_ops), "post-ops")
        chain = library.ffi.gc(post_ops[0], lib.dnnl_post_ops_destroy)
        for kind, arguments in self._post_ops:
            append = getattr(lib, f"dnnl_post_ops_append_{kind}")
            library.check(append(chain, *map(handle_of, arguments)), f"post-op {kind}")
        library.check(lib.dnnl_primitive_attr_set_post_ops(handle, chain), "post-ops")
        return handle


def key_of(arguments: Sequence[object]) -> Hashable | None:
    """Arguments of one key are equal for the library; None where one may be anything.

    They are numbers, tuples of integers, descriptors, attributes and primitive descriptors.
    """
    found: list[Hashable] = []
    for argument in arguments:
        if isinstance(argument, float):
            found.append(argument.hex())  # -0.0 is another than 0.0
        elif isinstance(argument, int | tuple):
            found.append(argument)
        elif isinstance(argument, Descriptor | Attributes | PrimitiveDescriptor) and (key := argument.key) is not None:
            found.append(key)
        else:
            return None
    return tuple(found)


def handle_of(argument: Any) -> Any:
    """What the library takes for an argument."""
    return argument.handle if isinstance(argument, Descriptor | Attributes | PrimitiveDescriptor) else argument


class PrimitiveDescriptor:
    """One implementation of an operation: its name, and the layouts that it wants.

    Attributes:
        key: descriptors of one key are the same; None where that is not known.
        request: what the library was asked for, the label and the arguments of `describe`.
    """

    __slots__ = ("__weakref__", "_ask", "_library", "_made", "_name", "_scratchpad_bytes", "handle", "key", "request")

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
        known = None if key is None else _descriptors.get((id(self._library), key))
        if known is not None:
            return known
        copy = self._library.ffi.new("h *")
        status = self._library.lib.dnnl_memory_desc_clone(copy, self._queried(query, index))
        self._library.check(status, "a descriptor of a primitive")
        found = Descriptor(self._library, copy[0], key)
        if key is not None:
            _descriptors[id(self._library), key] = found
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
    of them lives. Raises UnsupportedFeatureError, naming `label`, when the library has none, and what `Library.check`
    raises.
    """
    if key is None:
        fixed = library.engine, library.ffi.NULL
        key = key_of([0 if any(argument is one for one in fixed) else argument for argument in arguments])
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

    def bind(self, arguments: Mapping[int, tuple[Descriptor, Array]], label: str) -> BoundPrimitive:
        """The primitive on memory: by argument number, the descriptor and an array whose memory it describes."""
        memories = [
            memory_at(self.library, descriptor, array, array.ctypes.data, label)
            for descriptor, array in arguments.values()
        ]
        return BoundPrimitive(self, tuple(arguments), memories, label)


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
        address = self._library.ffi.cast("void *", array.ctypes.data)
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
        functions, primitive = _functions(self.primitive.library), self.primitive
        cast = primitive.library.ffi.cast
        handle, packed = (int(cast("uintptr_t", pointer)) for pointer in (primitive.handle, self._packed))
        arguments = (handle, functions.addresses[1], len(self._numbers), packed)
        set_threads = functions.addresses[2]
        before = (set_threads, 1) if set_threads else None
        return NativeCall(functions.addresses[0], arguments, before, self._failure, self)

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
        own = _Memory(self.primitive.library, memory.descriptor, array, array.ctypes.data, self._label)
        self._packed[place].memory = own.handle
        self._memories[place] = own


def bound_primitive_of(step: Callable[[], object]) -> BoundPrimitive | None:
    """The primitive that `step` executes, and its memory; None when it does something else."""
    return step if isinstance(step, BoundPrimitive) else None


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


def _dtype(meta: TypeMeta) -> int:
    try:
        return DTYPES[meta]
    except KeyError:
        raise UnsupportedFeatureError(f"element type {meta} for oneDNN") from None


def aligned_empty(nbytes: int) -> Array:
    """Bytes on a cache line, for weights and other memory of a primitive."""
    return aligned_bytes(nbytes, "memory of a primitive")
