"""Buckets of gradients, in the order in which the backward pass makes them: the last layers' first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagexec.core.gradient import Gradient, SparseGradient
from dagexec.core.proto import OperatorDef
from dagexec.core.schema import TensorType
from dagexec.errors import ArgumentError
from dagexec.platform.records import dataclass

DEFAULT_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed over the devices together.

    Attributes:
        name: the blob that has them all.
        gradients: the gradients, of one element type.
        after: the operator, by its position in the list, that writes the last of them.
        nbytes: bytes of all.
    """

    name: str
    gradients: tuple[str, ...]
    after: int
    nbytes: int


def fill_buckets(
    operators: Sequence[OperatorDef],
    gradients: Mapping[str, Gradient],
    types: Mapping[str, TensorType],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """The dense gradients of `operators` in buckets, each closed when it has `bucket_bytes` or more.

    `types` are those of the parameters. Gradients of different element types go into different buckets.
    Raises ArgumentError for a size of less than one byte.
    """
    if bucket_bytes < 1:
        raise ArgumentError(f"bucket_bytes must be at least 1, found {bucket_bytes}")
    written = {name: index for index, definition in enumerate(operators) for name in definition.output}
    dense = [(written[blob], blob, types[name]) for name, blob in gradients.items() if isinstance(blob, str)]
    filled: dict[str, list[tuple[int, str, TensorType]]] = {}
    buckets: list[Bucket] = []

    def close(kind: str) -> None:
        content = filled.pop(kind)
        buckets.append(
            Bucket(
                f"gradient_bucket_{len(buckets)}",
                tuple(blob for _, blob, _ in content),
                content[-1][0],
                sum(type_.nbytes for _, _, type_ in content),
            )
        )

    for entry in sorted(dense, key=lambda entry: entry[0]):
        kind = entry[2].meta.name
        filled.setdefault(kind, []).append(entry)
        if sum(found.nbytes for _, _, found in filled[kind]) >= bucket_bytes:
            close(kind)
    for kind in list(filled):
        close(kind)
    return tuple(buckets)


def sparse_gradients(gradients: Mapping[str, Gradient]) -> dict[str, SparseGradient]:
    """Those of `gradients` that are sparse, by parameter."""
    return {name: gradient for name, gradient in gradients.items() if isinstance(gradient, SparseGradient)}


def gathered(name: str) -> str:
    """The blob with the rows of the sparse gradient's blob `name` from all devices."""
    return f"{name}_of_all"


def reading_gathered(update: Sequence[OperatorDef], gradients: Mapping[str, Gradient]) -> tuple[OperatorDef, ...]:
    """The update operators, with the indices and values of all devices in place of their own."""
    own = {blob for gradient in sparse_gradients(gradients).values() for blob in (gradient.indices, gradient.values)}
    changed = []
    for definition in update:
        copy = OperatorDef()
        copy.CopyFrom(definition)
        copy.input[:] = [gathered(name) if name in own else name for name in definition.input]
        copy.output[:] = [gathered(name) if name in own else name for name in definition.output]
        changed.append(copy)
    return tuple(changed)
