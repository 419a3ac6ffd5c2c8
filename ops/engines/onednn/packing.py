"""Packed weights: how a constant comes to be in another form, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from dagexec.core.constant import Constant
from dagexec.core.device import CPU
from dagexec.core.tensor import Tensor
from dagexec.ops.engines.onednn.descriptors import Array, Descriptor
from dagexec.platform.addresses import address_of
from dagexec.platform.host_memory import unshared_bytes
from dagexec.platform.records import dataclass
from dagexec.platform.weight_memory import weight_memory


@dataclass(frozen=True)
class Making:
    """How a packed form is made that is more than another layout.

    Attributes:
        what: it is, for keys.
        nbytes: of it.
        fill: writes it to so many bytes on a line of a cache.
        unpack: writes to an array like the one that is packed what these bytes are of; None where nothing does.
    """

    what: str
    nbytes: int
    fill: Callable[[Array], None]
    unpack: Callable[[Array, Array], None] | None = None


def packed_form(constant: Constant, form: Hashable, making: Making) -> Array:
    """The values of `constant` as `form` and `making` say, in memory for packed weights; see `Constant.packed`.

    All that kernels and primitives read of constants in another layout comes through here. A form that is not text is
    of a layout that only the library knows.
    """

    whole = f"{making.what}, {form}" if isinstance(form, str) else (making.what, form)
    return constant.packed(whole, making.nbytes, lambda: _made(making))


def _made(making: Making) -> Array:
    array = weight_memory.take(making.nbytes)
    making.fill(array)
    return array


def form_of(source: Descriptor, target: Descriptor, start: int = 0) -> Hashable:
    """How what is read as `source`, from byte `start` of a tensor on, comes to be `target`."""
    ends = source.form, target.form
    if all(isinstance(one, str) for one in ends):
        return f"{ends[0]} from byte {start} to {ends[1]}"
    return *ends, start


def offer_unpacking(
    tensor: Tensor, view: Array, unpack: Callable[[Array], None], label: str, *, surely: bool = False
) -> None:
    """Let the constant `tensor` be made anew: `unpack` writes the values of `view` to an array of the same layout.

    That is done only where `view` is all of the tensor, on the host. Unless it `surely` does that, it is tried once.
    """
    constant = tensor.constant
    if constant is None or not constant.may_go(view.nbytes) or tensor.device != CPU:
        return
    if not _is_all_of(view, tensor.array):
        return
    layout, whole, nbytes = (view.shape, view.dtype, view.strides), tensor.shape, tensor.nbytes

    def make() -> Array:
        shape, dtype, strides = layout
        found = unshared_bytes(nbytes, f"{label}: weights").view(dtype)
        unpack(np.ndarray(shape, dtype, found, 0, strides))
        return found.reshape(whole)

    constant.can_be_made_by(make, surely=surely)


def _is_all_of(view: Array, array: Array) -> bool:
    """True when `view` has the elements of `array` in the same memory, in another order perhaps."""
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + view.itemsize
    is_inside = address_of(view) == address_of(array) and min(view.strides, default=0) >= 0
    return is_inside and view.dtype == array.dtype and view.size > 0 and view.nbytes == array.nbytes == span
