"""Descriptors of tensors and attributes of primitives, as oneDNN and Python have them.

A descriptor says shape, dtype and physical layout of a tensor; attributes say what a primitive does beside its
operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any

import numpy.typing as npt

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8, TypeMeta, from_name
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW, NCHW8C, NCHW16C, NHWC
from dagexec.ops.engines.onednn.binding import Library
from dagexec.platform.host_memory import aligned_bytes

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

_ANY = 1
_PLAIN_TAGS = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}  # a, ab, abc, ...
_CHANNELS_LAST_TAGS = {3: 15, 4: 22, 5: 33}  # acb, acdb, acdeb
_BLOCKED_8_TAGS = {3: 69, 4: 102, 5: 142}  # aBc8b, aBcd8b, aBcde8b
_BLOCKED_16_TAGS = {3: 56, 4: 78, 5: 121}  # aBc16b, aBcd16b, aBcde16b
_BLOCK_OF_TAG = dict.fromkeys(_BLOCKED_8_TAGS.values(), 8) | dict.fromkeys(_BLOCKED_16_TAGS.values(), 16)
_TAGS = {NCHW: _PLAIN_TAGS, NHWC: _CHANNELS_LAST_TAGS, NCHW8C: _BLOCKED_8_TAGS, NCHW16C: _BLOCKED_16_TAGS}


_Layout = tuple[tuple[int, ...], str, int | tuple[int, ...]]
"""Shape, element type, and strides or a tag."""

Cut = Mapping[int, tuple[int, range]]
"""By axis its whole size, and the indices of a part."""


class Described:
    """What stands for an object of the library.

    Attributes:
        handle: it; None without oneDNN.
        key: those of one key are equal; None where that is not known.
    """

    __slots__ = ("handle", "key")

    handle: Any
    key: Hashable | None


class Descriptor(Described):
    """A `dnnl_memory_desc_t`: logical shape, dtype and layout of a tensor. Immutable; freed with the object.

    Whoever asks for the same layout gets the same object, as long as somebody has it.
    """

    __slots__ = ("__weakref__", "_form", "_library")

    def __init__(self, library: Library, handle: Any, key: Hashable | None = None) -> None:
        """Take over `handle`, which nobody else frees."""
        self._library = library
        self._form: Hashable | None = None
        self.key = key
        self.handle = library.ffi.gc(handle, library.lib.dnnl_memory_desc_destroy) if library.has_primitives else None

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
        return cls._known(library, key, "strides", lambda: library.dims(strides))

    @classmethod
    def of(cls, library: Library, array: Array, meta: TypeMeta) -> Descriptor:
        """The shape and strides of a host array of element type `meta`."""
        size = array.itemsize
        return cls.strided(library, array.shape, meta, [step // size for step in array.strides])

    @classmethod
    def _tagged(cls, library: Library, shape: Sequence[int], meta: TypeMeta, tag: int) -> Descriptor:
        return cls._known(library, (tuple(shape), meta.name, tag), "tag", lambda: tag)

    @classmethod
    def _known(cls, library: Library, key: _Layout, kind: str, layout: Callable[[], object]) -> Descriptor:
        """The descriptor of a shape and an element type in a layout: `kind` is how the library is told that."""
        known = known_descriptors.get((id(library), key))
        if known is not None:
            return known
        shape, meta = key[0], _dtype(from_name(key[1]))
        handle = None
        if library.has_primitives:
            created = library.ffi.new("h *")
            create = getattr(library.lib, f"dnnl_memory_desc_create_with_{kind}")
            status = create(created, len(shape), library.dims(shape), meta, layout())
            if status:
                library.check(status, f"a descriptor of shape {shape} and {kind} {key[2]}")
            handle = created[0]
        found = known_descriptors[id(library), key] = cls(library, handle, key)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape; empty where it is not known."""
        known = self._layout
        return () if known is None else known[0]

    @property
    def _layout(self) -> _Layout | None:
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
    def form(self) -> Hashable:
        """The layout as text, the same for equal ones in all processes; a number where only the library knows it."""
        if self._form is None and not self._library.has_primitives:
            self._form = str(self.key)
        if self._form is None:
            self._form = _form_of_blocks(self._library, self) or _number_of(self)
        return self._form

    @property
    def nbytes(self) -> int:
        """Bytes a tensor takes, padding counted."""
        if not self._library.has_primitives:
            return _nbytes_of(*self._layout) if self._layout else 0
        return int(self._library.lib.dnnl_memory_desc_get_size(self.handle))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptor):
            return NotImplemented
        if not self._library.has_primitives:
            return self.key == other.key
        return bool(self._library.lib.dnnl_memory_desc_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]


