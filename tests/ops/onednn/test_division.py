"""What `division` says of oneDNN's primitives holds of those that run here, for rows of any number."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.core.dtypes import FLOAT32
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import (
    DST,
    FORWARD_INFERENCE,
    SCRATCHPAD,
    SRC,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
    aligned_empty,
)
from dagexec.ops.engines.onednn.division import adds_up_alike
from dagexec.ops.engines.onednn.operator import reorder
from dagexec.ops.engines.onednn.primitive import SCRATCHPAD_MD, WEIGHTS_MD, PrimitiveDescriptor, describe
from dagexec.ops.engines.onednn.problem import Candidate
from tests.ops.onednn.engine import needs_onednn, normal
from tests.ops.running import the_library

pytestmark = needs_onednn

ROWS = (1, 2, 5, 17, 64)


def computed(library: Library, found: PrimitiveDescriptor, tensors: dict[int, tuple[Descriptor, Array]]) -> None:
    """Execute the implementation on its tensors, with the weights in the layout that it wants."""
    source, array = tensors[WEIGHTS]
    target = found.descriptor(WEIGHTS_MD)
    packed = aligned_empty(target.nbytes)
    reorder(library, "test", source, target, array, packed, aligned_empty).run_once()
    arguments = {**tensors, WEIGHTS: (target, packed)}
    if found.scratchpad_bytes:
        arguments[SCRATCHPAD] = found.descriptor(SCRATCHPAD_MD), aligned_empty(found.scratchpad_bytes)
    found.create().bind(arguments, "test").run_once()


@pytest.mark.parametrize("turned", [False, True], ids=["as rows", "by columns"])
@pytest.mark.parametrize("inner", [60, 1024, 1040, 2047, 2100])
@pytest.mark.parametrize("function", ["inner_product_forward", "matmul"])
def test_a_row_of_a_product_has_one_order(function: str, inner: int, turned: bool) -> None:
    library = the_library()
    if turned and function == "inner_product_forward":
        pytest.skip("an inner product reads rows")
    x, w = normal(1, max(ROWS), inner), normal(2, inner, 48)
    found: dict[str, bytes] = {}
    for rows in ROWS:
        y = np.empty((rows, 48), np.float32)
        given = np.asfortranarray(x[:rows]) if turned else x[:rows].copy()
        weights = w if function == "matmul" else w.T
        layouts = [Descriptor.of(library, array, FLOAT32) for array in (given, weights, y)]
        free = Descriptor.any_layout(library, weights.shape, FLOAT32)
        kind = (FORWARD_INFERENCE,) if function != "matmul" else ()
        asked = (*kind, layouts[0], free, library.ffi.NULL, layouts[2], Attributes(library))
        for one in describe(library, "test", function, library.engine, *asked).implementations():
            if not Candidate(one.name, one).is_batch_invariant:
                continue
            tensors = {SRC: (layouts[0], given), WEIGHTS: (layouts[1], weights), DST: (layouts[2], y)}
            computed(library, one, tensors)
            if not turned or rows > 1:  # a row by itself is also a column
                assert found.setdefault(one.name, y[:1].tobytes()) == y[:1].tobytes(), (one.name, rows)


@pytest.mark.parametrize(("channels", "filters"), [(24, 16), (331, 64), (1290, 40), (2600, 33)])
def test_a_convolution_of_one_tap_adds_up_alike(channels: int, filters: int) -> None:
    library = the_library()
    x, w = normal(1, 5, 6, 7, channels), normal(2, filters, channels, 1, 1)
    found: dict[str, bytes] = {}
    for images in (1, 2, 5):
        y = np.empty((images, 6, 7, filters), np.float32)
        source, target = (
            Descriptor.of_order(library, (images, size, 6, 7), FLOAT32, "NHWC") for size in (channels, filters)
        )
        ones, zeros = library.dims((1, 1)), library.dims((0, 0))
        asked = (
            FORWARD_INFERENCE,
            1,
            source,
            Descriptor.any_layout(library, w.shape, FLOAT32),
            library.ffi.NULL,
            target,
        )
        geometry = (ones, zeros, zeros, zeros, Attributes(library))
        kinds = describe(library, "test", "convolution_forward", library.engine, *asked, *geometry)
        for one in kinds.implementations():
            if not adds_up_alike(one.name):
                continue
            layout = Descriptor.of(library, w, FLOAT32)
            computed(library, one, {SRC: (source, x[:images]), WEIGHTS: (layout, w), DST: (target, y)})
            assert found.setdefault(one.name, y[:1].tobytes()) == y[:1].tobytes(), (one.name, images)
