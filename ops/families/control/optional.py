"""Operators on optional values, and copies of values of any kind."""

from __future__ import annotations

from dagexec.core.blob import assign, content_of, set_content, tensor_in
from dagexec.core.dtypes import BOOL
from dagexec.core.gradient import no_gradient
from dagexec.core.registry import new_operator
from dagexec.core.variant import Variant
from dagexec.errors import MissingBlobError
from dagexec.ops.families.control.sequence import VariantOperator


@new_operator(
    "Optional",
    infer=None,
    on_host=True,
    doc="An optional that holds the input, a tensor or sequence, or without an input nothing.",
    inputs=(0, 1),
    input_names=("value",),
    output_names=("optional",),
)
class Optional(VariantOperator):
    """Hold it."""

    def compute(self) -> None:
        set_content(self.output_blobs[0], content_of(self.input_blobs[0]) if self.input_blobs else None)


@new_operator(
    "OptionalHasElement",
    infer=None,
    on_host=True,
    doc="True unless the input, an optional, tensor or sequence, holds nothing or is not given; has no axes.",
    inputs=(0, 1),
    input_names=("value",),
    output_names=("found",),
)
class OptionalHasElement(VariantOperator):
    """Look."""

    def compute(self) -> None:
        value = self.input_blobs[0].value if self.input_blobs else None
        found = value is not None and not (isinstance(value, Variant) and value.content is None)
        tensor_in(self.output_blobs[0]).resize((), BOOL)[...] = found


@new_operator(
    "OptionalGetElement",
    infer=None,
    on_host=True,
    doc="What the optional holds, a tensor or sequence; of a tensor or sequence, itself. Nothing is an error.",
    input_names=("optional",),
    output_names=("value",),
)
class OptionalGetElement(VariantOperator):
    """Take it out."""

    def compute(self) -> None:
        source, target = self.input_blobs[0], self.output_blobs[0]
        value = source.value
        if not isinstance(value, Variant) or isinstance(value.content, tuple):
            assign(target, source)
        elif value.content is None:
            raise MissingBlobError(f"{self.label}: optional {source.name!r} holds nothing")
        else:
            self.give(value.content)


@new_operator(
    "CopyValue",
    infer=None,
    on_host=True,
    doc="A copy of a tensor, sequence or optional.",
    input_names=("value",),
    output_names=("copy",),
)
class CopyValue(VariantOperator):
    """Values of tensors are copied, sequences share their arrays."""

    def compute(self) -> None:
        assign(self.output_blobs[0], self.input_blobs[0])


for _type in ("Optional", "OptionalHasElement", "OptionalGetElement", "CopyValue"):
    no_gradient(_type)
