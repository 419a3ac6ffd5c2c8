"""Concat by copies of our own, as the default engine would do them."""

from __future__ import annotations

from dagexec.core.registry import operator
from dagexec.ops.engines.onednn.copies import Moving
from dagexec.ops.families.shape import concat


class Joining(Moving):
    """What Concat and DepthConcat do."""

    repeats = False

    def prefers_default(self) -> bool:
        """True where the parts are in their place already."""
        return self.arguments.bool("zero_copy")


@operator(concat.Concat.schema, engine="ONEDNN")
class Concat(Joining, concat.Concat):
    """Inputs joined along an axis."""


@operator(concat.DepthConcat.schema, engine="ONEDNN")
class DepthConcat(Joining, concat.DepthConcat):
    """Inputs joined along the channels."""