def _nbytes_of(shape: tuple[int, ...], name: str, layout: int | tuple[int, ...]) -> int:
    """Bytes of a tensor of a shape and an element type, with strides or in the order that a tag says."""
    if isinstance(layout, tuple):
        elements = max((size * step for size, step in zip(shape, layout, strict=True)), default=1)
    else:
        block = _BLOCK_OF_TAG.get(layout, 1)
        elements = prod(-(-size // block) * block if axis == 1 else size for axis, size in enumerate(shape))
    return (elements if prod(shape) else 0) * from_name(name).itemsize


known_descriptors: weakref.WeakValueDictionary[Hashable, Descriptor] = weakref.WeakValueDictionary()


_STRIDES, _NDIMS, _DIMS, _DATA_TYPE, _PADDED_DIMS, _FORMAT_KIND = 14, 256, 257, 258, 260, 262
_INNER_COUNT, _INNER_BLOCKS, _INNER_AXES = 263, 264, 265
"""dnnl_query_t of a memory descriptor."""

_BLOCKED = 2  # dnnl_format_kind_t


def _form_of_blocks(library: Library, descriptor: Descriptor) -> str | None:
    """Shape, element type, strides and blocks; None for a layout that is more than these."""

    def number(query: int) -> int:
        found = library.ffi.new("int *")
        library.check(library.lib.dnnl_memory_desc_query(descriptor.handle, query, found), "a layout")
        return int(found[0])

    def numbers(query: int, count: int) -> list[int]:
        found = library.ffi.new("int64_t **")
        library.check(library.lib.dnnl_memory_desc_query(descriptor.handle, query, found), "a layout")
        return list(found[0][0:count])

    if number(_FORMAT_KIND) != _BLOCKED:
        return None
    rank, inner = number(_NDIMS), number(_INNER_COUNT)
    shape, padded, strides = (numbers(query, rank) for query in (_DIMS, _PADDED_DIMS, _STRIDES))
    blocks, axes = numbers(_INNER_BLOCKS, inner), numbers(_INNER_AXES, inner)
    counts = [
        size // prod(block for block, own in zip(blocks, axes, strict=True) if own == axis)
        for axis, size in enumerate(padded)
    ]
    span = sum((count - 1) * step for count, step in zip(counts, strides, strict=True)) + prod(blocks)
    meta = next((meta for meta, code in DTYPES.items() if code == number(_DATA_TYPE)), None)
    if meta is None or span * meta.itemsize != descriptor.nbytes:  # sums of int8 weights may lie behind them
        return None
    strides = [0 if count == 1 else step for count, step in zip(counts, strides, strict=True)]  # of one, any would do
    ends = "" if padded == shape else f" padded to {padded}"
    return f"{meta.name} {shape}{ends} strides {strides}" + (f" blocks {blocks} of axes {axes}" if inner else "")


_opaque: list[Descriptor] = []
"""Layouts that only the library knows; there are few."""


def _number_of(descriptor: Descriptor) -> int:
    """The place among the opaque layouts. Of equal ones that two threads add at once, the first counts for both."""
    if descriptor not in _opaque:
        _opaque.append(descriptor)
    return _opaque.index(descriptor)


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
        """The attributes for the library; None without it.

        Raises what `Library.check` raises, for a post-op that it does not know.
        """
        if self._handle is None and self._library.has_primitives:
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
        if isinstance(argument, (Described, Attributes)) and (key := argument.key) is not None:
            found.append(key)
        elif isinstance(argument, (int, tuple)):
            found.append(argument)
        elif isinstance(argument, float):
            found.append(argument.hex())  # -0.0 is another than 0.0
        else:
            return None
    return tuple(found)


def handle_of(argument: Any) -> Any:
    """What the library takes for an argument."""
    return argument.handle if isinstance(argument, (Described, Attributes)) else argument


def _dtype(meta: TypeMeta) -> int:
    try:
        return DTYPES[meta]
    except KeyError:
        raise UnsupportedFeatureError(f"element type {meta} for oneDNN") from None


def aligned_empty(nbytes: int) -> Array:
    """Bytes on a cache line, for weights and other memory of a primitive."""
    return aligned_bytes(nbytes, "memory of a primitive")
