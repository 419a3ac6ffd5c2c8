"""Arrays by name as arguments and results of Ray's calls.

Ray takes some 200 us to write a small array into a message and as long to read it; bytes cost it nothing. Large arrays
are left to it: it puts them in its object store, where the other side reads them without a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from dagexec.binding.io_binding import Array

MAX_INLINE_BYTES = 64 << 10
"""Arrays of no more than these bytes together travel as bytes: less than what Ray (100 kB) leaves in the message."""

Message = tuple[bytes, dict[str, Array] | None]
"""What goes as bytes, and the arrays that do not."""


def packed(arrays: Mapping[str, Array], rest: object = None) -> Message:
    """The arrays, to be sent, and what else there is to say."""
    plain = all(isinstance(array, np.ndarray) and not array.dtype.hasobject for array in arrays.values())
    if plain and sum(array.nbytes for array in arrays.values()) <= MAX_INLINE_BYTES:
        return pickle.dumps((dict(arrays), rest), protocol=5), None
    return pickle.dumps((None, rest), protocol=5), dict(arrays)


def unpacked(written: bytes, large: dict[str, Array] | None = None) -> tuple[dict[str, Array], Any]:
    """What `packed` was given. Large arrays are read-only views of the object store."""
    arrays, rest = pickle.loads(written)
    return arrays if large is None else large, rest
