"""What the library has code for: asked of it, because it differs between processors and versions.

For what it has no code for it offers its reference implementation, plain loops that are there to be right: a
convolution of 64 to 64 channels by 3x3 taps on 28x28 pixels takes 0.9 ms in NHWC with AVX2, and 2.7 s by those.
"""

from __future__ import annotations

from functools import cache

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.onednn.binding import Library, library
from dagexec.ops.engines.onednn.descriptors import FORWARD_INFERENCE, Attributes, Descriptor
from dagexec.ops.engines.onednn.primitive import describe

_DIRECT = 1
_CHANNELS, _SIZE, _KERNEL = 64, 28, 3


@cache
def widest_blocks() -> str | None:
    """The order with the largest blocks in which the library has code for a common convolution; None for no such."""
    found = library()
    orders = sorted(BLOCKS, key=BLOCKS.__getitem__, reverse=True)
    return None if found is None else next((order for order in orders if _convolves(found, order)), None)


def _convolves(found: Library, order: str) -> bool:
    image = Descriptor.of_order(found, (1, _CHANNELS, _SIZE, _SIZE), FLOAT32, order)
    weights = Descriptor.any_layout(found, (_CHANNELS, _CHANNELS, _KERNEL, _KERNEL), FLOAT32)
    handles = (image.handle, weights.handle, found.ffi.NULL, image.handle)
    strides, dilations, pads = (found.dims((size, size)) for size in (1, 0, _KERNEL // 2))
    attributes = Attributes(found)
    arguments = (FORWARD_INFERENCE, _DIRECT, *handles, strides, dilations, pads, pads, attributes.handle)
    try:
        return not describe(found, order, "convolution_forward", found.engine, *arguments).is_reference
    except UnsupportedFeatureError:
        return False
