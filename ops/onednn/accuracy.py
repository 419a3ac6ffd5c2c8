"""What a version of oneDNN computes too coarsely to be used: found out by computing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.errors import UnsupportedFeatureError
from dagexec.ops.onednn.binding import Library
from dagexec.ops.onednn.post_ops import ELTWISE
from dagexec.ops.onednn.primitive import DST, FORWARD_INFERENCE, SRC, Attributes, Descriptor, describe
from dagexec.ops.post_ops import PostOp

CLOSE = 1e-5
"""An error that is too large, relative to a result of 1 or more."""


def require_accurate(library: Library, post_ops: Sequence[PostOp], label: str) -> None:
    """Raise UnsupportedFeatureError for a post-op that the library computes too coarsely."""
    if any(post_op.kind == "gelu_erf" for post_op in post_ops) and not _is_gelu_accurate(library):
        version = ".".join(map(str, library.version))
        raise UnsupportedFeatureError(f"{label}: oneDNN {version} computes gelu_erf with errors above {CLOSE:g}")


@lru_cache
def _is_gelu_accurate(library: Library) -> bool:
    """False for 3.1 with AVX-512, whose error is 5e-4 near 5."""
    x = np.linspace(-6, 6, 1024, dtype=np.float32)
    y = np.empty_like(x)
    layout = Descriptor.of(library, x, FLOAT32)
    algorithm, alpha, beta = ELTWISE["gelu_erf"](0.0, 0.0)
    handles = (layout.handle, layout.handle)
    attributes = Attributes(library)
    function = (library.engine, FORWARD_INFERENCE, algorithm, *handles, alpha, beta, attributes.handle)
    describe(library, 1, "gelu_erf", "eltwise_forward", *function).create().bind(
        {SRC: (layout, x), DST: (layout, y)}, "gelu_erf"
    ).step()
    expected = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x.tolist()]
    return bool(np.abs(y - expected).max() < CLOSE)
