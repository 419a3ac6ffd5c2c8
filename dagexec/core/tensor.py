"""Tensor: shape, dtype, device, and storage that several tensors may share.

A tensor's `array` is a NumPy (or, on another device, NumPy-like) array over its storage. Prepared steps keep that
array, so whoever replaces it (`resize` to another shape, `adopt`, `share`) makes the steps that hold it out of date.
`binding_epoch` changes with every such replacement anywhere, so that a net can see in one comparison that nothing has
changed since its steps were prepared, and look closer only when something has.

A tensor is packed unless it was given another layout, by `adopt_strided` or by `feed` with a descriptor; its array has
these strides then, and operators that cannot read them get a packed copy (see `dagexec.core.conversion`).
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.constant import Constant, letting_go
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import FLOAT32, STRING, TypeMeta
from dagexec.core.runtime import DeviceRuntime, runtime_of
from dagexec.core.shapes import element_count
from dagexec.errors import MissingBlobError, ShapeError
from dagexec.platform.addresses import address_of
from dagexec.platform.host_memory import check_fits, commit, reserve

Shape = tuple[int, ...]

_epochs = itertools.count(1)
_epoch = [0]


def binding_epoch() -> int:
    """A number that is new after any tensor, anywhere, was given another array, or any blob another tensor."""
    return _epoch[0]


def advance_binding_epoch() -> None:
    """Make `binding_epoch` a number never used before. Call it after the change."""
    _epoch[0] = next(_epochs)


class Storage:
    """A block of device memory: `capacity` bytes (elements for strings), shared by every tensor that views it.

    There may be more of it, of which nothing was taken from the system yet.

    Memory that is `reused` holds other tensors at other times of a run, so after the run its content is undefined.
    """

    __slots__ = ("buffer", "capacity", "reused", "writable")

    def __init__(self, buffer: npt.NDArray[Any], capacity: int, writable: bool = True, *, reused: bool = False) -> None:
        self.buffer = buffer
        self.capacity = capacity
        self.writable = writable
        self.reused = reused


class Tensor:
    """An n-dimensional array on a device.

    A new tensor is empty: reading `array` raises MissingBlobError until `resize`, `adopt` or `share` gave it content.

    Attributes:
        runtime: of the device whose memory it is in.
        shape, meta: of its elements.
    """

    __slots__ = (
        "__weakref__", "_address", "_array", "_constant", "_grows", "_is_view", "_storage", "meta", "runtime", "shape",
    )  # fmt: skip

    def __init__(self, device: Device = CPU) -> None:
        """Raises DeviceError when there is no such device here."""
        self.runtime: DeviceRuntime = runtime_of(device)
        self._storage: Storage | None = None
        self._array: npt.NDArray[Any] | None = None
        self._address: int | None = None
        self._is_view = False
        self._grows = False
        self._constant: Constant | None = None
        self.shape: Shape = ()
        self.meta: TypeMeta = FLOAT32

    @property
    def device(self) -> Device:
        """Where the memory is."""
        return self.runtime.device

    @property
    def is_empty(self) -> bool:
        """True until the tensor was given content."""
        return self._array is None and self._constant is None

    @property
    def is_elsewhere(self) -> bool:
        """True of a constant whose values are in memory only as something that was made of them (see `let_go`)."""
        return self._array is None and self._constant is not None

    @property
    def array(self) -> npt.NDArray[Any]:
        """The array over this tensor's storage; writing to it changes every tensor that shares the storage."""
        return self._found() if self._array is None else self._array

    def _found(self) -> npt.NDArray[Any]:
        """The array of a constant, made anew if need be. Raises MissingBlobError for an empty tensor."""
        constant = self._constant
        if constant is None:
            raise MissingBlobError("the tensor is empty: feed it, or run the net that fills it")
        with letting_go.own:
            found = self._array
            if found is None:
                storage = self._storage
                assert storage is not None
                storage.buffer = constant.made_anew().reshape(-1).view(np.uint8)
                self._address = None
                found = self._array = self._constant_array(storage)
        return found

    def _constant_array(self, storage: Storage) -> npt.NDArray[Any]:
        array = array_on(storage.buffer, self.shape, self.meta)
        array.flags.writeable = False
        return array

    @property
    def address(self) -> int:
        """Where `array`, in memory that the host reaches, begins."""
        address = self._address
        if address is None:
            address = self._address = address_of(self.runtime.host_view(self.array))
        return address

    @property
    def is_view(self) -> bool:
        """True when the storage is another tensor's, by `share`."""
        return self._is_view

    @property
    def is_packed(self) -> bool:
        """True when the elements fill their memory in the order of their indices; also of an empty tensor."""
        return self._array is None or bool(self._array.flags.c_contiguous)

    @property
    def descriptor(self) -> TensorDescriptor:
        """The layout. Raises MissingBlobError when the tensor is empty."""
        return TensorDescriptor.of(self.array)

    @property
    def constant(self) -> Constant | None:
        """Where results of these values are kept, for a tensor that `freeze` made constant; otherwise None."""
        return self._constant

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (capacity may be larger)."""
        return element_count(self.shape) * self.meta.itemsize

    @property
    def capacity(self) -> int:
        """Bytes the storage holds, 0 without storage."""
        return self._storage.capacity if self._storage else 0

    def current_array(self) -> npt.NDArray[Any] | None:
        """The array, or None while empty; the identity prepared steps compare."""
        return self._array

    def resize(self, shape: Shape, meta: TypeMeta) -> npt.NDArray[Any]:
        """Take on `shape` and `meta` and return an array to write to; values are undefined after a change.

        Nothing happens when both are unchanged, so that a strided tensor stays strided; otherwise it becomes packed.
        Memory is kept while its capacity suffices, so shrinking and growing back allocates nothing. A tensor that is
        strided or on memory that is not its own to write, another tensor's or an adopted array, leaves it for new
        memory, with its values when the dtype and the number of elements stay: so an operator may work on it in place.
        Raises ResourceError when the size would not fit in memory.
        """
        previous = None if self.is_empty else self.array
        owned = self._owns_memory()
        if previous is not None and self.shape == shape and self.meta is meta and owned:
            return previous
        owned = owned and self.is_packed
        count = element_count(shape)
        needed = count if meta is STRING else count * meta.itemsize
        keep = previous is not None and not owned and self.meta is meta and previous.size == count
        storage = self._storage
        holds_strings = self.meta is STRING
        if storage is None or not owned or storage.capacity < needed or holds_strings != (meta is STRING):
            what = f"a {meta} tensor of shape {shape}"
            grows = self._grows and STRING not in (self.meta, meta)
            grown = self._grown(storage if owned else None, needed, what) if grows else None
            if grown is None:
                check_fits(count * meta.itemsize, what)
                grown = self._allocate(needed, meta)
            storage = grown
        self._bind(storage, array_on(storage.buffer, shape, meta), meta)
        if keep and previous is not None:
            self.runtime.copy_now(self.array, previous.reshape(shape))
        return self.array

    def grow_in_place(self) -> None:
        """From now on have the memory grow where it is, as far as there are addresses behind it, when a shape does.

        Arrays of other shapes then lie in the same memory: what was prepared for them needs none of its own.
        """
        self._grows = self.device == CPU

    def make_room(self, nbytes: int) -> bool:
        """Have memory for so many bytes from the first element on, the elements unchanged; False where that cannot be.

        Only a tensor that grows in place is brought elsewhere for it. Raises ResourceError when it would not fit.
        """
        storage = self._storage
        if storage is None or storage.reused or not storage.writable or not self.is_packed or self.meta is STRING:
            return False
        if self.address != address_of(storage.buffer):
            return False
        is_large = storage.buffer.nbytes >= nbytes
        if not is_large and (self._is_view or not self._grows):
            return False
        if storage.capacity < nbytes:
            grown = self._grown(storage, nbytes, f"room for {nbytes} bytes")
            if grown is None:
                return False
            if grown is not storage:
                array = array_on(grown.buffer, self.shape, self.meta)
                array[...] = self.array
                self._bind(grown, array, self.meta)
        return True

    @staticmethod
    def _grown(storage: Storage | None, needed: int, what: str) -> Storage | None:
        """`storage` with `needed` bytes, or another that may grow; None where there are no addresses for one.

        Raises ResourceError, naming `what` they are for, when they would not fit in memory.
        """
        if storage is None or storage.buffer.nbytes < needed:
            check_fits(needed, what)
            buffer = reserve(needed)
            if buffer is None:
                return None
            storage = Storage(buffer, 0)
        check_fits(needed - storage.capacity, what)
        commit(storage.buffer, needed - storage.capacity, storage.capacity)
        storage.capacity = needed
        return storage

    def growth(self, nbytes: int) -> int:
        """Bytes that the tensor would hold beside those it does, had it to hold `nbytes`."""
        return max(0, nbytes - self.capacity) if self._owns_memory() and self.meta is not STRING else nbytes

    def clear(self) -> None:
        """Let go of content and memory: the tensor is empty again."""
        self._storage = self._array = self._address = self._constant = None
        self._is_view = False
        advance_binding_epoch()

    def adopt(self, array: npt.NDArray[Any], writable: bool = False) -> None:
        """Use `array`'s own memory, without a copy. Unless `writable`, a later `resize` allocates instead of writing.

        Raises ShapeError for a dtype that tensors do not hold. `array` must be C-contiguous, or it is copied; see
        `adopt_strided` for other layouts.
        """
        meta = dtypes.from_numpy(array.dtype)
        contiguous = np.ascontiguousarray(array).reshape(array.shape)
        if meta is STRING:
            contiguous = as_bytes_objects(contiguous)
        flat = contiguous.reshape(-1)
        buffer = flat if meta is STRING else flat.view(np.uint8)
        self._bind(Storage(buffer, buffer.size, writable), contiguous, meta)

    def adopt_strided(self, array: npt.NDArray[Any], writable: bool = False) -> None:
        """Use `array`'s own memory with its own strides, which may overlap, without a copy.

        A `resize` to its own shape and dtype keeps it when it is `writable`. Any other takes new memory: the gaps
        between the elements are the caller's. Raises ShapeError for a dtype that tensors do not hold, for strings that
        are not all `bytes`, and for the strides that `TensorDescriptor.of` refuses.
        """
        if array.flags.c_contiguous:
            self.adopt(array, writable)
            return
        meta = dtypes.from_numpy(array.dtype)
        TensorDescriptor.of(array)
        if meta is STRING and not all(isinstance(item, bytes) for item in array.flat):
            raise ShapeError("a strided tensor of strings holds bytes only: encode them, or adopt a packed array")
        nothing = np.empty(0, np.object_ if meta is STRING else np.uint8)
        self._bind(Storage(nothing, 0, writable and bool(array.flags.writeable)), array.view(), meta)

    def freeze(self) -> None:
        """Make the tensor constant: nothing writes to its memory any more, and `array` is read-only.

        Feeding or resizing it gives it other memory, and it is an ordinary tensor again. Raises MissingBlobError when
        it is empty, and ShapeError for a view, whose memory is another tensor's to write.
        """
        if self._is_view:
            raise ShapeError("a view cannot be made constant: freeze the tensor whose storage it shares")
        if self._constant is None:
            array, storage = self.array.view(), self._storage
            assert storage is not None
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
            self._bind(Storage(storage.buffer, storage.capacity, writable=False), array, self.meta)
            self._constant = Constant()

    def let_go(self) -> bool:
        """Let go of the memory of a constant that can be made anew; `array` does that when somebody asks for it.

        False, and nothing is done, where it cannot, or while anyone else has that memory.
        """
        constant, array, storage = self._constant, self._array, self._storage
        if constant is None or array is None or storage is None or not constant.can_go(array):
            return False
        with letting_go.own:
            if self._array is not array:
                return False
            owner = owner_of(array)
            start = address_of(array) - address_of(owner)
            seen, owners = weakref.ref(array), weakref.ref(owner)
            self._array = self._address = None
            storage.buffer = np.empty(0, np.uint8)
            del array, owner
            kept = owners()
            if kept is not None:
                storage.buffer = kept.reshape(-1).view(np.uint8)[start : start + self.nbytes]
                array = seen()
                self._array = self._constant_array(storage) if array is None else array
        return kept is None

    def share(self, other: Tensor, shape: Shape | None = None) -> None:
        """Become a view of `other`'s storage, optionally with another shape of as many elements.

        Raises ShapeError when the element counts differ, or when the shapes do and `other` is strided, and
        MissingBlobError when `other` is empty.
        """
        target = other.shape if shape is None else shape
        if target != other.shape and not other.is_packed:
            raise ShapeError(f"a view of shape {target} needs a packed tensor, found one of {other.descriptor}")
        if element_count(target) != element_count(other.shape):
            raise ShapeError(f"a view of shape {target} cannot share the storage of a tensor of shape {other.shape}")
        self._bind(other._storage, other.array.reshape(target), other.meta)
        self._is_view = True

    def shares_storage_with(self, other: Tensor) -> bool:
        """True when both tensors are views of one storage."""
        return self._storage is not None and self._storage is other._storage

    def rebind(self, array: npt.NDArray[Any], storage: Storage | None, *, is_view: bool = False) -> None:
        """Return to an earlier array of this tensor, over `storage` (see `dagexec.scheduler.plan.preparation`)."""
        self._bind(storage, array, dtypes.from_numpy(array.dtype))
        self._is_view = is_view

    def place(self, array: npt.NDArray[Any], storage: Storage, meta: TypeMeta, address: int | None) -> None:
        """Lie in memory that a plan chose: `array` of elements `meta`, which begins at `address` if that is known."""
        self._bind(storage, array, meta)
        self._address = address

    def storage(self) -> Storage | None:
        """The storage, None while empty."""
        return self._storage

    def feed(self, array: npt.NDArray[Any], descriptor: TensorDescriptor | None = None) -> None:
        """Copy `array` in, packed or in the layout of `descriptor`.

        With unchanged shape, dtype and layout the copy goes into the memory already there. A view takes memory of its
        own first, so the tensor it viewed keeps its values. Raises ShapeError for a dtype that tensors do not hold, for
        a descriptor of another shape, and for an overlapping one, which cannot hold a value for each index.
        """
        meta = dtypes.from_numpy(array.dtype)
        source = as_bytes_objects(array) if meta is STRING else array
        if descriptor is not None:
            descriptor.check_holds(tuple(array.shape))
        if not self._owns_memory():
            self._storage = self._array = self._constant = None
        if descriptor is None or descriptor.is_packed:
            if not self.is_packed:
                self._storage = self._array = self._constant = None
            target = self.resize(tuple(array.shape), meta)
        else:
            target = self._lay_out(descriptor, meta)
        self.runtime.copy_now(target, source)

    def fetch(self) -> npt.NDArray[Any]:
        """A copy of the values as a NumPy array of the host that owns its memory. Waits until the device has it.

        Raises ResourceError when memory does not suffice.
        """
        check_fits(self.nbytes, f"a copy of a {self.meta} tensor of shape {self.shape}")
        if self.device == CPU:
            return np.array(self.array, copy=True, order="C")
        found = np.empty(self.shape, self.meta.numpy)
        self.runtime.copy_now(found, self.array)
        return found

    def _lay_out(self, descriptor: TensorDescriptor, meta: TypeMeta) -> npt.NDArray[Any]:
        """An array in the layout of `descriptor`: the one already there, or one over new memory."""
        if self._array is not None and self.meta is meta and self.descriptor.is_same_layout(descriptor):
            return self._array
        needed = descriptor.span if meta is STRING else descriptor.span * meta.itemsize
        check_fits(needed, f"a {meta} tensor of {descriptor}")
        storage = self._allocate(needed, meta)
        array = descriptor.view(array_on(storage.buffer, (descriptor.span,), meta))
        self._bind(storage, array, meta)
        return array

    def _owns_memory(self) -> bool:
        return not self._is_view and (self._storage is None or self._storage.writable)

    def _allocate(self, count: int, meta: TypeMeta) -> Storage:
        if meta is STRING:
            if self.device != CPU:
                raise ShapeError(f"a tensor of strings cannot be on {self.device}: strings are kept on the host")
            return Storage(np.full(count, b"", np.object_), count)
        return Storage(self.runtime.allocate(count), count)

    def _bind(self, storage: Storage | None, array: npt.NDArray[Any], meta: TypeMeta) -> None:
        self._storage = storage
        self._array = array
        self._address = None
        self._is_view = False
        self._constant = None
        self.shape = tuple(array.shape)
        self.meta = meta
        advance_binding_epoch()

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.meta}, device={self.device})"


def owner_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array whose memory `array` views, or itself."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base


def array_on(buffer: npt.NDArray[Any], shape: tuple[int, ...], meta: TypeMeta) -> npt.NDArray[Any]:
    """An array of `shape` and `meta` over the first bytes of `buffer` (an object buffer for strings)."""
    count = element_count(shape)
    if meta is STRING:
        return buffer[:count].reshape(shape)
    return buffer[: count * meta.itemsize].view(meta.numpy).reshape(shape)


def as_bytes_objects(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An object array of `bytes` from one of str or bytes.

    Raises ShapeError for an object of another kind, and ResourceError for more than there is room for: strings of no
    length take no bytes in a file, however many they are.
    """
    check_fits(16 * array.size, f"{array.size:,} strings")
    flat = np.empty(array.size, np.object_)
    for index, item in enumerate(array.reshape(-1).tolist()):
        if not isinstance(item, str | bytes):
            raise ShapeError(f"a tensor of strings holds str or bytes, found {type(item).__name__} at element {index}")
        flat[index] = item.encode(errors="surrogateescape") if isinstance(item, str) else item
    return flat.reshape(array.shape)
