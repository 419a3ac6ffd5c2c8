"""Arguments `shapes` and `dtypes`: the types of tensors that only a run brings, said beforehand.

An operator that takes tensors from a queue or a database has them, so that those behind it are prepared once.
"""

from __future__ import annotations

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, from_name
from dagexec.core.schema import TensorType
from dagexec.errors import ArgumentError

SHAPES = 'the shape of each tensor, as "64,1,28,28"; "" is a scalar\'s'
DTYPES = "the element type of each tensor by name (default: float32)"


def declared_types(arguments: Arguments, count: int, owner: str) -> list[TensorType] | None:
    """The `count` types that `shapes` and `dtypes` say, None without `shapes`. Raises ArgumentError."""
    if "shapes" not in arguments:
        if "dtypes" in arguments:
            raise ArgumentError(f"{owner}: argument 'dtypes' requires 'shapes', which is missing")
        return None
    shapes = [_shape(text, owner) for text in arguments.strings("shapes")]
    names = arguments.strings("dtypes")
    metas = [from_name(name) for name in names] if names else [FLOAT32] * len(shapes)
    if len(shapes) != count or len(metas) != count:
        raise ArgumentError(
            f"{owner}: expected {count} shapes and dtypes, one for each tensor; found {len(shapes)} and {len(metas)}"
        )
    return [TensorType(shape, meta) for shape, meta in zip(shapes, metas, strict=True)]


def _shape(text: str, owner: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(extent) for extent in text.split(",")) if text.strip() else ()
    except ValueError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise ArgumentError(f"{owner}: argument 'shapes': expected sizes such as '64,1,28,28', found {text!r}")
    return shape
