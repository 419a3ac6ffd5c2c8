"""What a version of oneDNN computes too coarsely to be used: found out by computing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import DST, FORWARD_INFERENCE, SRC, Attributes, Descriptor
from dagexec.ops.engines.onednn.post_ops import ELTWISE
from dagexec.ops.engines.onednn.primitive import describe
from dagexec.ops.families.activation.post_ops import PostOp

CLOSE = 2e-6
"""An error that is too large, absolute or, of results above 1, relative."""

SUSPECTS: Mapping[str, tuple[float, float, Callable[[float], float]]] = {
    "gelu_erf": (-6.0, 6.0, lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    "log": (0.5, 2.0, math.log),
}
"""Functions that some version computes coarsely: an interval where it does, and what they are."""


def require_accurate(library: Library, post_ops: Sequence[PostOp], label: str) -> None:
    """Raise UnsupportedFeatureError for a post-op that the library computes too coarsely."""
    for post_op in post_ops:
        if is_coarse(library, post_op):
            version = ".".join(map(str, library.version))
            what = f"oneDNN {version} computes {post_op.kind} with errors above {CLOSE:g}"
            raise UnsupportedFeatureError(f"{label}: {what}")


def is_coarse(library: Library, post_op: PostOp) -> bool:
    """True for a post-op that the library computes too coarsely."""
    return library.has_primitives and post_op.kind in SUSPECTS and not _is_accurate(library, post_op.kind)


@lru_cache
def _is_accurate(library: Library, kind: str) -> bool:
    """False in 3.1 with AVX-512 for gelu_erf, whose error is 5e-4 near 5, and log, 3e-6 near 1."""
    low, high, function = SUSPECTS[kind]
    x = np.linspace(low, high, 1024, dtype=np.float32)
    y = np.empty_like(x)
    layout = Descriptor.of(library, x, FLOAT32)
    algorithm, alpha, beta = ELTWISE[kind](0.0, 0.0)
    attributes = Attributes(library)
    wanted = (algorithm, layout.handle, layout.handle, alpha, beta, attributes.handle)
    found = describe(library, kind, "eltwise_forward", library.engine, FORWARD_INFERENCE, *wanted)
    found.create().bind({SRC: (layout, x), DST: (layout, y)}, kind).step()
    expected = np.array([function(value) for value in x.tolist()])
    return bool((np.abs(y - expected) < CLOSE * np.maximum(1, np.abs(expected))).all())
