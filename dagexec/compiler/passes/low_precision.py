"""Which passes give a net another precision than float32, and where they stand among the others.

Models that say themselves what is quantized (QuantizeLinear and DequantizeLinear, or operators on integers) are taken
at their word, before constants are folded: on the host always, on devices for int8. Others need sample inputs to become
int8. Both are done before layers are fused with what follows them: the operators on integers have fusions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from dagexec.compiler.passes import bfloat16
from dagexec.compiler.passes import quantized_operators as quantized_operators
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.feeds import Feeds
from dagexec.core.registry import schema_of
from dagexec.errors import FeedError
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    quantization = LazyModule("dagexec.compiler.passes.quantization")
else:
    from dagexec.compiler.passes import quantization


PRECISION_PASSES: tuple[Pass, ...] = (quantized_operators.PASS, bfloat16.PASS)
"""Those that some dtype adds, for their names."""

_BEFORE_FOLDING = "constant-folding"
_BEFORE_FUSION = "convolution-sums"


def with_precision(passes: Sequence[Pass], dtype: str, feeds: Sequence[Feeds] = ()) -> tuple[Pass, ...]:
    """`passes`, among them those that `dtype` ("float32", "bfloat16", "float16" or "int8") needs.

    `feeds` are sample inputs, each for one run, that int8 is calibrated with. Raises ValueError for another dtype.
    """
    if dtype == "float32":
        return tuple(passes)
    if dtype == "bfloat16":
        return _inserted(passes, _BEFORE_FUSION, bfloat16.PASS)
    if dtype == "float16":
        return _inserted(passes, _BEFORE_FUSION, bfloat16.FLOAT16_PASS)
    if dtype != "int8":
        raise ValueError(f"dtype is one of float32, bfloat16, float16, int8, not {dtype!r}")
    calibrated = partial(_calibrated, feeds=tuple(feeds))
    precision = Pass(
        "precision", "convolutions and products on 8-bit integers, by calibration", calibrated, retypes=True
    )
    return _inserted(with_integers(passes), _BEFORE_FUSION, precision)


def with_integers(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """`passes` with the one that computes on integers what a model says to be quantized."""
    if quantized_operators.PASS in passes:
        return tuple(passes)
    return _inserted(passes, _BEFORE_FOLDING, quantized_operators.PASS)


def _inserted(passes: Sequence[Pass], before: str, added: Pass) -> tuple[Pass, ...]:
    """`passes` with `added` before the one called `before`, or at the end."""
    names = [one.name for one in passes]
    place = names.index(before) if before in names else len(names)
    return (*passes[:place], added, *passes[place:])


def _calibrated(draft: Draft, feeds: tuple[Feeds, ...]) -> None:
    """Integers where that loses little; nothing for a model that says itself what is quantized.

    Raises FeedError when neither it nor `feeds` tell.
    """
    if not feeds:
        if any(schema_of(definition.type).is_quantized for definition in draft.nodes()):
            return
        raise FeedError(
            f"model {draft.model.name!r}: int8 needs sample inputs to calibrate with (calibration=), or a model with "
            "QuantizeLinear and DequantizeLinear"
        )
    qdq = quantization.with_quantization(draft.model, feeds)
    fused = quantized_operators.PASS.apply(qdq.model)
    draft.become(fused.model, (*qdq.changes, *fused.changes))


def before_precision(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Those of `passes` that come before a net gets another precision."""
    names = [one.name for one in passes]
    return tuple(passes[: names.index(_BEFORE_FUSION)] if _BEFORE_FUSION in names else passes)
