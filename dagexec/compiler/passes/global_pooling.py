"""global-pooling: a mean over all pixels that keeps its axes becomes a global `AveragePool`, which has fast engines."""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.node import new_node


def edit(draft: Draft) -> None:
    """Rewrite `ReduceMean` over the spatial axes of N, C, H, W or N, H, W, C; of one or three spatial axes, too.

    Without `keepdims` a `Squeeze` follows.
    """
    types = draft.types()
    for number in draft.having(_is_mean):
        if draft.is_free(number):
            _rewrite(draft, number, types)


def _rewrite(draft: Draft, number: int, types: Mapping[str, BlobType]) -> None:
    definition, arguments = draft[number], draft.arguments(number)
    kind = types.get(definition.input[0])
    if kind is None or kind.rank not in (3, 4, 5) or kind.meta not in (FLOAT32, FLOAT64):
        return
    axes = sorted(axis % kind.rank for axis in arguments.ints("axes"))
    order: dict[str, ArgumentValue]
    if axes == list(range(2, kind.rank)):
        order = {}
    elif axes == list(range(1, kind.rank - 1)):
        order = {"order": "NHWC"}
    else:
        return
    source, [target] = definition.input[0], definition.output
    keeps = arguments.int("keepdims", 1)
    pooled = target if keeps else draft.fresh(f"{target}/pooled")
    pooling = new_node("AveragePool", [source], [pooled], name=definition.name, global_pooling=1, arg=order)
    draft.changed(f"{draft.label(number)} becomes a global AveragePool")
    draft.replace(number, pooling, *([] if keeps else [new_node("Squeeze", [pooled], [target], dims=axes)]))


_is_mean = of_type("ReduceMean")
PASS = Pass("global-pooling", "Means over all pixels become global average pooling.", edit, needs=(_is_mean,))
